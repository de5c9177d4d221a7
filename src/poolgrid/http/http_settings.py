"""What one HTTP server lets anybody do before it knows who that is: settings of every process that has one.

Each limit holds for one process; those of a group (``--http-workers``) share the kernel's spread of connections, and
each has limits of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from poolgrid.transport.security import SecuritySettings

MIB = 2**20


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one server, times in seconds; ``HttpSettings`` says what each is and why it is so."""

    head_bytes: int = 32 * 1024
    header_line_bytes: int = 8 * 1024
    headers: int = 100
    header_timeout_s: float = 20.0
    body_timeout_s: float = 20.0
    body_bytes_per_s: float = 10_000.0
    keep_alive_timeout_s: float = 5.0
    write_timeout_s: float = 60.0
    pipeline_bytes: int = 64 * 1024
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

    http_head_bytes: int = Field(
        _DEFAULTS.head_bytes,
        ge=1024,
        le=16 * MIB,
        description="Largest head of a request, all lines together; answered 431. Four lines of the largest size, as "
        "nginx has it.",
    )
    http_header_line_bytes: int = Field(
        _DEFAULTS.header_line_bytes,
        ge=256,
        le=16 * MIB,
        description="Longest line of a request's head; answered 431. What nginx and Apache take.",
    )
    http_headers: int = Field(
        _DEFAULTS.headers,
        ge=8,
        le=10_000,
        description="Most header fields of a request; answered 431. Apache's limit; clients send some 20.",
    )
    http_header_timeout_ms: float = Field(
        _DEFAULTS.header_timeout_s * 1000,
        gt=0,
        le=3_600_000,
        description="Longest time from a connection (with TLS: its handshake, then as long again), or from the first "
        "byte of a further request, to the end of the head; answered 408. Apache's 20 s: a head fits into a few "
        "packets.",
    )
    http_body_timeout_ms: float = Field(
        _DEFAULTS.body_timeout_s * 1000,
        gt=0,
        le=3_600_000,
        description="Longest time for a body, to which each http_body_bytes_per_s that came add a second; answered "
        "408. Apache's 20 s.",
    )
    http_body_bytes_per_s: float = Field(
        _DEFAULTS.body_bytes_per_s,
        ge=1,
        le=1e12,
        description="Slowest body after http_body_timeout_ms, in bytes per second: a bad mobile connection. Slower "
        "ones hold memory that others need.",
    )
    http_keep_alive_timeout_ms: float = Field(
        _DEFAULTS.keep_alive_timeout_s * 1000,
        gt=0,
        le=86_400_000,
        description="How long a connection may wait for its next request; uvicorn's 5 s. Set it above that of a "
        "proxy in front, else the proxy now and then sends a request into a connection that just closes.",
    )
    http_write_timeout_ms: float = Field(
        _DEFAULTS.write_timeout_s * 1000,
        gt=0,
        le=86_400_000,
        description="How long a client may take nothing of an answer that waits for it before the connection is cut; "
        "nginx's send_timeout.",
    )
    http_pipeline_bytes: int = Field(
        _DEFAULTS.pipeline_bytes,
        ge=1024,
        le=64 * MIB,
        description="Bytes of further requests that are read of a connection whose request is in work; then nothing "
        "more is read until it has its answer. One request of a connection is in work at a time, the rest is not "
        "even parsed.",
    )
    http_connections: int = Field(
        _DEFAULTS.connections,
        ge=1,
        le=1_000_000,
        description="Most connections of one process. At the limit the one that has waited longest for a request gives "
        "way to a new one; when all have a request in work, the new one is answered 503. The limit of open files is "
        "raised for it as far as it goes, else the limit is lowered, which the log says. An idle connection holds "
        "some 10 kB.",
    )
    http_connections_per_address: int = Field(
        _DEFAULTS.connections_per_address,
        ge=0,
        le=1_000_000,
        description="Most connections from one IPv4 address or IPv6 /64 network; one more is answered 503. 0 = three "
        "quarters of http_connections: a proxy or load generator has one address for everybody, and what it leaves "
        "keeps the door open to others. Where clients come themselves, a few hundred is enough.",
    )
    http_unfinished_bytes: int = Field(
        _DEFAULTS.unfinished_bytes,
        ge=1024,
        le=2**40,
        description="Memory for what has come of requests that are not whole yet, over all connections; beyond it the "
        "body that began first is answered 503, for it has had the most time. Sixteen of the largest bodies.",
    )
    http_hosts: tuple[str, ...] = Field(
        (),
        description="Names that requests may have in Host, besides addresses and names without a dot, for a server on "
        "a loopback address without API keys: that of a proxy in front of it, which passes Host on; * = any. Others "
        "get 403: a web page can give its own name this machine's address. Repeat for more.",
    )

    @model_validator(mode="after")
    def _line_fits(self) -> Self:
        if self.http_header_line_bytes > self.http_head_bytes:
            raise ValueError(
                f"http_header_line_bytes is {self.http_header_line_bytes}, allowed is at most http_head_bytes "
                f"({self.http_head_bytes}): a line is part of the head"
            )
        return self

    def http_limits(self) -> HttpLimits:
        """Return the limits as the server wants them."""
        return HttpLimits(
            head_bytes=self.http_head_bytes,
            header_line_bytes=self.http_header_line_bytes,
            headers=self.http_headers,
            header_timeout_s=self.http_header_timeout_ms / 1000,
            body_timeout_s=self.http_body_timeout_ms / 1000,
            body_bytes_per_s=self.http_body_bytes_per_s,
            keep_alive_timeout_s=self.http_keep_alive_timeout_ms / 1000,
            write_timeout_s=self.http_write_timeout_ms / 1000,
            pipeline_bytes=self.http_pipeline_bytes,
            connections=self.http_connections,
            connections_per_address=self.http_connections_per_address,
            unfinished_bytes=self.http_unfinished_bytes,
            hosts=self.http_hosts,
        )


class ServerSettings(HttpSettings):
    """Where a router's HTTP server listens, and how it ends."""

    host: str = Field("127.0.0.1", description="Address the HTTP server listens on; loopback unless told otherwise.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP server; 0 takes any free one.")
    shutdown_timeout_ms: float = Field(
        5_000, ge=0, le=600_000, description="How long open responses may finish after SIGINT or SIGTERM."
    )
