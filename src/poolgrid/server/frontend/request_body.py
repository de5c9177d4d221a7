"""Request bodies within limits, read, decompressed and counted; and request names.

Rules
    1. A body is read whole, up to a limit of bytes, on any kind of connection.
    2. A compressed body is decompressed in short steps. After each step the limits are checked, and whether the client
       is still connected. Some kilobytes can expand to gigabytes, and some megabytes can hold hundreds of thousands of
       streams. The first steps run on the event loop, the rest in a thread.
    3. The values of a long body are counted before it is parsed. The parser makes an object of every value and holds
       the interpreter's lock: a body of brackets and commas costs a hundred times as much as text. The first count is
       of commas and opening brackets in the bytes. A body above the limit is counted again in a thread, without its
       strings.
    4. A request has a name and an id. The name is the client's ``x-request-id`` where it is usable; answers and their
       headers show it. The id (``poolgrid.kernel.wire.identifiers``) is unique behind the front end, also where several
       clients send the same name.
"""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.types import Receive

from poolgrid.kernel.wire.identifiers import SEPARATOR, internal_id, name_of
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.tokenization import TokenizationPool
from poolgrid.server.http.browser_requests import Headers, is_from_page
from poolgrid.server.http.guard import guard_of
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import breathe

SHORT_BYTES = 64 * 1024
"""Bodies up to here are parsed as they are: at worst in 4 ms."""

INLINE_BYTES = 1024 * 1024
"""Bodies up to here are counted on the event loop, in 0.2 ms."""

VALUES_PER_PART = 8
"""Values that may come for each object or list, and for each member of an object: those cost eight times as much as
numbers do."""

NUMBERS_PER_VALUE = 4
"""How many times as many values a body may have as texts, objects and lists, for the others are numbers: a prompt of
1,048,576 token ids is as good as its text. Of all values a number costs least, some 30 ns."""

SLICE_BYTES = 128 * 1024
"""Bytes that are counted in one go, with the interpreter's lock held: 20 microseconds."""

PIECE_BYTES = 32 * 1024
"""Bytes of short strings and of what is between them that are counted in one go: half a millisecond."""

_QUOTE, _BACKSLASH = b'"\\'
_SHORT_STRING = rb'"[^"\\]{0,1024}+(?:\\.[^"\\]{0,1024}+){0,1024}+"'
_PIECE = re.compile(rb'(?:[^"]++|' + _SHORT_STRING + rb")+", re.DOTALL)
"""Not possessive as a whole: Python before 3.11.5 (Debian 12 has 3.11.2) then leaves out the last of the alternatives
that matched (CPython's issue 106052). It would be no quicker."""
_SHORT_STRINGS = re.compile(_SHORT_STRING, re.DOTALL)
_COMMA, _COLON, _BRACE = b",:{"
_BRACKETS_DIFFER = ord("[") ^ ord("{")
"""The one bit in which the two opening brackets differ."""
_WITHIN_STRING = re.compile(rb'(?:[^"\\]|\\.){0,65536}+', re.DOTALL)
"""A piece of a string with escapes, of which a sixteenth of a mebibyte takes half a millisecond."""


async def check_shape(body: bytes, values_max: int, pool: TokenizationPool) -> None:
    """Return when a body may be parsed; raises ``RequestError`` 413 when it has more values than it may."""
    if len(body) <= SHORT_BYTES:
        return
    if len(body) <= INLINE_BYTES:
        if _at_most(body, values_max):
            return
    elif await pool.run_in_thread(partial(_at_most, body, values_max, breathe)):
        return
    if not await pool.run_in_thread(partial(has_room, body, values_max, breathe)):
        raise RequestError(
            413,
            "body_too_complex",
            f"reading the request body: it has more than {values_max} texts, objects and lists, "
            f"{values_max // VALUES_PER_PART} objects and lists or members of objects, or "
            f"{values_max * NUMBERS_PER_VALUE} values (they grow with max_body_bytes)",
        )


def _nothing() -> None:
    pass


