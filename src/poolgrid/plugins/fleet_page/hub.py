"""What viewers of the fleet page are sent: one picture, then what changed of it, a few times a second.

Rules
    1. Without viewers, nothing runs and nothing is collected. The first viewer starts it; it ends ``LINGER_S`` after
       the last has gone, so that one who reconnects finds what was missed.
    2. A change is put together and encoded once, for all viewers. At most ``viewers_max`` look at a time; one more is
       answered 503.
    3. Nothing waits for a viewer. The last ``CHANGES_KEPT`` changes are kept; a viewer that is slower gets the ones it
       missed in one piece, and beyond them the whole picture again. The server cuts one that takes nothing at all
       (60 s).
    4. Putting a picture together takes at most a fifth of the time: what takes longer is done less often.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import Restart, supervised

Row = tuple[Any, ...]
"""Values of one row of a table, in the order of the table's columns."""


class Picture(msgspec.Struct):
    """What there is to see at one moment. It is not changed once it was handed over."""

    values: dict[str, Any]
    """Small things by name; each is sent whole when it differs from the one before."""
    tables: dict[str, dict[str, Row]]
    """Rows by table and key; rows that differ are sent."""


class FleetSource(Protocol):
    """A router, as the fleet page sees it. All calls come from its event loop."""

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the columns of each table, without the key."""
        ...

    def begin(self) -> None:
        """There are viewers from now on: begin to collect what is not kept anyway."""
        ...

    def end(self) -> None: ...

    async def look(self) -> Picture:
        """Return what there is to see now; others have their turn meanwhile."""
        ...

    async def request(self, request_id: str) -> dict[str, Any] | None:
        """Return why a request went where it went, and the times of its legs; ``None`` when nothing is kept of it."""
        ...


CHANGES_KEPT = 64
"""Sixteen seconds at four a second: longer than a browser takes to connect again. Each is some 10 kB in a busy pool of
500 workers."""

LINGER_S = 10.0
"""How long changes are collected after the last viewer has gone."""

REST_FACTOR = 4.0
"""How many times as long as a picture took nothing is done before the next one."""

ALIVE_S = 5.0
"""Longest silence of a stream: browsers behind proxies tell a quiet pool from a lost connection by it."""

RETRY_AFTER_S = 5

INTERVAL_MS = 250.0
"""Least time between two changes that viewers are sent; a pool so large that putting one together takes more than a
fifth of it is shown less often."""

VIEWERS_MAX = 16
"""Viewers of one process at a time."""


class FleetHub:
    """All viewers of one process."""

    def __init__(
        self, source: FleetSource, clock: Clock, interval_ms: float = INTERVAL_MS, viewers_max: int = VIEWERS_MAX
    ) -> None:
        self.viewers = 0
        self._source = source
        self._clock = clock
        self._interval_s = interval_ms / 1000
        self._viewers_max = viewers_max
        self._life = secrets.token_hex(4)
        """Tells the changes of this process from those of the one before it."""
        self._version = 0
        self._picture: Picture | None = None
        self._whole: tuple[int, bytes] | None = None
        self._changes: deque[tuple[int, bytes]] = deque(maxlen=CHANGES_KEPT)
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def is_looking(self) -> bool:
        return self._looking is not None

    def check_room(self) -> None:
        """Raise ``RequestError`` 503 when one more viewer would be too many, or the process ends."""
        if self._closed:
            raise RequestError(503, "not_ready", "looking at the fleet: the router is shutting down")
        if self.viewers >= self._viewers_max:
            raise RequestError(
                503,
                "too_many_viewers",
                f"looking at the fleet: {self.viewers} viewers do already, the limit; try again later",
                headers=((b"retry-after", str(RETRY_AFTER_S).encode()),),
            )

    async def frames(self, resume: str) -> AsyncGenerator[bytes, None]:
        """Yield what one viewer is sent, as server-sent events, until the process ends.

        ``resume`` is the id of the last event that the viewer has, empty for a new one. Close it when the viewer goes.
        """
        self._enter()
        try:
            sent = self._version_of(resume)
            while not self._closed:
                news = self._news
                frame = self._next(sent)
                if frame:
                    sent = self._version
                    yield frame
                    continue
                try:
                    async with asyncio.timeout(ALIVE_S):
                        await news.wait()
                except TimeoutError:
                    yield b": alive\n\n"
            yield b"event: bye\ndata: {}\n\n"
        finally:
            self._leave()

    def close(self) -> None:
        """End every stream: the process ends. A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self._stop()
        self._tell()

    # -- viewers -------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self.viewers += 1
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._looking is None and not self._closed:
            self._source.begin()
            self._looking = supervised(self._look, "fleet page", Restart(limit=None))

    def _leave(self) -> None:
        self.viewers -= 1
        if not self.viewers and self._looking is not None:
            self._rest = asyncio.get_running_loop().call_later(LINGER_S, self._stop)

    def _stop(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
            self._source.end()
        self._picture = self._whole = None
        self._changes.clear()

    def _version_of(self, resume: str) -> int | None:
        life, _, version = resume.partition("-")
        return int(version) if life == self._life and version.isascii() and version.isdecimal() else None

    def _next(self, sent: int | None) -> bytes:
        """Return what a viewer has not seen, whose last event is ``sent``; empty when there is nothing."""
        if self._picture is None or sent == self._version:
            return b""
        if sent is not None and self._changes and self._changes[0][0] <= sent + 1 <= self._version:
            return b"".join(frame for version, frame in self._changes if version > sent)
        if self._whole is None or self._whole[0] != self._version:
            self._whole = (self._version, self._encoded("whole", self._picture.values, self._rows_of(self._picture)))
        return self._whole[1]

    # -- pictures ------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            began_s = now_s()
            self._publish(await self._source.look())
            await asyncio.sleep(max(self._interval_s, REST_FACTOR * (now_s() - began_s)))

    def _publish(self, picture: Picture) -> None:
        before, self._picture = self._picture, picture
        if before is None:
            self._version += 1
            self._changes.clear()
            self._tell()
            return
        values = {name: value for name, value in picture.values.items() if before.values.get(name) != value}
        tables: dict[str, dict[str, Any]] = {}
        for name, rows in picture.tables.items():
            old = before.tables.get(name, {})
            changed = [(key, *row) for key, row in rows.items() if old.get(key) != row]
            gone = [key for key in old if key not in rows]
            if changed or gone:
                tables[name] = {"rows": changed, "gone": gone}
        if values or tables:
            self._version += 1
            self._changes.append((self._version, self._encoded("change", values, tables)))
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _rows_of(self, picture: Picture) -> dict[str, dict[str, Any]]:
        return {
            name: {"columns": self._source.columns[name], "rows": [(key, *row) for key, row in rows.items()]}
            for name, rows in picture.tables.items()
        }

    def _encoded(self, kind: str, values: dict[str, Any], tables: dict[str, dict[str, Any]]) -> bytes:
        data = msgspec.json.encode({"time_ms": self._clock.wall_ms(), "values": values, "tables": tables})
        head = f"id: {self._life}-{self._version}\nevent: {kind}\ndata: ".encode()
        return b"".join((head, data, b"\n\n"))
