"""One engine server over HTTP: what it is asked now and then."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.server.http.http_client import ClientExchange, HttpClient, HttpTarget, RequestFailed
from poolgrid.server.process.clock import Clock

PAGE_BYTES_MAX = 16 * 1024 * 1024
"""Largest answer that is not parsed as a whole: a page of metrics has some 200 KB, of 64 ranks some 10 MB."""

FACTS_BYTES_MAX = 1024 * 1024
"""Largest answer in JSON that is asked for again and again, parsed on the event loop of all engines' follower in 40 ms:
``/v1/models`` with 1,700 adapters."""

EVENTS_BYTES_MAX = 32 * 1024 * 1024
"""Largest answer of cache events: 100,000 of them, which is what waits for the follower at most."""

QUESTION_TIMEOUT_S = 10.0
"""How long an answer to a question may take: servers under load answer late, dead ones never."""

NOT_THERE = frozenset({400, 401, 403, 404, 405, 410, 422, 501})
"""Statuses of a path that a server does not have, or does not show; any other one may pass."""

KEY_REFUSED = frozenset({401, 403})
"""Statuses of a server that does not take the API key it was given."""

T = TypeVar("T")


class ServerError(Exception):
    """The server did not answer a question as it should have."""

    def __init__(self, reason: str, status: int = 0, is_late: bool = False) -> None:
        self.status = status
        """Of the answer; 0 = none came."""
        self.is_late = is_late
        """Whether none came in time."""
        super().__init__(reason)


class KeyRefused(ServerError):
    """The server does not take the API key, or asks for one."""


class _Answer(ClientExchange):
    """A whole answer in memory."""

    __slots__ = ("_bytes_max", "body")

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self.body = bytearray()

    def take_body(self, data: bytes) -> None:
        if len(self.body) + len(data) > self._bytes_max:
            raise RequestFailed("protocol", f"the answer exceeds {self._bytes_max} bytes")
        self.body += data

    def cut_off(self, error: Exception | None) -> None:
        """Take an answer without a length, which ends with its connection."""


class ServerClient:
    """Asks one server; ``url`` may end in ``/v1``. Raises ``ValueError`` for a URL or key that is none."""

    def __init__(self, url: str, clock: Clock, api_key: str = "") -> None:
        self.target = HttpTarget(url)
        self.clock = clock
        headers = ["Content-Type: application/json", "User-Agent: poolgrid"]
        self._has_key = bool(api_key)
        self.http = HttpClient(self.target, clock, headers, api_key=api_key)

    async def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes = b"",
        timeout_s: float = QUESTION_TIMEOUT_S,
        bytes_max: int = PAGE_BYTES_MAX,
    ) -> bytes:
        """Return the answer's body; raises ``ServerError`` for any but a 200 of at most ``bytes_max``."""
        answer = _Answer(bytes_max)
        try:
            await self.http.send(method, path, body, answer, timeout_s=timeout_s)
        except RequestFailed as failure:
            late = failure.kind == "timeout"
            raise ServerError(f"asking {self.target.url}{path}: {failure.detail}", is_late=late) from None
        if answer.status in KEY_REFUSED:
            given = "is not the one that the engine's server asks for" if self._has_key else "is missing"
            raise KeyRefused(
                f"engine_api_key {given}: {self.target.url}{path} answers with status {answer.status}", answer.status
            )
        if answer.status != 200:
            # A page is of a proxy, or of another server.
            said = "an HTML page" if answer.body.lstrip()[:1] == b"<" else answer.excerpt(answer.body)
            raise ServerError(f"asking {self.target.url}{path}: status {answer.status}: {said}", answer.status)
        return bytes(answer.body)

    async def ask_for(self, path: str, form: type[T], bytes_max: int = FACTS_BYTES_MAX) -> T:
        """Return the answer as a JSON value of a type; raises ``ServerError``, ``DecodeError``."""
        body = await self.ask(path, bytes_max=bytes_max)
        try:
            return msgspec.json.decode(body, type=form, strict=False)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DecodeError(f"the answer to {path}", str(error)) from None

    async def ask_if_there(self, path: str, form: type[T], bytes_max: int = FACTS_BYTES_MAX) -> T | None:
        """Return the same, or ``None`` where the server has no such path or does not say it in that form."""
        try:
            return await self.ask_for(path, form, bytes_max)
        except DecodeError:
            return None
        except ServerError as error:
            if error.status in NOT_THERE:
                return None
            raise

    def close(self) -> None:
        self.http.close()