class ValueCounts(NamedTuple):
    """How many values a JSON text has."""

    commas: int
    """One less than the values of each object or list that has any."""
    texts: int
    containers: int
    members: int
    """Of objects."""

    def fit(self, values_max: int) -> bool:
        parts_max = values_max // VALUES_PER_PART
        return (
            self.texts + self.containers <= values_max
            and self.commas + self.containers <= values_max * NUMBERS_PER_VALUE
            and self.containers <= parts_max
            and self.members <= parts_max
        )


def _at_most(body: bytes, values_max: int, after_slice: Callable[[], None] = _nothing) -> bool:
    """Return whether a body certainly has no more values than it may, by its commas, quotes, brackets and colons."""
    commas = quotes = containers = members = 0
    # Sixteen bytes and more at a time, where counting in bytes takes them one by one.
    numbers = np.frombuffer(body, np.uint8)
    for begin in range(0, len(numbers), SLICE_BYTES):
        of_slice = numbers[begin : begin + SLICE_BYTES]
        containers += int(np.count_nonzero((of_slice | _BRACKETS_DIFFER) == _BRACE))
        members += int(np.count_nonzero(of_slice == _COLON))
        commas += int(np.count_nonzero(of_slice == _COMMA))
        quotes += int(np.count_nonzero(of_slice == _QUOTE))
        after_slice()
    return ValueCounts(commas, quotes // 2, containers, members).fit(values_max)


def has_room(body: bytes, values_max: int, after_slice: Callable[[], None] = _nothing) -> bool:
    """Return whether a JSON text has no more values, containers and members than it may; its strings are left out."""
    return count_values(body, values_max, after_slice).fit(values_max)


def count_values(body: bytes, values_max: int, after_slice: Callable[[], None] = _nothing) -> ValueCounts:
    """Count the values of a JSON text.

    It stops counting when they are too many for ``values_max``. What is no JSON has some count. ``after_slice`` is
    called now and then.
    """
    commas = containers = members = strings = at = 0
    end = len(body)
    breath_at = PIECE_BYTES
    while at < end and ValueCounts(commas, strings - members, containers, members).fit(values_max):
        found = _PIECE.match(body, at, at + PIECE_BYTES)
        if found is None:
            # A long string, or the end of something that is no JSON.
            at = _end_of_string(body, at + 1)
            strings += 1
        else:
            piece = found[0]
            if b'"' in piece:
                piece = _SHORT_STRINGS.sub(b'"', piece)
                strings += piece.count(b'"')  # as many as texts and names of members, unless it is no JSON
            containers += piece.count(b"[") + piece.count(b"{")
            members += piece.count(b":")
            commas += piece.count(b",")
            at = found.end()
        if at >= breath_at:
            breath_at = at + PIECE_BYTES
            after_slice()
    return ValueCounts(commas, strings - members, containers, members)


def _end_of_string(body: bytes, at: int) -> int:
    """Return the place after the quote that ends the string whose first character is at ``at``."""
    quote = body.find(b'"', at)
    if quote < 0:
        return len(body)
    if body[quote - 1] != _BACKSLASH:
        return quote + 1
    while at < len(body) and body[at] != _QUOTE:
        at = max(at + 1, _WITHIN_STRING.match(body, at).end())  # type: ignore[union-attr]  # it matches nothing too
    return at + 1


STEP_INPUT_BYTES = 16 * 1024
"""Most that one step looks at: what follows the end of a stream in it is copied."""

STEP_OUTPUT_BYTES = 64 * 1024
"""Most that one step gives: some 0.1 ms."""

STEPS_ON_LOOP = 8
"""Steps on the event loop before the rest goes to a thread, whose hand-over costs 0.15 ms: at most 1 ms."""

RATIO_FREE_BYTES = 1024 * 1024
"""What any body may inflate to, whatever its ratio: a prompt of one word many times over is no attack."""

ZSTD_WINDOW_LOG_MAX = 23
"""Largest window of a zstd body: 8 MiB, the most that RFC 9659 has servers take. A decoder holds that much memory."""


class _ZlibMember:
    """One gzip member, or a body of the coding deflate."""

    error: type[Exception] = zlib.error

    def __init__(self, window_bits: int) -> None:
        self._inner = zlib.decompressobj(window_bits)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    def step(self, given: memoryview) -> tuple[bytes, int]:
        """Return some output, and how much of ``given`` it took."""
        part = self._inner.decompress(given, STEP_OUTPUT_BYTES)
        return part, len(given) - len(self._inner.unconsumed_tail) - len(self._inner.unused_data)


def _gzip_member(body: bytes) -> _ZlibMember:
    return _ZlibMember(16 + zlib.MAX_WBITS)


def _deflate_member(body: bytes) -> _ZlibMember:
    """Return the decoder of zlib's format, which HTTP means by deflate, or of the bare one, which some clients send."""
    is_zlib = body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0
    return _ZlibMember(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)


class _ZstdFrame:
    """One zstd frame."""

    def __init__(self, body: bytes) -> None:
        # Late: few clients send it.
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        self.error: type[Exception] = zstd.ZstdError
        options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}
        self._inner = zstd.ZstdDecompressor(options=options)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    def step(self, given: memoryview) -> tuple[bytes, int]:
        """Return some output, and how much of ``given`` it took: less than nothing if it gives some back."""
        if not self._inner.needs_input:
            given = given[:0]
        part = self._inner.decompress(given, STEP_OUTPUT_BYTES)
        return part, len(given) - len(self._inner.unused_data)


