"""Request bodies that clients compressed with gzip, inflated in steps, within limits, and only while somebody waits.

A body of some kilobytes can stand for gigabytes, one of some megabytes for hundreds of thousands of streams, each of
which costs something before its first byte. So a step is short whatever is in it, and after each the limits hold and
the client is still there, or the rest is not done. A body begins on the event loop; what a few steps do not end goes on
in a thread from where it is.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.tokenization import TokenizationPool
from poolgrid.process.clock import Clock

STEP_INPUT_BYTES = 16 * 1024
"""Most that one step looks at: what follows the end of a stream in it is copied."""

STEP_OUTPUT_BYTES = 64 * 1024
"""Most that one step gives: some 0.1 ms."""

STEPS_ON_LOOP = 8
"""Steps on the event loop before the rest goes to a thread, whose hand-over costs 0.15 ms: at most 1 ms."""

RATIO_FREE_BYTES = 1024 * 1024
"""What any body may inflate to, whatever its ratio: a prompt of one word many times over is no attack."""

_GZIP = 16 + zlib.MAX_WBITS


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
    """Nobody waits for the body any more."""


def inflate(body: bytes, limits: InflationLimits) -> Iterator[bytes]:
    """Yield what a body of gzip members inflates to, a step at a time.

    Raises ``RequestError`` 413 beyond a limit, 400 for what is not gzip.
    """
    view, at = memoryview(body), 0
    room, ratio_room = limits.output_bytes, max(RATIO_FREE_BYTES, int(len(body) * limits.ratio))
    try:
        for _ in range(limits.members):
            member = zlib.decompressobj(_GZIP)
            while not member.eof:
                given = view[at : at + STEP_INPUT_BYTES]
                part = member.decompress(given, min(STEP_OUTPUT_BYTES, room + 1))
                at += len(given) - len(member.unconsumed_tail) - len(member.unused_data)
                if not part and not member.eof and not given:
                    raise zlib.error("it ends too early")
                room -= len(part)
                ratio_room -= len(part)
                if room < 0:
                    what = f"inflated it has more than {limits.output_bytes} bytes, the limit (setting max_body_bytes)"
                    raise _refused(what, "body_too_large")
                if ratio_room < 0:
                    raise _refused(
                        f"inflated it is more than {limits.ratio:g} times as long, the limit beyond {RATIO_FREE_BYTES} "
                        "bytes"
                    )
                yield part
            if at == len(view):
                return
    except zlib.error as error:
        message = f"reading the request body: it is not valid gzip: {error}"
        raise RequestError(400, "invalid_encoding", message, param="content-encoding") from None
    raise _refused(f"it has more than {limits.members} gzip members, the limit")


class BodyInflation:
    """Inflates the bodies of one HTTP surface, long ones in the tokenizer threads."""

    def __init__(self, limits: InflationLimits, threads: TokenizationPool, clock: Clock) -> None:
        self._limits = limits
        self._threads = threads
        self._clock = clock

    async def inflated(self, body: bytes, encoding: str, left: Callable[[], bool]) -> bytes:
        """Return the body behind ``content-encoding``; it is given up when ``left`` says that the client has.

        Raises ``RequestError``: 415 for other encodings, 413 beyond a limit, 400 for what is not gzip, 429 when the
        threads have too much to do; ``ClientLeft``.
        """
        if encoding in ("", "identity"):
            return body
        if encoding not in ("gzip", "x-gzip"):
            raise RequestError(
                415,
                "unsupported_content_encoding",
                f"reading the request body: content-encoding is {encoding[:80]!r}, allowed are gzip and identity",
                param="content-encoding",
            )
        if not body:
            return body
        steps = inflate(body, self._limits)
        parts = list(islice(steps, STEPS_ON_LOOP))
        if len(parts) == STEPS_ON_LOOP:
            await self._threads.run_in_thread(partial(self._go_on, steps, parts, left))
        return b"".join(parts)

    def _go_on(self, steps: Iterator[bytes], parts: list[bytes], left: Callable[[], bool]) -> None:
        until_ms = self._clock.monotonic_ms() + self._limits.time_ms
        for part in steps:
            parts.append(part)
            if left():
                raise ClientLeft
            if self._clock.monotonic_ms() > until_ms:
                raise _refused(f"inflating it takes longer than {self._limits.time_ms:g} ms, the limit")


def _refused(why: str, code: str = "inflation_refused") -> RequestError:
    return RequestError(413, code, f"reading the request body: {why}", headers=((b"connection", b"close"),))


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
