"""What can be set on a router process; ``docs/configuration.md`` lists every field."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from poolgrid.process.nats_settings import EventPlaneSettings
from poolgrid.process.plugins import is_installed, policy_names
from poolgrid.process.settings import Settings, ZmqAddress
from poolgrid.router.core.cost import CostWeights
from poolgrid.router.core.load_ledger import LEDGER_BYTES
from poolgrid.router.core.policy import APPROXIMATE_TTL_MS, HOLD_LIMIT_MS
from poolgrid.serving.router_settings import ServingSettings
from poolgrid.wire.names import is_name

EXT_PROC = ("grpc", "google.protobuf", "poolgrid.router.endpoint_picker")
"""What the endpoint picker needs: libraries of the extra ``ext-proc``, and the folder of the plug-in."""


class EndpointPickerSettings(Settings):
    """The endpoint picker of a router; nothing of it runs without a port."""

    panel: ClassVar[str] = "Endpoint picker"

    ext_proc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the endpoint picker, at which Envoy asks over ext-proc (gRPC) where a request is to go, "
        "usually 9002; 0 takes any free one, empty = none. Needs poolgrid[ext-proc].",
    )
    ext_proc_streams: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Most requests of gateways at a time, each a gRPC stream until its answer ends. At the limit the "
        "one that has waited longest for the rest of its request is answered 429; when all have an endpoint, the new "
        "one is refused, and the gateway's failure mode decides. As many as sixteen engines with 256 requests each. "
        "Streams and bodies have the times of the HTTP server (http_request_timeout_ms, http_write_timeout_ms).",
    )
    ext_proc_body_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        le=2**40,
        description="Memory for requests that are gathered before the choice, headers and bodies together; beyond it "
        "the unfinished request that began first is answered 429. Sixteen of the largest bodies (max_body_bytes, above "
        "which a body is answered 413).",
    )

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        if self.ext_proc_port is not None and (missing := [each for each in EXT_PROC if not is_installed(each)]):
            raise ValueError(
                f"ext_proc_port is {self.ext_proc_port}, and {' and '.join(missing)} cannot be imported: install "
                "poolgrid[ext-proc], or leave ext_proc_port out"
            )
        return self


class RouterSettings(ServingSettings, EventPlaneSettings, EndpointPickerSettings):
    """Selection, admission, dispatch and HTTP of one router."""

    panel: ClassVar[str] = "Routing"

    select_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port at which global routers ask this pool to select and reserve workers; 0 takes any free one.",
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
        examples=list(policy_names()),
        description="How a worker is chosen: " + ", ".join(policy_names()) + ", or module:Class of your own.",
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
        APPROXIMATE_TTL_MS,
        gt=0,
        description="How long the approximate policy believes that a worker holds what it was sent.",
    )
    index_budget_bytes: int = Field(
        4 * 1024**3, ge=1024, description="Memory the prefix index may use; beyond it the oldest paths are cut."
    )
    ledger_budget_bytes: int = Field(
        LEDGER_BYTES,
        ge=65_536,
        description="Memory the requests in the load ledger may use; a further one is not counted as load.",
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
    worker_queue_factor: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="Requests a worker is given at a time, as a multiple of its max_batch_size; the rest wait here, "
        "where they can still go elsewhere.",
    )
    queue_order: Literal["arrival", "shortest-uncached-work-first"] = Field(
        "arrival",
        description="Order within a priority and tenant: first come first served, or the fewest prompt tokens to "
        "compute first, with aging.",
    )
    hold_limit_ms: float = Field(
        HOLD_LIMIT_MS,
        ge=0,
        le=600_000,
        description="With the policy predicted: how long a request may wait here for the worker that is best for it "
        "to have no prompt to compute; then it goes to a worker as it is. 0 = none waits.",
    )
    local_prefill_max_tokens: int = Field(
        256,
        ge=0,
        le=4_194_304,
        description="In a disaggregated pool, a prompt of which at most this many tokens are not cached on a decode "
        "worker is prefilled there: moving its KV would cost more than computing it.",
    )
    reservation_ttl_ms: float = Field(
        30_000, ge=100, le=3_600_000, description="How long a prediction counts as load when no worker confirms it."
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
