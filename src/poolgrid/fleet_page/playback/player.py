"""Plays the pool's past back for the fleet page: starts a process that folds the journal, and waits for it.

Rules
    1. One process at a time, started for a question and gone with its answer; ``WAITING_MAX`` questions wait, one more
       is answered 503.
    2. The router's loop neither reads the journal nor folds it. Of a journal in memory it copies records to the
       process, ``SLICE_BYTES`` between two turns.
    3. A process that takes longer than ``TIME_S_MAX`` is killed, and so is one whose asker has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from poolgrid.consolidator.journal.stored_records import SUFFIX
from poolgrid.fleet_page.playback.process import Answer, Question
from poolgrid.fleet_page.playback.reel import Leg
from poolgrid.frontend.errors import RequestError
from poolgrid.process.tasks import cancel_all, owned

log = logging.getLogger(__name__)

WAITING_MAX = 4
"""Questions that wait for the current one: people click again when they see nothing."""

TIME_S_MAX = 60.0
"""Longest time of one question: the fold has 45 s, the snapshot before it the rest."""

SLICE_BYTES = 256 * 1024
"""Of a journal in memory, copied in one go: a tenth of a millisecond."""

SLICE_RECORDS = 1024

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""A reel is a few megabytes; what is longer than this is a bug."""

READ_BYTES = 256 * 1024

RETRY_AFTER_S = 3

KeptRecords = Callable[[int, int, int], tuple[int, list[bytes]]]
"""Takes an offset (below the oldest kept record: that one), a number and a number of bytes; returns the offset of the
first record, and the records."""


class Player:
    """What is behind ``/v1/fleet/playback``."""

    def __init__(self, directory: Path | None, kept: KeptRecords | None, blocks_per_worker_max: int) -> None:
        """``directory`` is that of the journal, ``kept`` gives its records where there is none."""
        self._directory = directory
        self._kept = kept
        self._blocks_per_worker_max = blocks_per_worker_max
        self._turn = asyncio.Lock()
        self._waiting = 0
        self.started = 0
        """Processes so far."""

    @property
    def unavailable(self) -> str:
        """Return why there is nothing to play back, in words; empty when there is."""
        if self._kept is not None or self._directory is not None:
            return ""
        return (
            "this router follows a consolidator elsewhere and has no directory of its journal: give it the "
            "consolidator's --data-dir where both run on one machine"
        )

    async def reel(self, from_ms: int, to_ms: int, frames: int, paths: Sequence[tuple[str, bytes, int]]) -> bytes:
        """Return the pool between two times as JSON (``poolgrid.fleet_page.playback.reel.Reel``).

        Raises ``RequestError``: 409 when the journal has no such time, 503 when it cannot be read now.
        """
        question = self._question()
        question.from_ms, question.to_ms, question.frames, question.paths = from_ms, to_ms, frames, list(paths)
        return await self._ask(question, 0)

    async def fill(self, legs: list[Leg], from_offset: int) -> None:
        """Fill in the journal's times of legs, none of which began before an offset; what it lacks stays unknown."""
        question = self._question()
        question.legs, question.from_offset = legs, from_offset
        try:
            found = msgspec.msgpack.decode(await self._ask(question, from_offset), type=list[Leg])
        except RequestError as error:
            log.info("the times of %s are not known: %s", legs[0].dispatch_id, error)
            return
        for leg, known in zip(legs, found, strict=True):
            leg.started_ms, leg.prefilled_ms, leg.ended_ms = known.started_ms, known.prefilled_ms, known.ended_ms
            leg.end, leg.cached_tokens = known.end, known.cached_tokens

    def _question(self) -> Question:
        if self.unavailable:
            raise RequestError(409, "no_journal", f"playing back: {self.unavailable}")
        return Question("", 0, self._blocks_per_worker_max)

    async def _ask(self, question: Question, from_offset: int) -> bytes:
        if self._waiting >= WAITING_MAX:
            raise _busy(f"{self._waiting} others wait for a playback, the limit")
        self._waiting += 1
        try:
            async with asyncio.timeout(TIME_S_MAX), self._turn:
                answer = await self._run(question, from_offset)
        except TimeoutError:
            raise _busy(f"it was not done within {TIME_S_MAX:.0f} s; ask for a shorter stretch") from None
        except OSError as error:
            raise _busy(f"its process cannot be run: {error}") from None
        finally:
            self._waiting -= 1
        if answer.refused:
            raise RequestError(409, "not_kept", f"playing back: {answer.refused}")
        return answer.body

    async def _run(self, question: Question, from_offset: int) -> Answer:
        records: list[bytes] = []
        if await asyncio.to_thread(self._is_on_disk):
            question.directory = str(self._directory)
        elif self._kept is not None:
            question.first_offset, records = self._kept(from_offset, SLICE_RECORDS, SLICE_BYTES)
        else:
            raise RequestError(409, "no_journal", f"playing back: there is no journal in {self._directory}")
        self.started += 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "poolgrid.fleet_page.playback.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdin is not None, "it is a pipe"
            assert process.stdout is not None, "it is a pipe"
            # It may answer before it has read everything, and would wait without end for a reader.
            telling = owned(self._tell(process.stdin, question, records), "telling a playback its records")
            try:
                said = await _all_of(process.stdout)
            finally:
                await cancel_all([telling])
            status = await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if not said:
            raise OSError(f"it ended with status {status} without an answer")
        return msgspec.msgpack.decode(said, type=Answer)

    def _is_on_disk(self) -> bool:
        """Tell whether a journal is where one may be: a router's ``data_dir`` may hold its decisions alone."""
        if self._directory is None:
            return False
        try:
            return any(path.suffix == SUFFIX for path in self._directory.iterdir())
        except OSError:
            return False

    async def _tell(self, pipe: asyncio.StreamWriter, question: Question, records: list[bytes]) -> None:
        with contextlib.suppress(ConnectionError):  # it has what it needs, or has reported why not
            _write(pipe, msgspec.msgpack.encode(question))
            await pipe.drain()
            next_offset = question.first_offset
            while records and self._kept is not None:
                for record in records:
                    _write(pipe, record)
                next_offset += len(records)
                await pipe.drain()
                await asyncio.sleep(0)
                first, records = self._kept(next_offset, SLICE_RECORDS, SLICE_BYTES)
                if first != next_offset:
                    break  # the journal has dropped the next records: the process uses what it has
            pipe.close()


async def _all_of(pipe: asyncio.StreamReader) -> bytes:
    said = bytearray()
    while part := await pipe.read(READ_BYTES):
        said += part
        if len(said) > ANSWER_BYTES_MAX:
            raise OSError(f"it contains more than {ANSWER_BYTES_MAX} bytes")
    return bytes(said)


def _write(pipe: asyncio.StreamWriter, body: bytes) -> None:
    pipe.write(struct.pack("<I", len(body)) + body)


def _busy(why: str) -> RequestError:
    headers = ((b"retry-after", str(RETRY_AFTER_S).encode()),)
    return RequestError(503, "playback_busy", f"playing back: {why}; try again later", headers=headers)
