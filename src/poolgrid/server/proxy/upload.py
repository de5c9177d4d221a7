"""A form on its way to an engine server: its beginning is held, the rest streams.

Rules
    1. A form is read until it ends, or until ``HELD_BYTES_MAX`` of it are held. What it has named by then is its model,
       which decides the servers that may get it.
    2. A form that is held whole is sent like any other body, and sent again like any other.
    3. Of a longer one the client is read as its server takes it. It may go to another server as long as nothing beyond
       its beginning was read.
    4. All of it is looked through for the model: a tenant that may not use every model could otherwise name one behind
       the beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import Receive

from poolgrid.kernel.requests.inference import Refused
from poolgrid.server.forwarding.multipart import FormFields
from poolgrid.server.frontend.access.tenants import Caller
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.request_body import too_large
from poolgrid.server.http.guard import Guard
from poolgrid.server.process.tasks import detached
from poolgrid.server.proxy.chunks import LAST_CHUNK, chunk
from poolgrid.server.proxy.server_connection import ServerConnection

HELD_BYTES_MAX: Final = 32 << 20
"""Of one form that are held: its file may come before the field with its model, and transcription takes files of 25 MB.
It is what any body may have by default (``max_body_bytes``)."""


class Upload:
    """One form."""

    def __init__(
        self,
        receive: Receive,
        guard: Guard,
        boundary: bytes,
        length: int | None,
        bytes_max: int,
        caller: Caller | None,
    ) -> None:
        """``length`` is the announced one, ``None`` for chunks; ``caller`` has the models that may be named, if there
        are keys."""
        self._receive = receive
        self._guard = guard
        self._form = FormFields(boundary)
        self.length = length
        self._bytes_max = bytes_max
        self._caller = caller
        self._held = b""
        self._size = 0
        self.is_whole = False
        """Whether it is held whole."""
        self.has_begun = False
        """Whether more than its beginning was read, so that it cannot be sent again."""
        self._sending: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return self._form.values.get("model", "")

    async def begin(self) -> bytes | None:
        """Return the form as far as it is held, ``None`` when the client left. Raises ``RequestError``, ``Refused``."""
        parts: list[bytes] = []
        while self._size < HELD_BYTES_MAX and not self.is_whole:
            piece = await self._next()
            if piece is None:
                return None
            parts.append(piece)
        self._held = b"".join(parts)
        return self._held

    def first(self) -> bytes:
        """Return what follows the request's head, as the server gets it."""
        return self._held if self.length is not None else chunk(self._held)

    def start(self, connection: ServerConnection, refuse: Callable[[RequestError | Refused], None]) -> None:
        """Send the rest as it comes; ``refuse`` gets the reason why it may not be sent."""
        self.stop()
        self._sending = detached(self._send_rest(connection, refuse), "upload to an engine server")

    def stop(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    async def _send_rest(self, connection: ServerConnection, refuse: Callable[[RequestError | Refused], None]) -> None:
        try:
            while not self.is_whole:
                await connection.has_room()
                piece = await self._next()
                if piece is None:
                    return  # the exchange hears of it too
                self._let_go()
                connection.write(chunk(piece) if self.length is None and piece else piece)
                self._guard.passed(len(piece))
            if self.length is None:
                connection.write(LAST_CHUNK)
            connection.request_sent()
        except (RequestError, Refused) as error:
            refuse(error)

    def _let_go(self) -> None:
        """Forget the beginning, which its server has."""
        if not self.has_begun:
            self.has_begun = True
            self._guard.passed(len(self._held))
            self._held = b""

    async def _next(self) -> bytes | None:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            return None
        piece: bytes = message.get("body", b"")
        self._size += len(piece)
        if self._size > self._bytes_max:
            raise too_large(f"more than {self._bytes_max}", self._bytes_max)
        self.is_whole = not message.get("more_body", False)
        self._look(piece)
        return piece

    def _look(self, piece: bytes) -> None:
        before = self.model
        self._form.feed(piece)
        if self._caller is None:
            return
        if self.model != before:
            self._caller.check_model(self.model)
        if self.is_whole and not self._form.has_end and not self._caller.may_use_any_model:
            message = "reading the form: its end cannot be found, so that its model is not known for certain"
            raise RequestError(400, "invalid_form", message)
