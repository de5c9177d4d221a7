"""Request bodies that clients compressed with gzip, inflated in steps, within limits, and only while somebody waits.

A body of some kilobytes can stand for gigabytes, one of some megabytes for hundreds of thousands of streams, each of
which costs something before its first byte. So a step is short whatever is in it, and after each the limits hold and
the client is still there, or the rest is not done. A body begins on the event loop; what a few steps do not end goes on
in a thread from where it is.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass

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


class Inflation:
    """One body of gzip members, in steps."""

    def __init__(self, body: bytes, limits: InflationLimits, monotonic_ms: Callable[[], float]) -> None:
        self._body = memoryview(body)
        self._limits = limits
        self._monotonic_ms = monotonic_ms
        self._parts: list[bytes] = []
        self._room = limits.output_bytes
        self._ratio_room = max(RATIO_FREE_BYTES, int(len(body) * limits.ratio))
        self._at = 0
        self._members = 0
        self._member = zlib.decompressobj(_GZIP)
        self._spent_ms = 0.0

    def result(self) -> bytes:
        return b"".join(self._parts)

    def advance(self, steps: int | None = None, left: Callable[[], bool] = lambda: False) -> bool:
        """Do so many steps, or all that is left; return whether it is whole.

        Raises ``RequestError`` 413 beyond a limit, 400 for what is not gzip; ``ClientLeft`` when ``left`` says so.
        """
        began_ms = self._monotonic_ms() - self._spent_ms
        done = 0
        try:
            while not self._step():
                if left():
                    raise ClientLeft
                self._spent_ms = self._monotonic_ms() - began_ms
                if self._spent_ms > self._limits.time_ms:
                    raise _refused(
                        f"inflating it takes longer than {self._limits.time_ms:g} ms, the limit",
                    )
                done += 1
                if done == steps:
                    return False
        except zlib.error as error:
            raise RequestError(
                400,
                "invalid_encoding",
                f"reading the request body: it is not valid gzip: {error}",
                param="content-encoding",
            ) from None
        return True

    def _step(self) -> bool:
        """Inflate a little; return whether the body is whole."""
        member = self._member
        given = self._body[self._at : self._at + STEP_INPUT_BYTES]
        part = member.decompress(given, min(STEP_OUTPUT_BYTES, self._room + 1))
        self._at += len(given) - len(member.unconsumed_tail) - len(member.unused_data)
        if part:
            self._parts.append(part)
            self._room -= len(part)
            self._ratio_room -= len(part)
            self._check_output()
        elif not member.eof and not given:
            raise zlib.error("it ends too early")
        if not member.eof:
            return False
        if self._at == len(self._body):
            return True
        self._members += 1
        if self._members >= self._limits.members:
            raise _refused(
                f"it has more than {self._limits.members} gzip members, the limit",
            )
        self._member = zlib.decompressobj(_GZIP)
        return False

    def _check_output(self) -> None:
        if self._room < 0:
            limit = self._limits.output_bytes
            raise RequestError(
                413,
                "body_too_large",
                f"reading the request body: inflated it has more than {limit} bytes, the limit (setting "
                "max_body_bytes)",
                headers=_CLOSE,
            )
        if self._ratio_room < 0:
            raise _refused(
                f"inflated it is more than {self._limits.ratio:g} times as long, the limit beyond {RATIO_FREE_BYTES} "
                "bytes",
            )


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
        inflation = Inflation(body, self._limits, self._clock.monotonic_ms)
        if not inflation.advance(STEPS_ON_LOOP):
            await self._threads.run_in_thread(lambda: inflation.advance(left=left))
        return inflation.result()


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
