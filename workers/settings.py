"""The settings that every worker process has: the command line, the environment and the documentation come from here.

Each engine adds its own, in its directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from poolgrid.discovery.settings import DiscoverySettings
from poolgrid.http.http_settings import HttpSettings
from poolgrid.process.nats_settings import EventPlaneSettings
from poolgrid.process.settings import InputFile, Settings, ZmqAddress
from poolgrid.process.tracing.settings import TraceSettings
from poolgrid.wire.addresses import host_problem
from poolgrid.wire.card import NO_STEP_TIMES, ReasoningParser, StepTimes, ToolCallParser, parser_name
from poolgrid.wire.limits import IDENTIFIER_BYTES_MAX
from poolgrid.wire.names import CONSOLIDATOR, EndpointName, is_name
from poolgrid.workers.core.timing import PUBLISHED, TimingName, step_times_of, timing_model

Name = Annotated[str, StringConstraints(min_length=1, max_length=IDENTIFIER_BYTES_MAX)]


class WorkerProcessSettings(HttpSettings, TraceSettings, EventPlaneSettings, DiscoverySettings):
    """What every worker process has, whatever its engine."""

    panel: ClassVar[str] = "Worker"

    engine_name: ClassVar[str] = ""
    """Name of the engine whose settings these are."""

    worker_id: Name = Field("worker-0", description="Name of this worker in its pool; stable over restarts.")
    consolidator: ZmqAddress = Field(
        "tcp://127.0.0.1:5557",
        description="ZMQ endpoint at which the consolidator takes events in, or with names its name, "
        "dyn://namespace.consolidator.ingest; with names that of this namespace unless another is given. With "
        "event_plane nats, NATS says where the active one is.",
    )
    host: Name = Field("127.0.0.1", description="Address to bind; loopback unless told otherwise.")
    advertise_host: str = Field(
        "",
        max_length=IDENTIFIER_BYTES_MAX,
        description="Host that routers connect to; empty = the bound one. Needed when host is 0.0.0.0 or ::.",
    )
    request_port: int = Field(0, ge=0, le=65535, description="Port of the request plane; 0 = any free one.")
    http_port: int = Field(0, ge=0, le=65535, description="Port of health and metrics; 0 = any free one.")
    peer_lease_ms: int = Field(
        10_000, ge=100, le=3_600_000, description="A router that is silent this long has its requests cancelled."
    )
    drain_timeout_ms: int = Field(
        30_000, ge=0, le=86_400_000, description="How long running requests may take to finish after SIGTERM."
    )
    load_interval_ms: ClassVar[float] = 100.0
    """Least time between two load reports while busy; one more when idle."""
    heartbeat_ms: ClassVar[float] = 1000.0
    """Time between two signs of life to the consolidator: a tenth of its usual lease."""

    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="Which format's reasoning routers tell apart in this model's answers, unless they were told "
        "themselves; auto = the routers find out. All workers of a model must agree.",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="In which format routers read this model's tool calls, unless they were told themselves; auto = "
        "the routers find out. All workers of a model must agree.",
    )
    chat_template: InputFile | None = Field(
        None,
        description="Jinja file that routers use for this model in place of its own chat template, unless they were "
        "given one themselves. All workers of a model must agree.",
    )
    max_file_size_mb: int | None = Field(
        None,
        ge=1,
        le=52,
        description="Largest medium of this model's requests, in 2^20 bytes; empty = 50, the most that routers "
        "take. All workers of a model must agree.",
    )

    model_cache_dir: Path | None = Field(
        None,
        description="Directory of models on this machine (poolgrid model): a model that is no directory here is "
        "fetched into it, unless it is there, and loaded from it. Empty = that of poolgrid model for ORG/MODEL.",
    )
    model_source: str = Field(
        "",
        max_length=4096,
        description="Fetch the model into model_cache_dir from this directory or hub (ORG/MODEL[@REVISION]); empty = "
        "from what the engine is told to load.",
    )

    @field_validator("reasoning_parser", "tool_call_parser", mode="before")
    @classmethod
    def _parser_name(cls, given: object) -> object:
        return parser_name(given)

    @model_validator(mode="after")
    def _check_model_cache(self) -> Self:
        if self.model_source and self.model_cache_dir is None:
            raise ValueError(
                f"model_source is {self.model_source!r} without model_cache_dir: it is for models kept there"
            )
        return self

    @model_validator(mode="after")
    def _check_consolidator(self) -> Self:
        if self.on_nats and "consolidator" in self.model_fields_set:
            raise ValueError(
                f"consolidator is {self.consolidator} and event_plane is nats: NATS says where the active one is"
            )
        self.check_named("consolidator", self.consolidator)
        return self

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if self.host in ("0.0.0.0", "::", "*") and not self.advertise_host:
            raise ValueError(
                f"host is {self.host!r}, which no router can connect to: set advertise_host to this machine's address"
            )
        # It stands in the card, from which every router of the pool connects: wrong, it would be found out there only.
        field = "advertise_host" if self.advertise_host else "host"
        problem = host_problem(self.advertise_host or self.host)
        if problem is not None:
            raise ValueError(
                f"{field} is {self.advertise_host or self.host!r}: what routers would connect to {problem}; "
                "give a name or an IP address, without scheme, port or brackets"
            )
        return self

    @property
    def consolidator_name(self) -> str:
        """The name by which the consolidator is found; empty when it has an address, or NATS says where it is."""
        if self.on_nats or not self.has_names:
            return ""
        if "consolidator" not in self.model_fields_set:
            return str(EndpointName(self.namespace, CONSOLIDATOR, "ingest"))
        return self.consolidator if is_name(self.consolidator) else ""

    @property
    def advertised_host(self) -> str:
        """The host in the endpoints that others connect to, in brackets where it is an IPv6 address."""
        host = self.advertise_host or self.host
        return f"[{host}]" if ":" in host else host

    @property
    def http_scheme(self) -> str:
        return "http" if self.tls_certificate is None else "https"


class StepTimesSettings(Settings):
    """Step times for the card; the engine itself has its own."""

    panel: ClassVar[str] = "Worker"

    timing: TimingName | None = Field(
        None,
        description="Step times that the worker's card says, from which routers with the policy predicted begin: "
        "published are the formulas of the field's simulator, h100-qwen3-8b and h200-qwen3-8b were measured on "
        "one H100 and one H200; empty = the card says none, and they begin with published.",
    )
    timing_table: InputFile | None = Field(
        None, description="JSON file of measured step times of your own, instead of those that timing names."
    )

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        self.step_times()  # before an engine is loaded, which takes minutes
        return self

    def step_times(self) -> StepTimes:
        """Return what the card says; raises ``TableError`` for a table that cannot be used, and for both at once."""
        if self.timing is None and self.timing_table is None:
            return NO_STEP_TIMES
        return step_times_of(timing_model(self.timing or PUBLISHED, self.timing_table))
