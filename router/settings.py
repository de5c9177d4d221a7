"""What can be set on a router process; ``docs/configuration.md`` lists every field."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from poolgrid.discovery.settings import NamesSettings
from poolgrid.http.http_settings import ServerSettings
from poolgrid.process.nats_settings import EventPlaneSettings
from poolgrid.process.settings import ZmqAddress
from poolgrid.process.tracing.settings import TraceSettings
from poolgrid.router.core.cost_weights import CostWeights
from poolgrid.router.core.decision import DECISION_LOG_BYTES
from poolgrid.router.core.hold_plan import HOLD_LIMIT_MS
from poolgrid.router.core.load_ledger import CROWDING_RETRIES, LEDGER_BYTES
from poolgrid.router.endpoint_picker.settings import EndpointPickerSettings
from poolgrid.serving.prompt_paths import BUDGET_BYTES
from poolgrid.serving.reuse_sketch import SKETCH_BYTES
from poolgrid.wire.names import is_name


class RouterSettings(ServerSettings, TraceSettings, EventPlaneSettings, NamesSettings, EndpointPickerSettings):
    """Selection, admission, dispatch and HTTP of one router."""

    select_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port at which global routers ask this pool to select and reserve workers; 0 takes any free one.",
    )
    http_workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that share the HTTP port, each a router of its own over the same event stream, with its "
        "own admission queue and caches. One uses one core; take as many as there are cores to spare.",
    )
    feed_endpoint: ZmqAddress | None = Field(
        None,
        description="Feed of a consolidator that runs alone (tcp://host:port, with names also "
        "dyn://namespace.consolidator.feed), with query_endpoint; without them, one runs inside this process.",
    )
    query_endpoint: ZmqAddress | None = Field(
        None,
        description="Where that consolidator answers replay and snapshot requests (tcp://host:port, with names also "
        "dyn://namespace.consolidator.query).",
    )
    policy: str = Field(
        "kv",
        examples=["kv", "approximate", "predicted", "field", "lmetric", "round-robin", "random", "least-loaded"],
        description="How a worker is chosen: kv, approximate, predicted, field, lmetric, round-robin, random, "
        "least-loaded, or module:Class of your own.",
    )
    prefill_weight: float = Field(1.0, ge=0, le=1000, description="Cost of one block that must be computed.")
    queue_weight: float = Field(
        0.25, ge=0, le=1000, description="How much prompt tokens that a worker still has to compute for others count."
    )
    decode_weight: float = Field(0.02, ge=0, le=1000, description="Cost of one KV block of a worker's active requests.")
    device_weight: float = Field(
        1.0, ge=0, le=1000, description="Credit for one block in device memory; 0 ignores caches."
    )
    host_weight: float = Field(0.75, ge=0, le=1000, description="Credit for one block in host memory only.")
    disk_weight: float = Field(0.25, ge=0, le=1000, description="Credit for one block on disk only.")
    temperature: float = Field(
        0.0, ge=0, le=1000, description="Above 0, workers are sampled by cost instead of taking the cheapest."
    )
    approximate_ttl_ms: float = Field(
        120_000, gt=0, description="How long the approximate policy believes that a worker holds what it was sent."
    )
    index_budget_bytes: int = Field(
        4 * 1024**3, ge=1024, description="Memory the prefix index may use; beyond it the oldest paths are cut."
    )
    path_cache_bytes: int = Field(
        BUDGET_BYTES,
        ge=0,
        le=1024**4,
        description="Memory for the sequence hashes of prompt parts that come again; 0 computes all of them each time.",
    )
    reuse_sketch_bytes: int = Field(
        SKETCH_BYTES,
        ge=0,
        le=1024**4,
        description="Memory for what prompts were seen, from which poolgrid_router_achievable_tokens_total says what "
        "an infinite shared cache would have reused; 9 bytes a block and 180 for each prompt that is new, "
        "and 0 leaves the metric at 0.",
    )
    decision_log_bytes: int = Field(
        DECISION_LOG_BYTES,
        ge=65_536,
        description="Memory the decisions kept for /v1/decisions may use; the oldest is forgotten first.",
    )
    ledger_budget_bytes: int = Field(
        LEDGER_BYTES,
        ge=65_536,
        description="Memory the requests in the load ledger may use; a further one is not counted as load, and that is "
        "counted in poolgrid_router_ledger_refused_entries_total.",
    )
    decision_log_length: int = Field(
        10_000, ge=1, le=1_000_000, description="Decisions kept for /v1/decisions; the oldest is forgotten first."
    )
    router_id: str = Field(
        "router",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of this router among those of its pool; its decisions are kept under it.",
    )
    record_decisions: bool = Field(
        True,
        description="With a data_dir, write every decision and what it depended on to decisions/ROUTER_ID there, for "
        "poolgrid replay, what-if and explain; segments and retention are the journal's.",
    )
    decision_queue_limit: int = Field(
        20_000,
        ge=100,
        le=10_000_000,
        description="Inputs of decisions that may wait to be written, about three seconds of a busy router; beyond it "
        "they are dropped, and the journal says how many.",
    )
    worker_queue_factor: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="Requests a worker is given at a time, as a multiple of its max_batch_size; the rest wait here, "
        "where they can still go elsewhere.",
    )
    queue_limit: int = Field(
        1024, ge=0, le=1_000_000, description="Requests that may wait for a worker; one more is answered 429."
    )
    queue_prompt_tokens: int = Field(
        4_194_304,
        ge=0,
        le=2**40,
        description="Prompt tokens that may wait, over all requests; beyond it the lowest priority is answered 429. "
        "The default is 4,096 for each of the requests that may wait, and 16 MiB of memory.",
    )
    queue_order: Literal["arrival", "shortest-uncached-work-first"] = Field(
        "arrival",
        description="Order within a priority and tenant: first come first served, or the fewest prompt tokens to "
        "compute first, with aging.",
    )
    queue_aging_tokens_per_s: float = Field(
        4_000,
        gt=0,
        le=1e9,
        description="With shortest-uncached-work-first: how much work a second of waiting makes up for. A prompt with "
        "60,000 tokens more than another is overtaken only when the other comes less than 15 s later.",
    )
    queue_timeout_ms: float = Field(
        30_000, gt=0, le=3_600_000, description="Longest wait for a worker; then the request is answered 429."
    )
    hold_limit_ms: float = Field(
        HOLD_LIMIT_MS,
        ge=0,
        le=600_000,
        description="With the policy predicted: how long a request may wait here for the worker that is best for it "
        "to have no prompt to compute; then it goes to a worker as it is. 0 = none waits.",
    )
    migration_limit: int = Field(
        3, ge=0, le=100, description="How often one request may move to another worker before the client sees an error."
    )
    crowding_retries: int = Field(
        CROWDING_RETRIES,
        ge=0,
        le=100,
        description="How often a worker may refuse a request because other routers sent it more than this one knew; "
        "the request is then chosen anew with what the worker said.",
    )
    local_prefill_max_tokens: int = Field(
        256,
        ge=0,
        le=4_194_304,
        description="In a disaggregated pool, a prompt of which at most this many tokens are not cached on a decode "
        "worker is prefilled there: moving its KV would cost more than computing it.",
    )
    worker_timeout_ms: float = Field(
        5_000,
        ge=100,
        le=600_000,
        description="Silence on the request plane after which a worker counts as unreachable.",
    )
    reservation_ttl_ms: float = Field(
        30_000, ge=100, le=3_600_000, description="How long a prediction counts as load when no worker confirms it."
    )

    share_state: Literal["none", "nats"] = Field(
        "none",
        description="What all routers of a pool (of one namespace and nats_pool) go by together and not each alone: "
        "the limits of tenants, the bounds of the queue, and responses that are kept. nats = by buckets of JetStream "
        "at nats_url; with names nats or event_plane nats.",
    )
    retention: Literal["off", "learned"] = Field(
        "off",
        description="What engines that take it are told of how long a prompt's blocks should stay: nothing, or what "
        "this router learns. A request that says so itself goes as it is.",
    )

    def cost_weights(self) -> CostWeights:
        """Return the weights of the kv policy."""
        return CostWeights(
            prefill_weight=self.prefill_weight,
            queue_weight=self.queue_weight,
            decode_weight=self.decode_weight,
            device_weight=self.device_weight,
            host_weight=self.host_weight,
            disk_weight=self.disk_weight,
        )

    @model_validator(mode="after")
    def _both_endpoints(self) -> Self:
        if (self.feed_endpoint is None) != (self.query_endpoint is None):
            raise ValueError("feed_endpoint and query_endpoint go together: give both, or neither")
        self.check_named("feed_endpoint", self.feed_endpoint)
        self.check_named("query_endpoint", self.query_endpoint)
        if self.feed_endpoint is not None and self.query_endpoint is not None:
            named = [is_name(each) for each in (self.feed_endpoint, self.query_endpoint)]
            parts = [each.rpartition(".")[0] for each in (self.feed_endpoint, self.query_endpoint)]
            if any(named) and (not all(named) or parts[0] != parts[1]):
                raise ValueError(
                    f"feed_endpoint is {self.feed_endpoint} and query_endpoint is {self.query_endpoint}: both are "
                    "addresses, or both names of one consolidator"
                )
        if self.share_state == "nats" and not self.nats_url:
            raise ValueError(
                f"share_state is nats, event_plane is {self.event_plane} and names is {self.names}: set names or "
                "event_plane to nats, with nats_url"
            )
        if self.feed_endpoint is not None and self.on_nats:
            raise ValueError(
                f"feed_endpoint is {self.feed_endpoint} and event_plane is nats: the journal is followed there"
            )
        return self
