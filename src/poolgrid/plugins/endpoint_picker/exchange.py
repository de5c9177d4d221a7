"""One HTTP request that a gateway forwards, as ext-proc reports it: phase by phase, each of which wants an answer.

When the endpoint is chosen depends on when Envoy sends the headers on:

| Envoy sends the body | chosen | by |
|---|---|---|
| ``FULL_DUPLEX_STREAMED`` | with its last piece: headers are answered, and the pieces given back | cache, load |
| ``BUFFERED``, ``BUFFERED_PARTIAL`` | with the body: headers were answered, and are changed now | cache, load |
| ``STREAMED``, ``NONE`` | with the headers, which are gone before the body comes | load |

Nothing here knows of gRPC, and nothing waits but the choice.

Where the gateway sends its access log (``poolgrid.plugins.endpoint_picker.access_log``), the exchange of a stream of
tokens ends with the first piece of the answer: Envoy sends nothing more of it, and the log has the end.

What passes by of an engine's answer: that it has begun, and how much of the prompt it reports as reused.

Usage stands at the end of an answer, in OpenAI's and in Anthropic's form, streamed or whole. So its last bytes are kept
and looked at once; nothing is parsed while a stream flows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from poolgrid.plugins.endpoint_picker import envoy_messages as envoy
from poolgrid.plugins.endpoint_picker.access_log import BOOKING
from poolgrid.plugins.endpoint_picker.picker import Asked, Booking, Picked, Picker, Shed
from poolgrid.plugins.endpoint_picker.stream_table import StreamTable, bodies_full
from poolgrid.server.frontend.errors import RequestError

TAIL_BYTES = 16 * 1024
"""Kept of the end of an answer: the usage, and the choices of a whole answer's last lines. Older ones go."""

_USAGE = '"usage"'
_decoder = json.JSONDecoder()


class AnswerReader:
    """Reads one answer."""

    def __init__(self) -> None:
        self.has_begun = False
        self._tail = bytearray()

    def take(self, part: bytes) -> bool:
        """Take the next bytes of the body; return whether they are the first."""
        if not part:
            return False
        is_first, self.has_begun = not self.has_begun, True
        self._tail += part
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]
        return is_first

    def prompt_tokens(self) -> tuple[int | None, int | None]:
        """Return the prompt tokens that the answer reports as cached, and all; ``None`` = not reported."""
        text = self._tail.decode("utf-8", "replace")
        at = text.rfind(_USAGE)
        while at >= 0:
            value = _value_after(text, at + len(_USAGE))
            if isinstance(value, dict):
                return _cached(value), _counted(value)
            at = text.rfind(_USAGE, 0, at)  # a last chunk may have ``"usage": null``
        return None, None


def _value_after(text: str, at: int) -> Any:
    rest = text[at:].lstrip()
    if not rest.startswith(":"):
        return None
    try:
        return _decoder.raw_decode(rest[1:].lstrip())[0]
    except (ValueError, RecursionError):
        return None