CODINGS: Final[Mapping[str, Callable[[bytes], _ZlibMember | _ZstdFrame]]] = {
    "gzip": _gzip_member,
    "x-gzip": _gzip_member,
    "deflate": _deflate_member,
    "zstd": _ZstdFrame,
}
"""Codings of bodies, as ``content-encoding`` names them."""


@dataclass(frozen=True, slots=True)
class InflationLimits:
    """How far a body may inflate."""

    output_bytes: int
    members: int = 1024
    """bgzip writes one for each 64 KiB, most else one in all."""
    ratio: float = 100.0
    """Of the inflated length, beyond the first MiB. Text of chats comes to some 3 to 10; 1,032 is the most there is."""
    time_ms: float = 5000.0
    """The largest honest bodies take 150 ms on an idle core."""


class ClientLeft(Exception):
    """The client has disconnected."""


def inflate(body: bytes, limits: InflationLimits, coding: str = "gzip") -> Iterator[bytes]:
    """Yield what a body that is not empty inflates to, a step at a time: gzip members, zstd frames, one deflated text.

    Raises ``RequestError`` 413 beyond a limit, 400 for what is not of that coding.
    """
    view, at = memoryview(body), 0
    room, ratio_room = limits.output_bytes, max(RATIO_FREE_BYTES, int(len(body) * limits.ratio))
    begin = CODINGS[coding]
    for _ in range(1 if begin is _deflate_member else limits.members):
        member = begin(body)
        while not member.eof:
            given = view[at : at + STEP_INPUT_BYTES]
            try:
                part, taken = member.step(given)
            except member.error as error:
                raise _wrong_coding(coding, str(error)) from None
            at += taken
            if not part and not member.eof and not given:
                raise _wrong_coding(coding, "it ends too early")
            room -= len(part)
            ratio_room -= len(part)
            if room < 0:
                what = f"inflated it has more than {limits.output_bytes} bytes, the limit (setting max_body_bytes)"
                raise RequestError(413, "body_too_large", f"reading the request body: {what}", headers=_CLOSE)
            if ratio_room < 0:
                raise _refused(
                    f"inflated it is more than {limits.ratio:g} times as long, the limit beyond {RATIO_FREE_BYTES} "
                    "bytes"
                )
            yield part
        if at == len(view):
            return
    if begin is _deflate_member:
        raise _wrong_coding(coding, "something follows its end")
    raise _refused(f"it has more than {limits.members} {coding} members, the limit")


