"""The settings that every worker process has: the command line, the environment and the documentation come from here.

Each engine adds its own, in its directory.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from poolgrid.kernel.wire.addresses import CONSOLIDATOR, EndpointName, bracketed, host_problem, is_name
from poolgrid.kernel.wire.card import NO_STEP_TIMES, StepTimes
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX
from poolgrid.kernel.wire.tasks import MODALITIES
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.http.http_settings import HttpSettings
from poolgrid.server.process.nats_settings import EventPlaneSettings
from poolgrid.server.process.parser_names import (
    ReasoningParser,
    ToolCallParser,
    reasoning_parser_name,
    tool_call_parser_name,
)
from poolgrid.server.process.settings import InputFile, Settings, ZmqAddress
from poolgrid.server.process.tracing.settings import TraceSettings
from poolgrid.server.workers.timing import TIMINGS, Timing, step_times_of, timing_model

Name = Annotated[str, StringConstraints(min_length=1, max_length=IDENTIFIER_BYTES_MAX)]


Modality = Literal["text", "multimodal", "embedding", "image_diffusion", "video_diffusion"]

MODEL_PATH_HELP = (
    "Use this model: a directory, or a hub name where the engine loads weights. Arguments after -- go to a server "
    "that is started with it."
)
ENGINE_ARGUMENT_HELP = (
    "Pass this argument to the engine: to its server as those after -- are, to one in this process as NAME=VALUE. "
    "Repeat for more."
)
ROLE_HELP = (
    "Choose the role: whole requests and any leg, prefill only, decode and whole requests, or encode images "
    "(some engines)."
)
MODALITY_HELP = "Serve text, text with images (multimodal), or tasks: embedding, image_diffusion, video_diffusion."


def check_task_role(modality: str, role: str, whole: str = "aggregated") -> None:
    """Raise ``ValueError`` for a worker of tasks that is to do a part of a request."""
    if modality in MODALITIES and role != whole:
        raise ValueError(f"modality is {modality!r} with role {role!r}: tasks have one leg, allowed is {whole}")


class WorkerProcessSettings(HttpSettings, TraceSettings, EventPlaneSettings, DiscoverySettings):
    """What every worker process has, whatever its engine."""

    panel: ClassVar[str] = "Worker"

    engine_name: ClassVar[str] = ""
    """Name of the engine whose settings these are."""

    worker_id: Name = Field("worker-0", description="Name this worker within its pool. Keep the name over restarts.")
    consolidator: ZmqAddress = Field(
        "tcp://127.0.0.1:5557",
        description=(
            "Send events to the consolidator at this endpoint (tcp://HOST:PORT or a dyn:// name). With names "
            "or NATS, it is found by itself."
        ),
    )
    host: Name = Field("127.0.0.1", description="Listen on this address.")
    advertise_host: str = Field(
        "",
        max_length=IDENTIFIER_BYTES_MAX,
        description=(
            "Register this host for routers to connect to. Unset = the bound address. Needed when host is "
            "0.0.0.0 or ::."
        ),
    )
    request_port: int = Field(
        0, ge=0, le=65535, description="Receive requests from routers at this port; 0 = any free port."
    )
    http_port: int = Field(0, ge=0, le=65535, description="Serve health and metrics at this port; 0 = any free port.")
    peer_lease_ms: ClassVar[int] = 10_000
    """Requests of a router that is silent for this time are cancelled: routers send a heartbeat every second."""
    shutdown_timeout_ms: int = Field(
        30_000, ge=0, le=86_400_000, description="Let running requests finish for this time after SIGTERM."
    )
    load_interval_ms: ClassVar[float] = 100.0
    """Least time between two load reports while busy; one more when idle."""
    heartbeat_ms: ClassVar[float] = 1000.0
    """Time between two heartbeats to the consolidator: a tenth of its usual lease."""

    reasoning_parser: ReasoningParser = Field(
        "auto",
        description=(
            "Announce the format in which this model writes reasoning. auto = routers find it. All workers of "
            "a model must agree."
        ),
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description=(
            "Announce the format in which this model writes tool calls. auto = routers find it. All workers "
            "of a model must agree."
        ),
    )
    chat_template: InputFile | None = Field(
        None,
        description=(
            "Announce this Jinja file as the model's chat template; a router's own option wins. All workers "
            "of a model must agree."
        ),
    )
    max_file_size_mb: int | None = Field(
        None,
        ge=1,
        le=52,
        description=(
            "Limit one media file of this model's requests, in MiB. Unset = the router's limit. All workers "
            "of a model must agree."
        ),
    )

    @field_validator("reasoning_parser", mode="before")
    @classmethod
    def _reasoning_parser_name(cls, given: object) -> object:
        return reasoning_parser_name(given)

    @field_validator("tool_call_parser", mode="before")
    @classmethod
    def _tool_call_parser_name(cls, given: object) -> object:
        return tool_call_parser_name(given)

    @model_validator(mode="after")
    def _check_consolidator(self) -> Self:
        if self.on_nats and "consolidator" in self.model_fields_set:
            raise ValueError(
                f"consolidator is {self.consolidator} and event_plane is nats: the active one is found through NATS"
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
        return bracketed(self.advertise_host or self.host)

    @property
    def http_scheme(self) -> str:
        return "http" if self.tls_certificate is None else "https"


class StepTimesSettings(Settings):
    """Step times for the card; the engine itself has its own."""

    panel: ClassVar[str] = "Worker"

    timing: Timing | None = Field(
        None,
        examples=list(TIMINGS),
        description=(
            "Choose the step times: published, h100-qwen3-8b, h200-qwen3-8b, or your own JSON file. Policy "
            "kv starts from them."
        ),
    )

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        self.step_times()  # before an engine is loaded, which takes minutes
        return self

    def step_times(self) -> StepTimes:
        """Return the times of the card; raises ``TableError`` for a table that cannot be used."""
        return NO_STEP_TIMES if self.timing is None else step_times_of(timing_model(self.timing))
