"""Settings of a consolidator: the embedded one, and the process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from poolgrid.kernel.consolidation.pool_state import BLOCKS_PER_WORKER_MAX
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.http.http_settings import HttpSettings
from poolgrid.server.process.nats_settings import EventPlaneSettings
from poolgrid.server.process.settings import InputFile, OutputDirectory
from poolgrid.server.transport.security import SecuritySettings

MIB = 1024 * 1024


class ConsolidatorSettings(SecuritySettings, EventPlaneSettings, DiscoverySettings):
    """Sockets, journal, leases and limits of a pool's event store."""

    panel: ClassVar[str] = "Consolidator"

    data_dir: OutputDirectory | None = Field(
        default=None, description="Keep the journal in this directory. Unset = in memory, lost when the process ends."
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Listen on this address.")
    ingest_port: int = Field(
        default=0, ge=0, le=65535, description="Receive workers' events at this port; 0 = any free port."
    )
    feed_port: int = Field(
        default=0, ge=0, le=65535, description="Publish the feed for routers at this port; 0 = any free port."
    )
    query_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Serve replays and snapshots to routers at this port; 0 = any free port.",
    )
    lease_ms: int = Field(
        default=3000, ge=50, le=600_000, description="Treat a worker as gone after this time without a message."
    )
    journal_retention_bytes: int = Field(
        default=1024 * MIB,
        ge=MIB,
        description="Remove old journal segments behind a snapshot when the journal is larger than this.",
    )
    journal_retention_ms: int = Field(
        default=24 * 3600 * 1000,
        ge=1000,
        description="Remove journal segments behind a snapshot when they are older than this.",
    )
    fsync: Literal["interval", "always", "never"] = Field(
        default="interval",
        description=(
            "Choose when the journal is synced to disk: every 100 ms (interval), before each acknowledgement "
            "(always), or never."
        ),
    )
    pub_sources: InputFile | None = Field(
        default=None,
        description="Subscribe to the KV event publishers (ZMQ PUB) that this JSON file lists.",
    )


class ConsolidatorProcessSettings(ConsolidatorSettings, HttpSettings):
    """A consolidator in a process of its own."""

    panel: ClassVar[str] = "Consolidator"

    http_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Serve /health, /live, /ready and /metrics at this port; 0 = any free port.",
    )
    advertise_host: str = Field(
        default="",
        max_length=IDENTIFIER_BYTES_MAX,
        description=(
            "Register this host for other processes to connect to. Unset = the bound address. Needed when "
            "host is 0.0.0.0 or ::."
        ),
    )
    leader_lease_ms: int = Field(
        default=3000,
        ge=1000,
        le=600_000,
        multiple_of=1000,
        description=(
            "With event_plane nats, let another consolidator take over when the active one is silent for this time, "
            "in whole seconds."
        ),
    )

    @model_validator(mode="after")
    def _check_plane(self) -> Self:
        if self.event_plane == "zmq":
            if self.leader_lease_ms != type(self).model_fields["leader_lease_ms"].default:
                raise ValueError(f"leader_lease_ms is {self.leader_lease_ms!r} and event_plane is zmq: it is for nats")
            return self
        if self.data_dir is not None:
            raise ValueError(f"data_dir is {self.data_dir} and event_plane is nats: the journal is in the stream")
        if self.host in ("0.0.0.0", "::", "*") and not self.advertise_host:
            raise ValueError(
                f"host is {self.host!r}, which no worker can connect to: set advertise_host to this machine's address"
            )
        return self


MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes and times of one consolidator."""

    segment_bytes: int = 64 * MIB
    """Largest size at which a segment is closed."""
    memory_journal_bytes: int = 64 * MIB
    """Records kept for replay without a ``data_dir``: seconds of a busy pool, which is how long a router is away that
    was not restarted."""
    snapshot_every_records: int = 50_000
    """A restart reads that many records at most: a second of work."""
    fsync_interval_ms: float = 100.0
    """With ``fsync=interval``: what a power failure takes at most, ten syncs a second being nothing for a disk."""
    append_retry_ms: float = 500.0
    """Wait before a failed append is tried again: a full disk does not empty sooner."""
    feed_interval_ms: float = 2.0
    """Shortest time between two messages of the feed: the first record after a silence leaves at once, what follows
    within the interval leaves together. A router handles one message of ten records in half the time of ten."""
    feed_keep_alive_ms: float = 500.0
    """Silence of the feed after which the next offset is announced: routers then know that they are level."""
    stale_after_ms: int = 2000
    """How long missing batches may stay missing before the worker's blocks are not trusted: ten attempts to fill it."""
    blocks_per_worker_max: int = BLOCKS_PER_WORKER_MAX

    def segment_bytes_of(self, retention_bytes: int) -> int:
        """Return the size of segments: retention removes whole ones, and a sixteenth of it is exact enough."""
        return min(self.segment_bytes, retention_bytes // 16)
