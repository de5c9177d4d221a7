"""Follows engine servers that come and go: those of the command line, a file, DNS names, Kubernetes, an operator.

Each list has a task of its own, which tells ``ServerLists`` what it has; what is wanted then has a worker
(``poolgrid.server.workers.server_workers``). A list that cannot be read is reported once, and changes nothing.

``/v1/servers`` is for operators on this machine: ``GET`` lists the servers, ``POST`` adds one, ``DELETE`` removes one.
What is added so is forgotten when the process ends; what a file, a name or labels have, they remove.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import parse_qs

import msgspec

from poolgrid.server.http.health_app import HttpAnswer
from poolgrid.server.process.plugins import load_part
from poolgrid.server.process.tasks import cancel_all, supervised
from poolgrid.server.workers.engines.server.core.server_list import (
    FILE_CHARS_MAX,
    SERVERS_MAX,
    Addresses,
    DnsName,
    PodSelector,
    ServerEntry,
    ServerLists,
    read_entry,
    read_file,
    url_of,
)
from poolgrid.server.workers.engines.server.settings import FollowerSettings
from poolgrid.server.workers.server_workers import ServerWorkers

log = logging.getLogger(__name__)

FILE_LOOK_S = 1.0
"""Time between two looks at a file: a call of ``stat`` each."""

DNS_LOOK_S = 3.0
"""Time between two looks at a name: resolvers keep answers for some seconds anyway."""

DNS_TIMEOUT_S = 10.0
"""How long a resolver may take; one that does not answer takes a thread meanwhile."""

PODS = "pods"
"""A part that an installation may lack."""

GIVEN = "given"
"""List of what the command line and operators have named."""

Look = Callable[[], Awaitable[Sequence[ServerEntry]]]


class EngineServerFollower:
    """Implements ``poolgrid.server.workers.engines.definition.ServerFollower``."""

    def __init__(self, settings: FollowerSettings, workers: ServerWorkers) -> None:
        self._settings = settings
        self._workers = workers
        self._lists = ServerLists()
        self._followed: dict[str, tuple[ServerEntry, int]] = {}
        """What has a worker, with the number of its ports; by the worker's name."""
        self._troubles: dict[str, str] = {}
        """Why a list cannot be read, by its name."""
        self._left_out = 0
        self._closing: list[Callable[[], None]] = []
        """What ends the ways to lists."""
        self._is_ending = False

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until ``stop`` is set; raises ``OptionError`` for pods without the plug-in, ``ValueError`` and
        ``OSError`` where the cluster cannot be asked."""
        listed = [read_entry(each) for each in self._settings.engine_url]
        looks = [look for each in listed if (look := await self._look_of(each)) is not None]
        if self._settings.engine_urls_file is not None:
            file = WatchedFile(self._settings.engine_urls_file)
            looks.append((str(file.path), FILE_LOOK_S, file.look))
        self._put(GIVEN, [each for each in listed if isinstance(each, ServerEntry)])
        tasks = [supervised(lambda of=each: self._watch(*of), f"list {each[0]}") for each in looks]  # type: ignore[misc]
        try:
            await self._workers.run(stop)
        finally:
            self._is_ending = True
            await cancel_all(tasks)
            for close in self._closing:
                close()

    async def _look_of(self, listed: ServerEntry | DnsName | PodSelector) -> tuple[str, float, Look] | None:
        if isinstance(listed, DnsName):
            return f"dns+http://{listed.host}:{listed.port}", DNS_LOOK_S, WatchedName(listed).look
        if isinstance(listed, PodSelector):
            what = f"k8s+http://:{listed.port}?selector={listed.labels}"
            pods = await load_part(PODS, f"engine_url {what}")(listed.labels, listed.namespace)
            self._closing.append(pods.close)

            async def look() -> Sequence[ServerEntry]:
                return [ServerEntry(url_of(host, listed.port), listed.role) for host in await pods.addresses()]

            return what, pods.look_s, look
        return None

    async def _watch(self, name: str, pause_s: float, look: Look) -> None:
        while True:
            try:
                entries = await look()
            except (OSError, ValueError) as error:
                trouble = str(error) or type(error).__name__
                if self._troubles.get(name) != trouble:
                    self._troubles[name] = trouble
                    log.error("the servers of %s cannot be read, those before stay: %s", name, trouble)
            else:
                if self._troubles.pop(name, ""):
                    log.warning("the servers of %s can be read again", name)
                self._put(name, entries)
            await asyncio.sleep(pause_s)

    def _put(self, name: str, entries: Sequence[ServerEntry]) -> None:
        if self._is_ending or not self._lists.put(name, entries):
            return
        wanted = self._lists.wanted
        for worker_id, (entry, _) in list(self._followed.items()):
            if wanted.get(worker_id) != entry:
                if worker_id in wanted:
                    log.warning("engine server %s is listed as another one: its worker starts again", entry.url)
                else:
                    log.warning("engine server %s is not listed any more: its worker leaves the pool", entry.url)
                del self._followed[worker_id]
                self._workers.remove(worker_id)
        for worker_id, entry in wanted.items():
            if worker_id not in self._followed:
                taken = {number for _, number in self._followed.values()}
                number = next(number for number in range(SERVERS_MAX) if number not in taken)
                self._followed[worker_id] = entry, number
                self._workers.add(self._settings.of_server(entry, number))
        if self._lists.left_out != self._left_out:
            self._left_out = self._lists.left_out
            if self._left_out:
                log.error(
                    "%d engine servers are left out: %d are followed, allowed are at most %d in one process",
                    self._left_out,
                    len(wanted),
                    SERVERS_MAX,
                )

    # -- for operators -------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """Return what is followed, as JSON values."""
        return {
            "servers": [
                {
                    "url": entry.url,
                    "role": entry.role,
                    "worker_id": worker_id,
                    "list": self._lists.list_of(worker_id),
                    "state": self._workers.state_of(worker_id),
                }
                for worker_id, (entry, _) in self._followed.items()
            ],
            "left_out": self._left_out,
            "troubles": self._troubles,
        }

    def answer(self, method: str, query: bytes, body: bytes) -> HttpAnswer:
        """Answer a request to ``/v1/servers``."""
        if method in ("GET", "HEAD"):
            return _json(200, self.describe())
        if method not in ("POST", "DELETE"):
            return _refused(405, f"{method} is not allowed, allowed are GET, POST and DELETE")
        try:
            entry = _entry_of(query, body)
        except ValueError as error:
            return _refused(400, f"{error}; nothing has changed")
        return self._add(entry) if method == "POST" else self._remove(entry)

    def _add(self, entry: ServerEntry) -> HttpAnswer:
        given = self._lists.entries(GIVEN)
        of = self._lists.list_of(entry.worker_id)
        if of:
            return _refused(409, f"{entry.url} is followed already, as one of {of}; nothing has changed")
        if len(self._lists.wanted) >= SERVERS_MAX:
            return _refused(409, f"{SERVERS_MAX} servers are followed, allowed are not more; nothing has changed")
        log.warning("engine server %s is added by an operator", entry.url)
        self._put(GIVEN, [*given, entry])
        return _json(202, self.describe())

    def _remove(self, entry: ServerEntry) -> HttpAnswer:
        given = self._lists.entries(GIVEN)
        left = [each for each in given if each.worker_id != entry.worker_id]
        of = self._lists.list_of(entry.worker_id)
        if not of:
            return _refused(404, f"{entry.url} is not followed; nothing has changed")
        if len(left) == len(given):
            return _refused(409, f"{entry.url} is one of {of}: remove it there; nothing has changed")
        self._put(GIVEN, left)
        return _json(202, self.describe())


class WatchedFile:
    """The servers of a file, read again when it is another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._entries: Sequence[ServerEntry] = ()

    async def look(self) -> Sequence[ServerEntry]:
        """Return its servers; raises ``OSError``, and ``ValueError`` as long as it is broken."""
        found = os.stat(self.path)
        seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        if seen != self._seen:
            self._entries = await asyncio.to_thread(self._read)
            self._seen = seen
        return self._entries

    def _read(self) -> Sequence[ServerEntry]:
        with self.path.open(encoding="utf-8") as file:
            text = file.read(FILE_CHARS_MAX + 1)
        if len(text) > FILE_CHARS_MAX:
            raise ValueError(f"it has more than {FILE_CHARS_MAX} characters")
        return read_file(text)


