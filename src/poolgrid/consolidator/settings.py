"""Settings of a consolidator: the embedded one, and the process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from poolgrid.discovery.settings import DiscoverySettings
from poolgrid.http.http_settings import HttpSettings
from poolgrid.process.nats_settings import EventPlaneSettings
from poolgrid.process.settings import InputFile
from poolgrid.transport.security import SecuritySettings
from poolgrid.wire.limits import IDENTIFIER_BYTES_MAX

MIB = 1024 * 1024


class ConsolidatorSettings(SecuritySettings, EventPlaneSettings, DiscoverySettings):
    """Sockets, journal, leases and limits of a pool's event store."""

    panel: ClassVar[str] = "Consolidator"

    data_dir: Path | None = Field(
        default=None, description="Directory of the journal; without it the journal lives in memory and ends with us."
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the consolidator's sockets bind to.")
    ingest_port: int = Field(default=0, ge=0, le=65535, description="Port that workers push to; 0 = any free one.")
    feed_port: int = Field(
        default=0, ge=0, le=65535, description="Port of the live feed for routers; 0 = any free one."
    )
    query_port: int = Field(
        default=0, ge=0, le=65535, description="Port for replay and snapshot requests of routers; 0 = any free one."
    )
    lease_ms: int = Field(
        default=3000, ge=50, le=600_000, description="Silence after which a worker counts as gone (milliseconds)."
    )
    retention_bytes: int = Field(
        default=1024 * MIB, ge=MIB, description="Journal size above which old segments behind a snapshot are removed."
    )
    retention_ms: int = Field(
        default=24 * 3600 * 1000,
        ge=1000,
        description="Age above which old segments behind a snapshot are removed (milliseconds).",
    )
    fsync: Literal["interval", "always", "never"] = Field(
        default="interval",
        description="When the journal is made durable: every 100 ms, before each acknowledgement, or never.",
    )
    pub_sources: InputFile | None = Field(
        default=None,
        description="JSON file that lists who publishes KV events over ZMQ PUB: engines, and further sources of "
        "workers that push.",
    )


class ConsolidatorProcessSettings(ConsolidatorSettings, HttpSettings):
    """A consolidator in a process of its own."""

    panel: ClassVar[str] = "Consolidator"

    http_port: int = Field(
        default=0, ge=0, le=65535, description="Port of /health, /live, /ready and /metrics; 0 = any free one."
    )
    advertise_host: str = Field(
        default="",
        max_length=IDENTIFIER_BYTES_MAX,
        description="With event_plane nats, or names: host that others connect to; empty = the bound one. Needed when "
        "host is 0.0.0.0 or ::.",
    )
    leader_lease_s: int = Field(
        default=3,
        ge=1,
        le=600,
        description="With event_plane nats: how long the active consolidator of a pool may be silent until another one "
        "that runs takes its place (whole seconds).",
    )

    @model_validator(mode="after")
    def _check_plane(self) -> Self:
        if self.event_plane == "zmq":
            if self.leader_lease_s != type(self).model_fields["leader_lease_s"].default:
                raise ValueError(f"leader_lease_s is {self.leader_lease_s!r} and event_plane is zmq: it is for nats")
            return self
        if self.data_dir is not None:
            raise ValueError(f"data_dir is {self.data_dir} and event_plane is nats: the journal is in the stream")
        if self.host in ("0.0.0.0", "::", "*") and not self.advertise_host:
            raise ValueError(
                f"host is {self.host!r}, which no worker can connect to: set advertise_host to this machine's address"
            )
        return self
