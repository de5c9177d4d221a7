"""What can be set on a router process; ``docs/configuration.md`` lists every field."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from poolgrid.kernel.decision.policy import APPROXIMATE_TTL_MS, HOLD_LIMIT_MS
from poolgrid.kernel.projection.load_ledger import LEDGER_BYTES
from poolgrid.kernel.wire.addresses import is_name
from poolgrid.server.process.nats_settings import EventPlaneSettings
from poolgrid.server.process.plugins import PARTS, has_plugin, is_installed, policy_names
from poolgrid.server.process.settings import Settings, ZmqAddress
from poolgrid.server.serving.router_settings import ServingSettings

EXT_PROC = ("grpc", "google.protobuf")
"""What the endpoint picker needs: libraries of the extra ``ext-proc``."""


class EndpointPickerSettings(Settings):
    """The endpoint picker of a router; nothing of it runs without a port."""

    panel: ClassVar[str] = "Endpoint picker"

    ext_proc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description=(
            "Serve Envoy's ext-proc requests (gRPC) at this port, usually 9002; 0 = any free port, unset = "
            "none. Needs poolgrid[ext-proc]."
        ),
    )
    max_ext_proc_streams: ClassVar[int] = 4096
    """Requests of gateways in flight; beyond, the oldest incomplete one gets 429, or else the new one is refused. As
    many as requests of clients in a pool that is large."""
    ext_proc_body_bytes: ClassVar[int] = 256 * 1024 * 1024
    """Memory for incomplete requests of gateways; beyond, the oldest gets 429. Eight bodies of the default limit."""

    @model_validator(mode="after")
    def _check_library(self) -> Self:
        if self.ext_proc_port is None:
            return self
        if not has_plugin(PARTS, "endpoint-picker"):
            raise ValueError(
                f"ext_proc_port is {self.ext_proc_port}, and the plug-in 'endpoint-picker' is not installed: leave "
                "ext_proc_port out"
            )
        if missing := [each for each in EXT_PROC if not is_installed(each)]:
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
        description="Serve selection and reservation for global routers at this port; 0 = any free port.",
    )
    feed_endpoint: ZmqAddress | None = Field(
        None,
        description=(
            "Follow the consolidator at this feed (tcp://HOST:PORT or a dyn:// name); needs query_endpoint. "
            "Unset = run one inside the router."
        ),
    )
    query_endpoint: ZmqAddress | None = Field(
        None,
        description=(
            "Request replays and snapshots of that consolidator at this endpoint (tcp://HOST:PORT or a dyn:// name)."
        ),
    )
    policy: str = Field(
        "kv",
        examples=list(policy_names()),
        description=(f"Choose how a worker is selected: {', '.join(policy_names())}, or your module:Class."),
    )
    approximate_ttl_ms: ClassVar[float] = APPROXIMATE_TTL_MS
    """Time for which policy approximate assumes that a worker keeps what it was sent, as in Dynamo."""
    index_budget_bytes: int = Field(
        4 * 1024**3,
        ge=1024,
        description="Limit the memory of the prefix index; beyond it the oldest paths are removed.",
    )
    ledger_budget_bytes: ClassVar[int] = LEDGER_BYTES
    """Memory of the load ledger, of far more requests than a pool runs; further ones do not count as load."""
    router_id: str = Field(
        "router",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name this router within its pool; its decisions are recorded under that name.",
    )
    record_decisions: bool = Field(
        True,
        description=("With a data_dir, record every decision and its inputs for poolgrid replay, what-if and explain."),
    )
    worker_queue_factor: float = Field(
        1.25,
        gt=0,
        le=1000,
        description=(
            "Send a worker at most this multiple of its batch size; other requests wait in the router, where "
            "they keep their order and can still move."
        ),
    )
    queue_order: Literal["arrival", "shortest-uncached-work-first"] = Field(
        "arrival",
        description=(
            "Order requests of one priority and tenant by arrival, or by fewest prompt tokens to compute (with ageing)."
        ),
    )
    session_admission: bool = Field(
        False,
        description=(
            "Let turns of agents wait in this router while KV caches are full of other sessions: for pools whose "
            "agents do not fit."
        ),
    )
    hold_limit_ms: ClassVar[float] = HOLD_LIMIT_MS
    """How long policy kv holds a request for its best worker at most; 0 = never."""
    legs: Literal["expected-time", "two"] = Field(
        "expected-time",
        description=(
            "In a disaggregated pool, serve each prompt in one leg or two by expected time, or always in two while a "
            "prefill worker is left."
        ),
    )
    reservation_ttl_ms: ClassVar[float] = 30_000
    """Load that was predicted and that no worker confirmed is forgotten after this time. Events are earlier."""

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
        if self.feed_endpoint is not None and self.on_nats:
            raise ValueError(
                f"feed_endpoint is {self.feed_endpoint} and event_plane is nats: the journal is followed there"
            )
        return self
