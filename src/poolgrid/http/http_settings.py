"""What one HTTP server lets anybody do before it knows who that is: settings of every process that has one.

Each limit holds for one process, also for each of those that share a port (``--http-workers``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from poolgrid.transport.security import SecuritySettings

MIB = 2**20


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one server, times in seconds. ``HttpSettings`` has the help of those that operators may set."""

    head_bytes: int = 32 * 1024
    header_line_bytes: int = 8 * 1024
    """Longest line of a head: what nginx and Apache take, and a quarter of the head where that is set."""
    headers: int = 100
    """Most header fields; Apache's limit. Clients send some 20."""
    header_timeout_s: float = 20.0
    """From a connection, or the first byte of a further request, to the end of the head; Apache's 20 s."""
    body_timeout_s: float = 20.0
    """For a body, to which each ``body_bytes_per_s`` that came add a second; Apache's 20 s."""
    body_bytes_per_s: float = 10_000.0
    """A bad mobile connection. Slower bodies hold memory that others need."""
    keep_alive_timeout_s: float = 5.0
    write_timeout_s: float = 60.0
    pipeline_bytes: int = 64 * 1024
    """What is read of further requests while one is in flight."""
    connections: int = 16_384
    connections_per_address: int = 0
    unfinished_bytes: int = 512 * MIB
    hosts: tuple[str, ...] = ()

    def body_time_s(self, received_bytes: int) -> float:
        """Return how long a body may take of which so much has come."""
        return self.body_timeout_s + received_bytes / self.body_bytes_per_s


_DEFAULTS = HttpLimits()


class HttpSettings(SecuritySettings):
    """Limits of an HTTP server on what comes before a request is whole."""

    panel: ClassVar[str] = "HTTP limits"

    http_head_bytes: int = Field(
        _DEFAULTS.head_bytes,
        ge=1024,
        le=16 * MIB,
        description="Largest head of a request, and four times its longest line; answered 431. Raise it when a proxy "
        "in front adds large tokens or cookies.",
    )
    http_request_timeout_ms: float = Field(
        _DEFAULTS.header_timeout_s * 1000,
        gt=0,
        le=3_600_000,
        description="Longest time for a head, and for a body, to which each 10 kB that came add a second; answered "
        "408. Raise it for clients behind slow links, lower it under attack.",
    )
    http_keep_alive_timeout_ms: float = Field(
        _DEFAULTS.keep_alive_timeout_s * 1000,
        gt=0,
        le=86_400_000,
        description="How long a connection may wait for its next request. Set it above that of a proxy in front, else "
        "the proxy now and then sends a request into a connection that just closes.",
    )
    http_write_timeout_ms: float = Field(
        _DEFAULTS.write_timeout_s * 1000,
        gt=0,
        le=86_400_000,
        description="Cut the connection of a client that takes nothing of an answer for so long; nginx's send_timeout.",
    )
    http_connections: int = Field(
        _DEFAULTS.connections,
        ge=1,
        le=1_000_000,
        description="Most connections of one process. At the limit the one that has waited longest for a request is "
        "closed for a new one; when all have a request in flight, the new one is answered 503. The limit of open files "
        "is raised for it as far as it goes. An idle connection holds some 10 kB.",
    )
    http_connections_per_address: int = Field(
        _DEFAULTS.connections_per_address,
        ge=0,
        le=1_000_000,
        description="Most connections from one IPv4 address or IPv6 /64 network; one more is answered 503. 0 = three "
        "quarters of http_connections, for proxies; where clients come themselves, a few hundred is enough.",
    )
    http_unfinished_bytes: int = Field(
        _DEFAULTS.unfinished_bytes,
        ge=1024,
        le=2**40,
        description="Memory for requests that are not whole yet, over all connections; beyond it the body that began "
        "first is answered 503. Sixteen of the largest bodies.",
    )
    http_hosts: tuple[str, ...] = Field(
        (),
        description="Names that requests may have in Host, besides addresses and names without a dot, for a server on "
        "a loopback address without API keys: that of a proxy in front of it, which passes Host on; * = any. Others "
        "get 403: a web page can give its own name this machine's address. Repeat for more.",
    )

    def http_limits(self) -> HttpLimits:
        """Return the limits as the server wants them."""
        return HttpLimits(
            head_bytes=self.http_head_bytes,
            header_line_bytes=self.http_head_bytes // 4,
            header_timeout_s=self.http_request_timeout_ms / 1000,
            body_timeout_s=self.http_request_timeout_ms / 1000,
            keep_alive_timeout_s=self.http_keep_alive_timeout_ms / 1000,
            write_timeout_s=self.http_write_timeout_ms / 1000,
            connections=self.http_connections,
            connections_per_address=self.http_connections_per_address,
            unfinished_bytes=self.http_unfinished_bytes,
            hosts=self.http_hosts,
        )


class ServerSettings(HttpSettings):
    """Where a router's HTTP server listens, and how it ends."""

    panel: ClassVar[str] = "HTTP server"

    host: str = Field("127.0.0.1", description="Address the HTTP server listens on; loopback unless told otherwise.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP server; 0 takes any free one.")
    http_workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that share the HTTP port, each with its own queue and caches. One uses one core; take "
        "as many as there are cores to spare.",
    )
    admin_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="With http_workers, the port at which the first process answers for itself alone: its metrics, "
        "decisions, fleet page. Each further process takes the next port; 0 takes any free ones, and the ready line "
        "names them.",
    )
    shutdown_timeout_ms: float = Field(
        5_000, ge=0, le=600_000, description="How long open responses may finish after SIGINT or SIGTERM."
    )
