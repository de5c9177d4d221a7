"""Compare two answers to one request byte for byte, but for ids, times, framing and a table of allowed differences."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FRAMING = frozenset(
    ("date", "server", "x-request-id", "content-length", "transfer-encoding", "connection", "keep-alive")
)
"""Headers of one connection or of one answer. Every other header must be the server's own."""

ALLOWED_HEADERS: tuple[tuple[str, str], ...] = (
    (r"x-poolgrid-[a-z-]+", "the router's receipt: worker, decision, session"),
    (r"traceparent|tracestate", "the router's trace"),
)
"""Headers that a router's answer may have in addition: pattern of the name, reason."""

ALLOWED_EVENTS: tuple[tuple[bytes, str], ...] = (
    (rb":[^\n]*", "a comment in a silence of more than 15 s (chat, completions)"),
    (rb"event: ping\ndata: \{\"type\": ?\"ping\"\}", "a ping in a silence of more than 15 s (Messages)"),
)
"""Whole events that a router's stream may have in addition: pattern, reason."""

ALLOWED_CASES: tuple[tuple[str, str], ...] = (
    (r"/v1/models.*", "the cards of all servers in one list, and each by its name"),
    (
        r"/v1/responses.*: ((bad|unknown) previous.*|unknown id|no id)",
        "the pool's own 404: its server is unknown",
    ),
)
"""What the router answers itself: pattern of the endpoint and the case, reason."""