def _wrong_coding(coding: str, why: str) -> RequestError:
    message = f"reading the request body: it is not valid {coding}: {why}"
    return RequestError(400, "invalid_encoding", message, param="content-encoding")


@dataclass(frozen=True, slots=True)
class BodyReader:
    """Reads bodies within the limits of one HTTP surface; long work goes to the tokenizer threads."""

    limits: InflationLimits
    values_max: int
    threads: TokenizationPool
    clock: Clock

    async def read(self, request: Request) -> bytes:
        """Return the body of a request to an endpoint that is no inference endpoint, of a size and shape that may be
        parsed. An inference endpoint watches its client over the whole request and not for the body alone.

        Raises ``RequestError``: 415, 413, 400 for what is not of its coding or whose client left, 429 when the
        threads have too much to do.
        """
        body = await self._whole(request)
        await check_shape(body, self.values_max, self.threads)
        return body

    async def _whole(self, request: Request) -> bytes:
        headers, limit = request.headers, self.limits.output_bytes
        content_type, content_length = (headers.get(name, "").encode() for name in ("content-type", "content-length"))
        check_announced(content_type, content_length, limit, headers.raw)
        raw = await receive_body(request.receive, limit)
        if raw is None:
            raise _client_left()
        encoding = headers.get("content-encoding", "").strip().lower()
        if not encoding:
            return raw
        guard = guard_of(request.scope)
        try:
            return await self.inflated(raw, encoding, lambda: guard is not None and guard.is_lost)
        except ClientLeft:
            raise _client_left() from None

    async def inflated(self, body: bytes, encoding: str, left: Callable[[], bool]) -> bytes:
        """Return the body behind ``content-encoding``; it is given up when ``left`` says that the client has.

        Raises ``RequestError``: 415 for other encodings, 413 beyond a limit, 400 for what is not of its own, 429 when
        the threads have too much to do; ``ClientLeft``.
        """
        if encoding in ("", "identity"):
            return body
        if encoding not in CODINGS:
            raise RequestError(
                415,
                "unsupported_content_encoding",
                f"reading the request body: content-encoding is {encoding[:80]!r}, allowed are gzip, deflate, zstd and "
                "identity",
                param="content-encoding",
                headers=((b"accept-encoding", b"gzip, deflate, zstd"),),
            )
        if not body:
            return body
        steps = inflate(body, self.limits, encoding)
        parts = list(islice(steps, STEPS_ON_LOOP))
        if len(parts) == STEPS_ON_LOOP:
            await self.threads.run_in_thread(partial(self._go_on, steps, parts, left))
        return b"".join(parts)

    def _go_on(self, steps: Iterator[bytes], parts: list[bytes], left: Callable[[], bool]) -> None:
        until_ms = self.clock.monotonic_ms() + self.limits.time_ms
        for part in steps:
            parts.append(part)
            if left():
                raise ClientLeft
            if self.clock.monotonic_ms() > until_ms:
                raise _refused(f"inflating it takes longer than {self.limits.time_ms:g} ms, the limit")


_CLOSE = ((b"connection", b"close"),)


def _refused(why: str) -> RequestError:
    return RequestError(413, "inflation_refused", f"reading the request body: {why}", headers=_CLOSE)


LEVEL = 1
"""JSON of an answer is repetitive: the fastest level comes within a few percent of the best."""

GZIP_BYTES_MIN = 4096
"""Shortest answer that is compressed: shorter ones fit into a few packets. Streams are never compressed."""


def accepts_gzip(accept_encoding: bytes) -> bool:
    """Return whether a client takes gzip, by its ``accept-encoding``."""
    for entry in accept_encoding.lower().split(b","):
        coding, _, parameters = entry.partition(b";")
        if coding.strip() in (b"gzip", b"*"):
            quality = parameters.replace(b" ", b"")
            return not (quality.startswith(b"q=0") and not quality.strip(b"q=0."))
    return False


def compressed(body: bytes) -> bytes:
    """Return ``body`` as gzip; the same bytes for the same body, for there is no time in it."""
    return gzip.compress(body, LEVEL, mtime=0)


