"""Settings of a consolidator: the embedded one, and the process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from poolgrid.consolidator.core.consolidator import ConsolidatorLimits
from poolgrid.consolidator.core.pool_state import BLOCKS_PER_WORKER_MAX
from poolgrid.discovery.settings import NamesSettings
from poolgrid.http.http_settings import HttpSettings
from poolgrid.process.nats_settings import EventPlaneSettings
from poolgrid.transport.security import SecuritySettings
from poolgrid.wire.limits import IDENTIFIER_BYTES_MAX

MIB = 1024 * 1024


class ConsolidatorSettings(SecuritySettings, EventPlaneSettings, NamesSettings):
    """Sockets, journal, leases and limits of a pool's event store."""

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
    resend_retry_ms: int = Field(
        default=200, ge=10, le=60_000, description="Wait before missing batches are asked for again (milliseconds)."
    )
    stale_after_ms: int = Field(
        default=2000,
        ge=50,
        le=3_600_000,
        description="How long missing batches may stay missing before the worker's blocks are not trusted any more "
        "(milliseconds).",
    )
    segment_bytes: int = Field(
        default=64 * MIB, ge=64 * 1024, le=4096 * MIB, description="Size at which a journal segment is closed."
    )
    retention_bytes: int = Field(
        default=1024 * MIB, ge=MIB, description="Journal size above which old segments behind a snapshot are removed."
    )
    retention_ms: int = Field(
        default=24 * 3600 * 1000,
        ge=1000,
        description="Age above which old segments behind a snapshot are removed (milliseconds).",
    )
    snapshot_every_records: int = Field(
        default=50_000, ge=100, le=100_000_000, description="Records between two snapshots in the journal."
    )
    fsync: Literal["interval", "always", "never"] = Field(
        default="interval",
        description="When the journal is made durable: every fsync_interval_ms, before each acknowledgement, or never.",
    )
    fsync_interval_ms: int = Field(
        default=100, ge=1, le=60_000, description="Time between two syncs of the journal (milliseconds)."
    )
    append_retry_ms: int = Field(
        default=500, ge=10, le=60_000, description="Wait before a failed append to the journal is tried again."
    )
    memory_journal_bytes: int = Field(
        default=64 * MIB, ge=MIB, description="Bytes of records kept for replay when there is no data_dir."
    )
    feed_interval_ms: float = Field(
        default=2.0,
        ge=0,
        le=1000,
        description="Shortest time between two messages of the feed (milliseconds): the first record after a silence "
        "goes out at once, what follows within the interval goes out together; 0 = each at once.",
    )
    feed_keep_alive_ms: int = Field(
        default=500, ge=10, le=60_000, description="Silence of the feed after which the next offset is announced."
    )
    feed_high_water_mark: int = Field(
        default=20_000, ge=10, le=10_000_000, description="Messages queued per slow router before it loses some."
    )
    workers_max: int = Field(default=4096, ge=1, le=65_536, description="Worker ranks; a further one is refused.")
    sources_per_worker_max: int = Field(
        default=8, ge=1, le=64, description="Event sources of one worker rank; a further one is refused."
    )
    blocks_per_worker_max: int = Field(
        default=BLOCKS_PER_WORKER_MAX,
        ge=1024,
        le=BLOCKS_PER_WORKER_MAX,
        description="Blocks remembered per worker rank over all tiers; further ones are not taken in, and counted.",
    )
    pub_sources: Path | None = Field(
        default=None,
        description="JSON file that lists who publishes KV events over ZMQ PUB: engines, and further sources of "
        "workers that push.",
    )

    def limits(self) -> ConsolidatorLimits:
        """Return the bounds of the core."""
        return ConsolidatorLimits(
            workers_max=self.workers_max,
            sources_per_worker_max=self.sources_per_worker_max,
            blocks_per_worker_max=self.blocks_per_worker_max,
            lease_ms=self.lease_ms,
            resend_retry_ms=self.resend_retry_ms,
            stale_after_ms=self.stale_after_ms,
        )


class ConsolidatorProcessSettings(ConsolidatorSettings, HttpSettings):
    """A consolidator in a process of its own."""

    http_port: int = Field(
        default=0, ge=0, le=65535, description="Port of /health, /live, /ready and /metrics; 0 = any free one."
    )
    advertise_host: str = Field(
        default="",
        max_length=IDENTIFIER_BYTES_MAX,
        description="With event_plane nats, or names: host that others connect to; empty = the bound one. Needed when "
        "host is 0.0.0.0 or ::.",
    )
    nats_replicas: int = Field(
        default=1,
        ge=1,
        le=5,
        description="Servers that keep a copy of the journal's stream, of the snapshots and of the lease: 1, or 3 of a "
        "cluster, which goes on while 2 of them live.",
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
            for name in ("nats_replicas", "leader_lease_s"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is {getattr(self, name)!r} and event_plane is zmq: it is for nats")
            return self
        if self.data_dir is not None:
            raise ValueError(f"data_dir is {self.data_dir} and event_plane is nats: the journal is in the stream")
        if self.host in ("0.0.0.0", "::", "*") and not self.advertise_host:
            raise ValueError(
                f"host is {self.host!r}, which no worker can connect to: set advertise_host to this machine's address"
            )
        return self

    def advertised(self, endpoint: str) -> str:
        """Return a bound endpoint as others connect to it."""
        if not self.advertise_host:
            return endpoint
        host = f"[{self.advertise_host}]" if ":" in self.advertise_host else self.advertise_host
        return f"tcp://{host}:{endpoint.rpartition(':')[2]}"
