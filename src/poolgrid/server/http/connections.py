"""All connections of one HTTP server: which are accepted, what each waits for and since when, and what is held for
them.

Rules
    1. A connection is in at most one queue: waiting for its next request, within a head, within a body, or on its way
       out. Each queue has one time limit, so the first is always the next to run out, and looking for it costs the same
       however many wait. Times are looked at every tick of the server, a tenth of a second. A time in which this
       process stood still counts against no client: what clients sent meanwhile waits unread in their sockets.
    2. When there is no room for a new connection, the one that has waited longest for a request, else for the rest of
       a head, gives way: a client that only holds connections loses them. With a request in each, the new one is
       refused. There is no room at ``max_connections``, and when the process has few file descriptors left, whatever
       uses them.
    3. When there is no room for more of a body, the body that began first gives way: a client that only holds memory
       loses it. Bodies that are passed on as they come hold little, and stay.
    4. What is refused is counted by reason. Each reason is logged at most once in ``SAID_EVERY_S``, with the number.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import resource
from dataclasses import replace
from typing import Protocol

from prometheus_client import CollectorRegistry

from poolgrid.server.http.browser_requests import AllowedHosts
from poolgrid.server.http.http_settings import HttpLimits
from poolgrid.server.process.instruments import Counter, Gauge

log = logging.getLogger(__name__)

SAID_EVERY_S = 60.0
"""Shortest time between two lines of the log about the same kind of refusal."""

LINGER_S = 2.0
"""How long a connection that was refused something is read and thrown away: closing at once would reset it, and the
client might never read why."""

OTHER_FILES = 512
"""File descriptors for the rest of the process, those that it has opened included: sockets to workers and engine
servers, the journal, libraries. Where the limit is low, they get half of what is left at the start."""

SPARE_FILES = 128
"""File descriptors that the rest of the process may still open where it has opened more than that already."""

FILES_DIRECTORY = "/dev/fd"
"""Names the open file descriptors of the process that reads it."""

SOURCE_PREFIX_V6 = 64
"""Bits of an IPv6 address that name one site: every machine there has the rest of them to itself."""


class TrackedConnection(Protocol):
    """What the table needs of a connection: ``poolgrid.server.http.guard.Guard``, which explains each."""

    transport: asyncio.Transport

    @property
    def is_passing(self) -> bool: ...
    def is_draining(self) -> bool: ...
    def time_out(self, now_s: float) -> None: ...
    def close_idle(self) -> None: ...
    def abort_body(self) -> None: ...
    def body_deadline_s(self, since_s: float, now_s: float) -> float: ...
    def shutdown(self) -> None: ...


class Queue(dict[TrackedConnection, float]):
    """Connections in the order of their coming, with the time of it."""

    def first(self) -> TrackedConnection | None:
        return next(iter(self), None)


class HttpConnections:
    """The connections of one server, in its event loop."""

    def __init__(
        self,
        limits: HttpLimits,
        registry: CollectorRegistry | None = None,
        hosts: AllowedHosts | None = None,
    ) -> None:
        """Metrics go into ``registry`` when there is one; requests may name ``hosts`` only, where there are any."""
        self.limits = limits
        self.hosts = hosts
        self.is_ending = False
        """Each connection ends with its next answer."""
        self.open: set[TrackedConnection] = set()
        self.idle = Queue()
        """Waiting for a further request."""
        self.heads = Queue()
        """New, or with a part of a head."""
        self.bodies = Queue()
        """With a part of a body."""
        self.closing = Queue()
        """Closed by us, with an answer that the client has not taken yet."""
        self.lingering = Queue()
        """Refused, and read until the client has seen it."""
        self.stuck = Queue()
        """Whose client does not take its answer; in another queue besides, or none."""
        self.unfinished_bytes = 0
        """What has come of requests that are not whole."""
        self._by_source: dict[str, int] = {}
        self._count = 0
        self._files_max: int | None = None
        """Number of the file descriptor from which on few are left; ``None`` = there is no limit."""
        self._is_short_of_files = False
        self._refused = Counter(
            "poolgrid_http_refused_total",
            "Connections and requests refused by the HTTP server before any endpoint, by reason. It grows "
            "under attack, or when a limit is too small; invalid_http is a port scan, or TLS sent to a plain "
            "server. The log has the addresses, each reason at most once a minute.",
            ("reason",),
            registry=registry,
        )
        self._unsaid: dict[str, int] = {}
        self._say_at_s: dict[str, float] = {}
        opened = Gauge(
            "poolgrid_http_connections",
            "Open connections of the HTTP server. Limit: `max_connections`.",
            registry=registry,
        )
        opened.set_function(lambda: float(self._count))
        unfinished = Gauge(
            "poolgrid_http_unfinished_bytes",
            "Memory for incomplete and pipelined requests. Limit: 512 MiB.",
            registry=registry,
        )
        unfinished.set_function(lambda: float(self.unfinished_bytes))
        self._per_source_max = self._share_of_one()

    @property
    def count(self) -> int:
        return self._count

    @property
    def refused(self) -> dict[str, int]:
        return self._refused.by_label()

    # -- coming and going ----------------------------------------------------------------------------------------------

    def admit(self, source: str, now_s: float) -> str | None:
        """Count a new connection from ``source`` in; return the reason if there is no room for it."""
        if self._by_source.get(source, 0) >= self._per_source_max:
            self.note("connections_per_address", source, now_s)
            return f"{self._per_source_max} connections are open from {source}, the limit"
        if self._count >= self.limits.connections or (self._is_short_of_files and self._count):
            given_way = self.idle.first() or self.heads.first()
            if given_way is None:
                self.note("connections", source, now_s)
                return f"{self._count} connections are open, each with a request in work, the limit"
            self.note("gave_way", source, now_s)
            given_way.close_idle()
        self._count += 1
        self._by_source[source] = self._by_source.get(source, 0) + 1
        return None

    def leave(self, source: str) -> None:
        self._count -= 1
        left = self._by_source[source] - 1
        if left:
            self._by_source[source] = left
        else:
            del self._by_source[source]

    # -- file descriptors ----------------------------------------------------------------------------------------------

    def fit_files(self) -> None:
        """Bound the connections by the file descriptors that are left; raises their limit where it may."""
        wanted, opened = self.limits.connections, _open_files()
        spare = max(OTHER_FILES - opened, SPARE_FILES)
        files = _file_limit(wanted + opened + spare)
        if files is None:
            return
        left = max(0, files - opened)
        spare = min(spare, left // 2)
        fit = max(1, min(wanted, left - spare))
        self._files_max = files - max(1, spare // 4)
        if fit < wanted:
            log.warning(
                "setting max_connections: %d are wanted, %d fit: the limit of open files is %d, %d are open and %d are "
                "kept for the rest of the process. Raise the limit (ulimit -n, LimitNOFILE) or lower the setting",
                wanted,
                fit,
                files,
                opened,
                spare,
            )
            self.limits = replace(self.limits, connections=fit)
            self._per_source_max = self._share_of_one()

    def take_file(self, number: int) -> bool:
        """Note the file descriptor of a new connection, and return whether few are left: the system gives the lowest,
        so all below it are in use."""
        self._is_short_of_files = self._files_max is not None and number >= self._files_max
        return self._is_short_of_files

    def free_file(self, source: str, now_s: float) -> bool:
        """Close the connection that is missed least, for want of a file descriptor; ``False`` = there is none."""
        refused = self.lingering.first()
        if refused is not None:
            del self.lingering[refused]
            refused.transport.abort()
            return True
        given_way = self.idle.first() or self.heads.first()
        if given_way is None:
            return False
        self.note("gave_way", source, now_s)
        given_way.close_idle()
        return True

    def _share_of_one(self) -> int:
        return self.limits.connections_per_address or max(1, self.limits.connections * 3 // 4)

    # -- memory --------------------------------------------------------------------------------------------------------

    def make_room(self, connection: TrackedConnection, source: str, now_s: float) -> None:
        """Let bodies go that began first, until the rest fits; ``connection`` from ``source`` has just got more."""
        while self.unfinished_bytes > self.limits.unfinished_bytes:
            first = next((each for each in self.bodies if not each.is_passing), self.bodies.first())
            if first is None:
                return
            self.note("unfinished_bytes", source, now_s)
            first.abort_body()
            if first is connection:
                return

    def has_room(self, size: int) -> bool:
        """Return whether bytes of requests that have not begun may be held."""
        return self.unfinished_bytes + size <= self.limits.unfinished_bytes

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """End what has run out of time; ``now_s`` is the event loop's."""
        limits = self.limits
        _run_out(self.idle, now_s - limits.keep_alive_timeout_s, now_s)
        _run_out(self.heads, now_s - limits.header_timeout_s, now_s)
        if self.bodies:
            self._tick_bodies(now_s)
        while (first := self.lingering.first()) is not None and self.lingering[first] <= now_s - LINGER_S:
            del self.lingering[first]
            first.transport.abort()
        for queue in (self.closing, self.stuck):
            while (first := queue.first()) is not None and queue[first] <= now_s - limits.write_timeout_s:
                del queue[first]
                # Who is in both is judged once.
                if (queue is self.closing and first in self.stuck) or first.is_draining():
                    queue[first] = now_s
                else:
                    self.note("write_timeout", "a client that takes nothing", now_s)
                    first.transport.abort()

    def extend_deadlines(self, pause_s: float) -> None:
        """Give every connection ``pause_s`` more: the process stood still for so long and read nothing."""
        for queue in (self.idle, self.heads, self.bodies, self.closing, self.lingering, self.stuck):
            for connection, since_s in queue.items():
                queue[connection] = since_s + pause_s

    def _tick_bodies(self, now_s: float) -> None:
        late = []
        for connection, since_s in self.bodies.items():
            if since_s > now_s - self.limits.body_timeout_s:
                break  # later connections have more time left than the least of all
            if connection.body_deadline_s(since_s, now_s) <= now_s:
                late.append(connection)
        for connection in late:
            connection.time_out(now_s)

    # -- what is said --------------------------------------------------------------------------------------------------

    def note(self, reason: str, source: str, now_s: float) -> None:
        """Count a refusal, and log it when it is time."""
        self._refused.labels(reason).inc()
        self._unsaid[reason] = self._unsaid.get(reason, 0) + 1
        if now_s >= self._say_at_s.get(reason, float("-inf")):
            log.warning(
                "refused over HTTP (%s): %d since the last such line, now from %s; %d connections are open, %d bytes "
                "are held of requests that are not whole",
                reason,
                self._unsaid[reason],
                source,
                self._count,
                self.unfinished_bytes,
            )
            self._unsaid[reason] = 0
            self._say_at_s[reason] = now_s + SAID_EVERY_S


def _run_out(queue: Queue, before_s: float, now_s: float) -> None:
    while (first := queue.first()) is not None and queue[first] <= before_s:
        first.time_out(now_s)
        queue.pop(first, None)


def source_of(host: str) -> str:
    """Return what connections are counted by: an IPv4 address, or the network of an IPv6 address."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, SOURCE_PREFIX_V6), strict=False))


def _file_limit(wanted: int) -> int | None:
    """Return the limit of open files, raised to ``wanted`` where that is allowed; ``None`` = there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if allowed <= soft:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    log.info("raised the limit of open files from %d to %d for HTTP connections", soft, allowed)
    return allowed


def _open_files() -> int:
    """Return how many file descriptors are open; 0 where the system does not name them."""
    try:
        return len(os.listdir(FILES_DIRECTORY))
    except OSError:
        return 0
