"""The first of two legs: a server computes the prompt of a request that another server answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, Protocol

from msgspec import Raw

from poolgrid.server.forwarding.event_filter import read_answer
from poolgrid.server.forwarding.two_legs import begins_together, freeing_body, params_of, prefill_body, transfer_of
from poolgrid.server.process.tasks import detached
from poolgrid.server.proxy.collector import WholeAnswer, collect
from poolgrid.server.proxy.forward_server import ForwardServer
from poolgrid.server.proxy.ports import ServerPlace
from poolgrid.server.proxy.server_connection import AnswerFailed

log = logging.getLogger(__name__)

FREEING_TIMEOUT_S: Final = 30.0
"""For one token on a decode server; longer, and the prefill server's own time-out frees the KV."""


class SplitRequest(Protocol):
    """The request whose prompt is computed."""

    name: str

    def server_of(self, place: ServerPlace) -> ForwardServer:
        """Return the connections to a server."""
        ...

    def body_for(self, place: ServerPlace) -> bytes:
        """Return the body as a server gets it that has the request to itself."""
        ...

    def head_for(self, server: ForwardServer, place: ServerPlace, body: bytes) -> bytes:
        """Return the head of the request as a server gets it with a body."""
        ...

    def decode_place(self) -> ServerPlace | None:
        """Return a decode server of its model."""
        ...

    def take_transfer(self, dispatch_id: str, params: bytes) -> None:
        """Take the parameters with which the decode leg may begin."""
        ...

    def take_prompt(self, cached_tokens: int | None) -> None:
        """Take note that the prompt is computed, and how much of it was cached."""
        ...

    def prefill_failed(self, dispatch_id: str, error: AnswerFailed) -> None:
        """Take note that the prompt is not computed."""
        ...

    def prefill_refused(self, dispatch_id: str, place: ServerPlace, server: ForwardServer, answer: WholeAnswer) -> None:
        """Take an answer of the prefill server that is no prompt."""
        ...


class PrefillLeg:
    """The prefill leg of one request, which a failure of either leg begins again."""

    def __init__(self, request: SplitRequest, path: str, values: Mapping[str, Raw]) -> None:
        """``values`` are the members of the request of ``POST path``."""
        self._request = request
        self._path = path
        self._values = values
        self.dispatch_id = ""
        self._kept_params = b""
        """What a server of vLLM has left whose KV no other server was asked for, or none that lives."""
        self._computing: asyncio.Task[None] | None = None

    def begin(self, dispatch_id: str, place: ServerPlace) -> None:
        self.dispatch_id = dispatch_id
        server = self._request.server_of(place)
        transfer = transfer_of(place.kind, dispatch_id, server.target.host, place.kv_bootstrap_port)
        self._computing = detached(self._compute(dispatch_id, place, server, transfer), "prompt on an engine server")
        if begins_together(place.kind):
            asyncio.get_running_loop().call_soon(self._request.take_transfer, dispatch_id, transfer)

    async def _compute(self, dispatch_id: str, place: ServerPlace, server: ForwardServer, transfer: bytes) -> None:
        request, path = self._request, self._path
        try:
            body = prefill_body(path, place.kind, request.body_for(place), self._values, dispatch_id, transfer)
            answer = await collect(server, (request.head_for(server, place, body), body), None)
            params = params_of(path, place.kind, answer.body) if answer.status == 200 else b""
        except (AnswerFailed, OSError, TimeoutError, ValueError) as error:
            why = f"computing the prompt on {server.url}: {str(error) or 'no answer in time'}"
            request.prefill_failed(dispatch_id, AnswerFailed(why))
            return
        if answer.status != 200:
            request.prefill_refused(dispatch_id, place, server, answer)
            return
        self._kept_params = params if place.kind == "vllm" else b""
        request.take_prompt(read_answer(answer.body).cached_tokens)
        if not begins_together(place.kind):
            request.take_transfer(dispatch_id, params)

    def stop(self) -> None:
        """Close the exchange with the prefill server."""
        task, self._computing = self._computing, None
        if task is not None:
            task.cancel()

    def withdraw(self) -> None:
        """Stop, and have the prefill server free KV that no decode server will fetch."""
        self.stop()
        params, self._kept_params = self._kept_params, b""
        place = self._request.decode_place() if params else None
        if place is not None:
            detached(self._free_on(place, params), "freeing KV of a prefill server")

    def kv_is_asked_for(self) -> None:
        """Take note that a decode server was asked for the KV: when its client leaves, it has the KV freed."""
        self._kept_params = b""

    async def _free_on(self, place: ServerPlace, params: bytes) -> None:
        request = self._request
        server = request.server_of(place)
        body = freeing_body(self._path, request.body_for(place), self._values, params)
        try:
            await collect(server, (request.head_for(server, place, body), body), FREEING_TIMEOUT_S)
        except (AnswerFailed, OSError) as error:
            log.warning("request %s: the KV of its prompt stays until its server frees it: %s", request.name, error)