def _client_left() -> RequestError:
    return RequestError(400, "client_left", "reading the request body: the client left before it was complete")


FORM = b"multipart/form-data"


def check_announced(
    content_type: bytes, content_length: bytes, limit: int, headers: Headers, takes_forms: bool = False
) -> None:
    """Refuse what the headers say already; raises ``RequestError`` 415 and 413.

    A body without a content type, or a form, is taken, but not of a browser: it sends one for any web page, without
    asking first.
    """
    # As nearly every client writes it, first.
    media_type = b"" if content_type == b"application/json" else content_type.partition(b";")[0].strip().lower()
    is_form = takes_forms and media_type == FORM
    if media_type and media_type != b"application/json" and not media_type.endswith(b"+json") and not is_form:
        raise RequestError(
            415,
            "unsupported_media_type",
            f"reading the request body: content-type is {media_type.decode('latin-1')!r}, allowed is "
            "application/json (curl: -H 'content-type: application/json')",
            param="content-type",
        )
    if (not content_type or is_form) and is_from_page(headers):
        raise RequestError(
            415,
            "unsupported_media_type",
            "reading the request body: a browser sent it for a web page without a content-type, allowed is "
            "application/json",
            param="content-type",
            headers=((b"connection", b"close"),),
        )
    if content_length.isdigit() and int(content_length) > limit:
        raise too_large(content_length.decode(), limit)


async def receive_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body, or ``None`` when the client left before it was complete; raises ``RequestError`` 413."""
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise too_large(f"{size} so far" if more else str(size), limit)
    return b"".join(parts)  # of one part it makes no copy


def too_large(size: str, limit: int) -> RequestError:
    """Return the 413 that names the limit.

    The connection stays: what is still to come of the body is read and dropped. A client that reads its answer only
    once it has sent everything would see a reset otherwise.
    """
    return RequestError(
        413,
        "body_too_large",
        f"reading the request body: it has {size} bytes, allowed are up to {limit} (setting max_body_bytes)",
    )


CLIENT_ID_CHARS_MAX: Final = 128
"""Half of what an identifier may have on the wire, which leaves room for what makes the id unique."""

_SANE: Final = re.compile(rb"[A-Za-z0-9._:-]{1,%d}" % CLIENT_ID_CHARS_MAX)
"""``~`` is not among them: it divides what the client chose from what it did not."""


class FreshName(str):
    """A name that the front end made, which is unique by itself."""

    __slots__ = ()


class RequestIds:
    """Makes the request ids of one process. ``prefix`` distinguishes processes (random, chosen by the shell)."""

    def __init__(self, prefix: str) -> None:
        if not prefix[:1].isalpha() or SEPARATOR in prefix:
            raise ValueError(f"making request ids: prefix is {prefix!r}, it must begin with a letter and have no '~'")
        self._prefix = prefix
        self._count = 0

    def wanted(self, header: bytes | None) -> str:
        """Return the client's name when it is sane (letters, digits, ``._:-``, at most 128), else a fresh one."""
        if header is not None and _SANE.fullmatch(header):
            return header.decode("ascii")
        self._count += 1
        return FreshName(self._unique_part())

    def of_sequences(self, wanted: str, sequences: int) -> list[str]:
        """Return ids for the sequences of a request: of ``<name>`` for one, of ``<name>-<i>`` for several."""
        if sequences == 1 and isinstance(wanted, FreshName):
            return [str(wanted)]
        names = [str(wanted)] if sequences == 1 else [f"{wanted}-{index}" for index in range(sequences)]
        if isinstance(wanted, FreshName):
            return names
        unique = self._unique()
        return [internal_id(name, unique) for name in names]

    def _unique(self) -> str:
        self._count += 1
        return self._unique_part()

    def _unique_part(self) -> str:
        return f"{self._prefix}{self._count:x}"


def base_name(request_ids: Sequence[str]) -> str:
    """Return what the client calls the request of these sequences."""
    name = name_of(request_ids[0])
    return name if len(request_ids) == 1 else name.removesuffix("-0")