_ID_KEYS = rb"(?:id|request_id|item_id|response_id|call_id|tool_call_id|previous_response_id)"
_ID_WORDS = (
    rb"chatcmpl|cmpl|resp|rs|msg|fc|fco|ctc|call|tool|ws|mcp|mcpo|modelperm|embd|pool|classify|vllm"
    rb"|generate-tokens|generative-scoring|pooling|score"
)
_ID = re.compile(
    rb'"%s": ?"((?:(?:%s)[-_])+[0-9A-Za-z_.:-]+|[0-9a-f]{16,32})"' % (_ID_KEYS, _ID_WORDS)
    + rb"|'((?:%s)[-_][0-9a-f]{12,32})'" % _ID_WORDS
)
"""The value of a key, or an id that a message quotes."""
_TIME = re.compile(rb'("(?:created|created_at|completed_at)": ?)\d+(?:\.\d+)?')
_CLOCK = re.compile(rb"\[\d\d:\d\d:\d\d\]")
"""In what xgrammar says of a grammar that it does not take."""
_SIGNATURE = re.compile(rb'("signature": ?")[0-9a-f]{32}(")')
_FINGERPRINT = re.compile(rb',"system_fingerprint":"[^"]*"')
"""With counts vLLM writes it into their event, else into the last of each choice: put back into that of one choice."""
_EVENT = re.compile(rb".*?(?:\r?\n\r?\n|\Z)", re.DOTALL)
_CHOICE_KEYS = ("index", "output_index", "content_index")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: ``headers`` as they came, ``body`` without its framing; ``request_id`` is what the client gave."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    request_id: str = ""

    @property
    def streamed(self) -> bool:
        return any(
            name.lower() == "content-type" and value.startswith("text/event-stream") for name, value in self.headers
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: ``where`` is status, header, body or event; ``timing`` if only the cuts of a stream differ."""

    where: str
    server: str
    router: str
    timing: bool = False


def masked(body: bytes, request_id: str = "") -> bytes:
    """Replace ids by their order of occurrence, times by 0 and signatures by one text.

    An id that repeats must repeat, and one that contains the client's own request id stays as it is.
    """
    kept = request_id.encode()
    numbers: dict[bytes, bytes] = {}

    def number(found: re.Match[bytes]) -> bytes:
        value = found.group(1) or found.group(2)
        if kept and kept in value:
            return found.group()
        name = numbers.setdefault(value, b"id-%d" % (len(numbers) + 1))
        return found.group().replace(value, name)

    body = _TIME.sub(rb"\g<1>0", _ID.sub(number, body))
    return _CLOCK.sub(b"[time]", _SIGNATURE.sub(rb"\1signature\2", body))


def events(body: bytes) -> list[bytes]:
    """Return the events of a stream, each with the blank line that ends it."""
    return [part for part in _EVENT.findall(body) if part]


def folded(parts: Sequence[bytes]) -> dict[str, Any]:
    """Return what a stream says, however its tokens are cut into events.

    Strings of one place are joined, lists too, of other values the last one counts.
    """
    found: dict[str, Any] = {}
    for part in parts:
        kind = b""
        for line in part.splitlines():
            name, _, value = line.partition(b":")
            if name == b"event":
                kind = value.strip()
            if name != b"data":
                continue
            try:
                said = json.loads(value)
            except ValueError:
                found[f"{kind.decode()}{value.decode(errors='replace')}"] = True
                continue
            _fold(kind.decode(), said, found)
    return found


def _fold(path: str, said: Any, found: dict[str, Any]) -> None:
    if isinstance(said, dict):
        place = "".join(f"[{said[key]}]" for key in _CHOICE_KEYS if isinstance(said.get(key), int))
        for key, value in said.items():
            if key != "sequence_number" and not (key == "usage" and not value):
                _fold(f"{path}{place}.{key}", value, found)
    elif isinstance(said, list):
        if all(isinstance(each, dict) and "index" in each for each in said):
            for each in said:
                _fold(path, each, found)
        else:
            found[path] = [*found.get(path, ()), *said] if isinstance(found.get(path, []), list) else said
    elif isinstance(said, str) and path.rpartition(".")[2] in _JOINED:
        found[path] = f"{found.get(path) or ''}{said}"
    elif said is not None or path not in found:
        found[path] = said


_JOINED = frozenset(("content", "reasoning", "reasoning_content", "text", "arguments", "delta", "thinking"))
"""Keys whose strings grow from event to event."""


def compare(server: Answer, router: Answer) -> list[Difference]:
    """Return the differences between the server's own answer and the router's."""
    found = []
    if server.status != router.status:
        found.append(Difference("status", str(server.status), str(router.status)))
    found += _headers(server, router)
    own, passed = (masked(each.body, each.request_id) for each in (server, router))
    if own == passed:
        return found
    if not (server.streamed and router.streamed):
        return [*found, Difference(f"body at byte {_parting(own, passed)}", *_excerpts(own, passed))]
    theirs, ours = events(own), [each for each in events(passed) if not _is_allowed(each)]
    if theirs == ours or (b'"index":1' in own and _without_fingerprints(theirs) == _without_fingerprints(ours)):
        return found
    timing = folded(theirs) == folded(ours)
    at = _parting(theirs, ours)
    one, other = (each[at] if at < len(each) else b"(the stream has ended)" for each in (theirs, ours))
    return [*found, Difference(f"event {at} of {len(theirs)}", *_excerpts(one, other), timing)]


def _without_fingerprints(parts: Sequence[bytes]) -> list[bytes]:
    return [_FINGERPRINT.sub(b"", part) for part in parts]


def _parting(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the first place at which two sequences differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def _headers(server: Answer, router: Answer) -> list[Difference]:
    own, passed = (_by_name(each.headers) for each in (server, router))
    found = []
    for name in sorted(own.keys() | passed.keys()):
        if own.get(name) == passed.get(name):
            continue
        if name not in own and any(re.fullmatch(pattern, name) for pattern, _ in ALLOWED_HEADERS):
            continue
        found.append(Difference(f"header {name}", str(own.get(name, "absent")), str(passed.get(name, "absent"))))
    return found


def _by_name(headers: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name.lower() not in FRAMING:
            found.setdefault(name.lower(), []).append(value)
    return found


def _is_allowed(event: bytes) -> bool:
    return any(re.fullmatch(pattern, event.strip()) for pattern, _ in ALLOWED_EVENTS)


def _excerpts(one: bytes, other: bytes) -> tuple[str, str]:
    """Return what stands around the first byte that differs."""
    at = _parting(one, other)
    first, second = (
        each[max(0, at - 60) : at + 100].decode(errors="replace").replace("\n", "\\n") for each in (one, other)
    )
    return first, second
