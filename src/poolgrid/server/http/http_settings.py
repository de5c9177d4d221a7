"""Limits of an HTTP server for clients that it does not know yet: settings of every process that has one.

Each limit holds for one process, also for each of those that share a port (``--http-workers``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from poolgrid.server.transport.security import SecuritySettings

MIB = 2**20


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one server, times in seconds. ``HttpSettings`` has the help of those that operators may set."""

    head_bytes: int = 64 * 1024
    """Longest head, in one line or many: uvicorn has no limit, and gateways put tokens of 16 kB into a line."""
    chunk_overhead_bytes: int = 32 * 1024
    """What is accepted around the chunks of any body: trailers."""
    headers: int = 100
    """Most header fields; Apache's limit. Clients send some 20."""
    header_timeout_s: float = 20.0
    """From a connection, or the first byte of a further request, to the end of the head; Apache's 20 s."""
    body_timeout_s: float = 20.0
    """For a body, to which each ``body_bytes_per_s`` that came add a second; Apache's 20 s."""
    body_bytes_per_s: float = 10_000.0
    """A bad mobile connection. Slower bodies hold memory that others need."""
    keep_alive_timeout_s: float = 120.0
    """Longer than what balancers and clients keep a connection for another request: otherwise one is sent into a
    connection that is being closed, and fails. AWS's and nginx's keep them 60 s, Go's client 90 s."""
    write_timeout_s: float = 60.0
    """After so long without a byte taken a client that reads nothing of its answer is cut off; nginx's 60 s."""
    pipeline_bytes: int = 64 * 1024
    """What is read of further requests while one is in flight."""
    connections: int = 16_384
    connections_per_address: int = 0
    unfinished_bytes: int = 512 * MIB
    """Memory for requests that are not complete: sixteen of the largest bodies. Beyond it the oldest gets 503."""
    hosts: tuple[str, ...] = ()

    def body_time_s(self, received_bytes: int) -> float:
        """Return how long a body may take of which so much has come."""
        return self.body_timeout_s + received_bytes / self.body_bytes_per_s


_DEFAULTS = HttpLimits()


class HttpSettings(SecuritySettings):
    """Limits of an HTTP server on what comes before a request is whole."""

    panel: ClassVar[str] = "HTTP limits"

    http_request_timeout_ms: float = Field(
        _DEFAULTS.header_timeout_s * 1000,
        gt=0,
        le=3_600_000,
        description=("Limit the time for a head, and for a body plus 1 s per 10 kB received; slower requests get 408."),
    )
    http_keep_alive_timeout_ms: float = Field(
        _DEFAULTS.keep_alive_timeout_s * 1000,
        gt=0,
        le=86_400_000,
        description=(
            "Close a connection that is idle for this time. Keep it above the idle timeout of proxies and clients: "
            "60 s is common, Google's load balancer has 600 s."
        ),
    )
    max_connections: int = Field(
        _DEFAULTS.connections,
        ge=1,
        le=1_000_000,
        description=(
            "Limit the connections of one process. At the limit an idle connection is closed; if none is "
            "idle, the new one gets 503."
        ),
    )
    max_connections_per_address: int = Field(
        _DEFAULTS.connections_per_address,
        ge=0,
        le=1_000_000,
        description=(
            "Limit the connections from one IPv4 address or IPv6 /64 network; more get 503. 0 = three "
            "quarters of max_connections."
        ),
    )
    http_hosts: tuple[str, ...] = Field(
        (),
        description=(
            "Accept this Host header on a loopback server without API keys; others get 403. * = any. "
            "Addresses are always accepted. Repeat for more."
        ),
    )

    def http_limits(self) -> HttpLimits:
        return HttpLimits(
            header_timeout_s=self.http_request_timeout_ms / 1000,
            body_timeout_s=self.http_request_timeout_ms / 1000,
            keep_alive_timeout_s=self.http_keep_alive_timeout_ms / 1000,
            connections=self.max_connections,
            connections_per_address=self.max_connections_per_address,
            hosts=self.http_hosts,
        )


class ServerSettings(HttpSettings):
    """Where a router's HTTP server listens, and how it ends."""

    panel: ClassVar[str] = "HTTP server"

    host: str = Field("127.0.0.1", description="Listen on this address.")
    port: int = Field(8000, ge=0, le=65535, description="Serve HTTP at this port; 0 = any free port.")
    http_workers: int = Field(
        1,
        ge=1,
        le=256,
        description=(
            "Start this many processes that share the HTTP port, each with its own queue and caches. One "
            "process uses one core."
        ),
    )
    admin_port: int = Field(
        0,
        ge=0,
        le=65535,
        description=(
            "With http_workers, serve the first process alone at this port (metrics, decisions, fleet page), "
            "the next at the next port. 0 = any."
        ),
    )
    shutdown_timeout_ms: float = Field(
        5_000, ge=0, le=600_000, description="Let open responses finish for this time after SIGINT or SIGTERM."
    )