def _cached(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    value = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cache_read_input_tokens")
    return value if type(value) is int and value >= 0 else None


def _counted(usage: dict[str, Any]) -> int | None:
    """Return the tokens of the whole prompt; Anthropic's ``input_tokens`` leave out what came from a cache."""
    value = usage.get("prompt_tokens")
    if value is None and "input_tokens_details" in usage:
        value = usage.get("input_tokens")
    return value if type(value) is int and value >= 0 else None


DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata key of the answer."""

DESTINATION_NAMESPACE = "envoy.lb"

SERVED = "x-gateway-destination-endpoint-served"
"""Metadata key of the endpoint that a gateway reports as used."""

SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
"""Where a gateway lists the endpoints that it allows: a list, or several with commas between."""

UPSTREAM_ADDRESS = "upstream.address"
"""Attribute with the same for a gateway that does not name the endpoint: ``response_attributes`` asks for it."""

RANK_HEADER = "x-data-parallel-rank"

SHOWN_BODY_MODES = (envoy.FULL_DUPLEX_STREAMED, envoy.BUFFERED, envoy.BUFFERED_PARTIAL)
"""Modes in which a body is there before the request continues."""

READ_HEADERS = frozenset((":method", ":path", "content-encoding", "content-length", "x-request-id"))
"""Request headers that are kept until the choice."""

VALUE_OVERHEAD_BYTES = 64
"""Memory of a string in addition to its characters."""

CONTENT_LENGTH_DIGITS_MAX = 18
"""Longer ones are no length of anything."""

HEADERS, BODY, TRAILERS, END = range(1, 5)
"""How far one side has come."""

Response = Any
"""A ``ProcessingResponse``."""


class ProtocolError(Exception):
    """The gateway's messages do not follow on each other as ext-proc has them."""


class _Phases:
    """How far the request or the answer of an exchange has come."""

    _ORDER = ("", "headers", "body", "trailers", "end")

    def __init__(self, of: str) -> None:
        self._of = of
        self.reached = 0

    def take(self, phase: int, ends: bool) -> None:
        """Take the next message; raises ``ProtocolError`` for one that cannot come here."""
        if phase < self.reached or (phase == self.reached and phase != BODY):
            raise ProtocolError(
                f"the gateway sent {self._of}_{self._ORDER[phase]} after {self._of} {self._ORDER[self.reached]}"
            )
        self.reached = END if ends or phase == TRAILERS else phase


class PickerExchange:
    """The phases of one request. Implements ``poolgrid.plugins.endpoint_picker.stream_table.Held``."""

    def __init__(self, picks: Picker, table: StreamTable, gateway: str = "") -> None:
        """``gateway`` is the address from which it comes."""
        self._picks = picks
        self._gateway = gateway
        self._table = table
        self._headers: dict[str, str] = {}
        self._candidates: frozenset[str] | None = None
        self._request_mode = envoy.BUFFERED
        self._is_mode_known = False
        self._response_mode = envoy.NONE
        self._parts: list[bytes] = []
        self._held_bytes = 0
        """Of headers, metadata and body."""
        self._body_bytes = 0
        self._picked: Picked | None = None
        self._request, self._response = _Phases("request"), _Phases("response")
        self._answer = AnswerReader()
        self._status = ""
        self._is_stream = False
        """Whether the answer is one of events."""
        self.is_over = False
        """Whether the stream is to end: nothing more is read."""
        self.parting: Response | None = None
        """Answer that is written before that."""
        self.wake: Callable[[], None] = _asleep
        """Called when the exchange is over while its stream waits for the gateway."""
        self.reset: Callable[[], None] = _asleep
        """Called to end the stream while something is being written."""

    @property
    def booking(self) -> Booking | None:
        return None if self._picked is None else self._picked.booking

    @property
    def body_bytes(self) -> int:
        """Return how much of the body counts as received: all of it where the gateway gathers it."""
        if self._request_mode == envoy.FULL_DUPLEX_STREAMED:
            return self._body_bytes
        return self._announced_bytes() or self._table.body_bytes_max

    async def on(self, said: Any) -> list[Response]:
        """Return the answers to a ``ProcessingRequest``, in order; raises ``ProtocolError``.

        An empty list means that the answer comes with a later message, as full duplex allows. Call ``sent`` once they
        are written.
        """
        if self.is_over:
            return []
        taken = self._take(said)
        del said  # a message is as large as what is kept of it, and a choice takes a while
        return taken if isinstance(taken, list) else await taken

    def _take(self, said: Any) -> list[Response] | Coroutine[Any, Any, list[Response]]:
        kind = said.WhichOneof(envoy.SAID)
        if kind == "request_headers":
            return self._on_request_headers(said)
        if kind == "request_body":
            return self._on_request_body(said.request_body)
        if kind == "request_trailers":
            return self._on_request_trailers()
        if kind == "response_headers":
            return self._on_response_headers(said)
        if kind == "response_body":
            return self._on_response_body(said.response_body)
        if kind == "response_trailers":
            self._response.take(TRAILERS, True)
            self._end()
            return [_response("response_trailers")]
        raise ProtocolError(f"the gateway sent a message of the kind {kind}, which ext-proc does not have here")

    def sent(self) -> None:
        """The answers are written; what was held for them is released."""
        if self._picked is not None or self.is_over:
            self._let_go()

    def end(self, shed: Shed | None) -> None:
        """Forget the request, and answer ``shed`` where a request has come and has no answer yet."""
        self._let_go()
        self._table.settle(self)
        self.is_over = True
        if shed is not None and self._request.reached and not self._response.reached:
            self._picks.count_shed(shed)
            self.parting = _shed(shed)
        self.wake()

    def close(self) -> None:
        """End what the gateway's stream was for: the request is over, or its client has gone."""
        self.is_over = True
        if self._response.reached:
            self._hand_over()
        self._end()
        self._table.leave(self)

    # -- the request -----------------------------------------------------------------------------------------------

    def _on_request_headers(self, said: Any) -> list[Response] | Coroutine[Any, Any, list[Response]]:
        head = said.request_headers
        if self._response.reached:
            raise ProtocolError("the gateway sent request_headers after those of the response")
        self._request.take(HEADERS, head.end_of_stream)
        self._headers = {name: value for name, value in _headers(head.headers.headers) if name in READ_HEADERS}
        self._candidates = _candidates(said.metadata_context.filter_metadata)
        if said.HasField("protocol_config"):
            self._is_mode_known = True
            self._request_mode = said.protocol_config.request_body_mode
            self._response_mode = said.protocol_config.response_body_mode
        head_bytes = _size(self._headers.values())
        head_bytes_max = self._table.limits.head_bytes
        if head_bytes > head_bytes_max:
            message = f"the request's path and headers have {head_bytes} bytes, allowed are {head_bytes_max}"
            return [self._shed_at_once(Shed(431, "head_too_large", f"{message}"))]
        if self._announced_bytes() > self._table.body_bytes_max:
            return [self._shed_at_once(self._too_large())]
        self._table.await_body(self)
        shed = self._hold(head_bytes + _size(self._candidates or ()))
        if shed is not None:
            return [self._shed_at_once(shed)]
        if head.end_of_stream:
            return self._pick_with_headers("no_body")
        if self._request_mode == envoy.FULL_DUPLEX_STREAMED:
            return []
        if self._request_mode in SHOWN_BODY_MODES:
            return [_response("request_headers")]
        return self._pick_with_headers("streamed" if self._request_mode == envoy.STREAMED else "no_body")

    async def _pick_with_headers(self, why: str) -> list[Response]:
        found = await self._pick(None, why)
        return [_shed(found)] if isinstance(found, Shed) else [_told(found, "request_headers")]

    def _on_request_body(self, body: Any) -> list[Response] | Coroutine[Any, Any, list[Response]]:
        if not self._request.reached:
            raise ProtocolError("the gateway sent request_body before request_headers")
        self._request.take(BODY, body.end_of_stream)
        if self._request_mode not in SHOWN_BODY_MODES:
            return [_response("request_body")]
        if self._picked is not None:
            # Gateways that do not name their mode (before Envoy 1.33) may stream; the others have sent it all.
            if self._is_mode_known:
                raise ProtocolError("the gateway sent request_body again after the whole body")
            return [_response("request_body")]
        if self._response.reached:
            return []  # answered without an engine: the client's connection is over
        part = bytes(body.body)
        if self._body_bytes + len(part) > self._table.body_bytes_max:
            return [self._shed_at_once(self._too_large())]
        shed = self._hold(len(part))
        if shed is not None:
            return [self._shed_at_once(shed)]
        self._body_bytes += len(part)
        self._parts.append(part)
        if self._request_mode == envoy.FULL_DUPLEX_STREAMED:
            return self._pick_duplex(True) if body.end_of_stream else []
        return self._pick_buffered()

    async def _pick_buffered(self) -> list[Response]:
        found = await self._pick(b"".join(self._parts), "no_body")
        self._parts = []
        return [_shed(found)] if isinstance(found, Shed) else [_told(found, "request_body")]

    def _on_request_trailers(self) -> list[Response] | Coroutine[Any, Any, list[Response]]:
        if not self._request.reached:
            raise ProtocolError("the gateway sent request_trailers before request_headers")
        self._request.take(TRAILERS, True)
        if self._request_mode != envoy.FULL_DUPLEX_STREAMED or self._picked is not None or self._response.reached:
            return [_response("request_trailers")]
        return self._pick_duplex(False)

    async def _pick_duplex(self, ends: bool) -> list[Response]:
        """Choose by the whole body, then give headers and body back; ``ends``: no trailers come."""
        parts, self._parts = [part for part in self._parts if part], []
        found = await self._pick(b"".join(parts), "no_body")
        if isinstance(found, Shed):
            return [_shed(found)]
        answers = [_told(found, "request_headers")]
        last = len(parts) - 1
        for position, part in enumerate(parts):
            answers.append(_given_back("request_body", part, ends and position == last))
        if ends and not parts:
            answers.append(_given_back("request_body", b"", True))
        return answers if ends else [*answers, _response("request_trailers")]

    async def _pick(self, body: bytes | None, why: str) -> Picked | Shed:
        assert self._picked is None, "an exchange that has an endpoint wants another one"
        self._table.settle(self)
        headers, self._headers = self._headers, {}
        candidates, self._candidates = self._candidates, None
        found = await self._picks.pick(
            Asked(
                headers.get("x-request-id", ""),
                headers.get(":path", ""),
                # What is packed only the engine reads.
                body if "content-encoding" not in headers else None,
                candidates,
                headers.get(":method", "POST") == "POST",
                "content-encoding" if body and "content-encoding" in headers else why,
            )
        )
        if isinstance(found, Picked):
            self._picked = found
        else:
            self.is_over = True
        return found

    def _announced_bytes(self) -> int:
        announced = self._headers.get("content-length", "")
        if not announced.isdecimal() or len(announced) > CONTENT_LENGTH_DIGITS_MAX:
            return 0
        return int(announced)

    def _hold(self, size: int) -> Shed | None:
        """Count what is kept of the request, or return why it cannot be."""
        if not self._table.has_room(self, size):
            return bodies_full()
        self._held_bytes += size
        self._table.used_bytes += size
        return None

    def _too_large(self) -> Shed:
        most = self._table.body_bytes_max
        return Shed(413, "body_too_large", f"the body is longer than {most} bytes, the most that is read")

    def _shed_at_once(self, shed: Shed) -> Response:
        self._picks.count_shed(shed)
        self.is_over = True
        self._table.settle(self)
        self._let_go()
        return _shed(shed)

    def _let_go(self) -> None:
        self._table.used_bytes -= self._held_bytes
        self._held_bytes = 0
        self._parts = []
        self._headers = {}
        self._candidates = None

    # -- the answer ------------------------------------------------------------------------------------------------

    def _on_response_headers(self, said: Any) -> list[Response]:
        booking = self.booking
        head = said.response_headers
        self._response.take(HEADERS, head.end_of_stream)
        for name, value in _headers(head.headers.headers):
            if name == ":status":
                self._status = value
            elif name == "content-type":
                self._is_stream = value.startswith("text/event-stream")
        if booking is not None:
            served = _served(said)
            if served:
                self._picks.served_by(booking, served)
        answer = _response("response_headers")
        if self._picked is not None:
            change = answer.response_headers.response.header_mutation
            _set(change, "x-poolgrid-worker", self._picked.worker if booking is None else str(booking.worker))
            _set(change, "x-poolgrid-decision", self._picked.reason)
        if head.end_of_stream:
            self._end()
        return [answer]

    def _on_response_body(self, body: Any) -> list[Response]:
        booking = self.booking
        self._response.take(BODY, body.end_of_stream)
        if self._answer.take(body.body) and booking is not None and self._status == "200":
            self._picks.answer_began(booking)
        if body.end_of_stream:
            self._end()
        elif self._response_mode == envoy.STREAMED and self._is_stream and self._answer.has_begun:
            self.is_over = self._hand_over()
        if self._response_mode == envoy.FULL_DUPLEX_STREAMED:
            return [_given_back("response_body", body.body, body.end_of_stream)]
        return [_response("response_body")]

    def _hand_over(self) -> bool:
        """Leave the end of the request to the gateway's log; return whether it has one and the request is not over."""
        booking = self.booking
        if booking is None or not self._picks.logs.comes_from(self._gateway):
            return False
        self._picked = None
        self._picks.keep(booking, self._gateway)
        return True

    def _end(self) -> None:
        self._let_go()
        self._table.settle(self)
        self._table.await_end(self)
        picked, self._picked = self._picked, None
        if picked is not None and picked.booking is not None:
            self._picks.ended(picked.booking, *self._answer.prompt_tokens())


def _asleep() -> None:
    """No request waits."""


def _size(values: Iterable[str]) -> int:
    return sum(len(value) + VALUE_OVERHEAD_BYTES for value in values)


# -- what Envoy says ---------------------------------------------------------------------------------------------------


def _headers(headers: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for header in headers:
        yield header.key, (header.raw_value.decode("latin-1") if header.raw_value else header.value)


def _candidates(metadata: Any) -> frozenset[str] | None:
    """Return the endpoints that a gateway allows; ``None`` where it lists none."""
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        said = [each.string_value for each in value.list_value.values]
    else:
        said = value.string_value.split(",")
    return frozenset(each.strip() for each in said if each.strip())


def _served(said: Any) -> str:
    """Return which endpoint a gateway went to; empty where it does not report it."""
    metadata = said.metadata_context.filter_metadata
    if DESTINATION_NAMESPACE in metadata and SERVED in metadata[DESTINATION_NAMESPACE].fields:
        return str(metadata[DESTINATION_NAMESPACE].fields[SERVED].string_value)
    for group in said.attributes.values():
        if UPSTREAM_ADDRESS in group.fields:
            return str(group.fields[UPSTREAM_ADDRESS].string_value)
    return ""


# -- what it is told ---------------------------------------------------------------------------------------------------


def _response(phase: str) -> Response:
    response = envoy.ProcessingResponse()
    getattr(response, phase).SetInParent()
    return response


def _told(picked: Picked, phase: str) -> Response:
    """Return the answer with the destination of a request, as header and as metadata."""
    response = _response(phase)
    endpoints = ",".join(picked.endpoints)
    common = getattr(response, phase).response
    _set(common.header_mutation, DESTINATION, endpoints)
    if picked.rank is not None:
        _set(common.header_mutation, RANK_HEADER, str(picked.rank))
    # The route may go by what has changed; where a gateway has routed already, this does nothing.
    common.clear_route_cache = True
    chosen = {DESTINATION: endpoints}
    if picked.booking is not None:
        chosen[BOOKING] = picked.booking.name
    response.dynamic_metadata.update({DESTINATION_NAMESPACE: chosen})
    return response


def _given_back(phase: str, part: bytes, ends: bool) -> Response:
    response = _response(phase)
    streamed = getattr(response, phase).response.body_mutation.streamed_response
    streamed.body = part
    streamed.end_of_stream = ends
    return response


def _shed(shed: Shed) -> Response:
    """Return the answer that the client gets in place of an engine's."""
    response = envoy.ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = shed.status
    answer.details = f"poolgrid_{shed.code}"
    error = RequestError(shed.status, shed.code, shed.message)
    answer.body = error.body()
    _set(answer.headers, "content-type", "application/json")
    for name, value in error.headers:
        _set(answer.headers, name.decode(), value.decode())
    if shed.retry_after_s is not None:
        _set(answer.headers, "retry-after", str(max(1, math.ceil(shed.retry_after_s))))
    return response


def _set(change: Any, name: str, value: str) -> None:
    option = change.set_headers.add(append_action=envoy.OVERWRITE_IF_EXISTS_OR_ADD)
    option.header.key = name
    option.header.raw_value = value.encode("latin-1", "replace")