class WatchedName:
    """The servers at the addresses of a DNS name."""

    def __init__(self, name: DnsName) -> None:
        self._name = name
        self._addresses = Addresses()

    async def look(self) -> Sequence[ServerEntry]:
        """Return its servers; raises ``OSError`` when it cannot be resolved, ``TimeoutError``."""
        host, port, role = self._name
        async with asyncio.timeout(DNS_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = self._addresses.seen(str(address[0]) for *_, address in found)
        if len(addresses) > SERVERS_MAX:
            raise ValueError(f"it has {len(addresses)} addresses, allowed are at most {SERVERS_MAX}")
        return [ServerEntry(url_of(each, port), role) for each in addresses]


class _Named(msgspec.Struct):
    url: str = ""
    role: str = ""


def _entry_of(query: bytes, body: bytes) -> ServerEntry:
    """Return the server that a request names in its query or in its body of JSON; raises ``ValueError``."""
    asked = parse_qs(query.decode("utf-8", "replace"))
    named = _Named(asked.get("url", [""])[-1], asked.get("role", [""])[-1])
    if not named.url:
        try:
            named = msgspec.json.decode(body, type=_Named)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            named = _Named()
    if not named.url:
        raise ValueError('no url is given, allowed are ?url=http://HOST:PORT and {"url": "http://HOST:PORT"}')
    entry = read_entry(f"{named.role}={named.url}" if named.role else named.url)
    if not isinstance(entry, ServerEntry):
        raise ValueError(f"url is {named.url[:80]!r}, which stands for several servers, allowed are single ones")
    return entry


def _json(status: int, said: object) -> HttpAnswer:
    return status, "application/json", msgspec.json.encode(said)


def _refused(status: int, why: str) -> HttpAnswer:
    return _json(status, {"error": {"message": why}})
