"""Whether a guide may go to a worker: tried in a process of its own, before any worker sees it.

Rules
    1. One process, started with the first guide and again after each that it dies of; a thread talks to it.
    2. Verdicts are kept for each tenant and salt by itself, each tenant's in an equal part of ``VERDICTS_MAX``: one
       tenant's guides change no other's time. The usual guide is sent again and again and costs a look-up.
    3. Tenants take turns. Each may have ``WAITING_PER_TENANT_MAX`` guides waiting and all together
       ``WAITING_MAX``; beyond that, and after ``WAIT_S``, a request is answered 503 and may come again.
    4. A guide that the process dies of, or that takes too long, is refused with 400 and its field. Who kills the
       process from outside refuses nothing: the guide is tried once more, then 503.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from poolgrid.kernel.requests.inference import CacheDomain
from poolgrid.server.frontend.errors import RequestError, invalid
from poolgrid.server.frontend.guides import ANY_OBJECT, Guide
from poolgrid.server.process.caches import BudgetedLru, TenantCaches

log = logging.getLogger(__name__)

VERDICTS_MAX = 4096
"""Verdicts that are kept, about 200 bytes each; applications have tens of schemas, those who make one for every request
are served by the process."""

WAITING_MAX = 64
"""Guides that may wait to be tried: a hundred usual ones take a second."""

WAITING_PER_TENANT_MAX = 16
"""A quarter of the queue: four tenants that send nothing but guides leave room for none, one leaves most of it."""

WAIT_S = 10.0
"""Longest wait of a request for its verdict."""

WALL_FACTOR = 20
"""How much longer than its CPU time one guide may take by the clock, on a machine that is busy elsewhere."""

START_S = 10.0
"""Longest start of the process: a tenth of a second on an idle machine."""

RETRY_AFTER_S = 1

_PLAIN: Guide = {"guided_json": msgspec.json.encode(dict(ANY_OBJECT))}
_OF_THE_GUIDE = {
    -signal.SIGPROF: "compiling it takes more than {limit_ms:.0f} ms of CPU time, the limit",
    -signal.SIGSEGV: "compiling it overflows the stack: it is nested or chained too deeply",
    -signal.SIGBUS: "compiling it overflows the stack: it is nested or chained too deeply",
    -signal.SIGABRT: "compiling it needs more stack or memory than there may be: it is too deep or too large",
    -signal.SIGILL: "compiling it needs more stack or memory than there may be: it is too deep or too large",
}


GuideVerdicts = BudgetedLru[bytes, str]
"""Why a guide is refused, or nothing, by what it is: one tenant's."""


def _verdicts(entries_max: int) -> GuideVerdicts:
    return BudgetedLru(entries_max, lambda key, verdict: 1)


class CompilerLost(Exception):
    """The process gave no verdict on a guide, and the guide is not known to be the reason."""


@dataclass(frozen=True, slots=True)
class GuideLimits:
    """CPU time that a guide may take."""

    compile_ms: float = 250.0
    """To compile, and to begin an answer with: a schema of a thousand properties takes 70 ms, nearly all take 5."""
    step_ms: float = 25.0
    """To find one token of an answer, which an engine does between two steps of all answers: the first token of a
    schema of a thousand properties takes 5 ms, nearly all take 0.1."""


class GuideCompiler:
    """The process, for one thread at a time; everything here blocks."""

    def __init__(self, limits: GuideLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._end: Callable[[], object] = lambda: None
        self._closed = False
        self.starts = 0
        """How often the process was started."""

    def verdict(self, guide: bytes) -> str:
        """Return why a guide (MessagePack) is too much, or nothing; raises ``CompilerLost``."""
        try:
            return self._ask(guide)
        except CompilerLost as lost:
            log.warning("the process that tries guides is started again: %s", lost)
            return self._ask(guide)

    def close(self) -> None:
        """End the process; there is no other one after it."""
        self._closed = True
        self._end()

    def _ask(self, guide: bytes) -> str:
        if self._process is None or self._process.poll() is not None:
            self._process, self._connection = self._start()
        process, connection = self._process, self._connection
        assert connection is not None, "it comes with the process"
        try:
            connection.send_bytes(guide)
            if connection.poll(START_S + WALL_FACTOR * self._limits.compile_ms / 1000):
                return connection.recv_bytes().decode()
            self._end()
            raise CompilerLost("it did not answer in time")
        except (EOFError, OSError):
            status = process.wait()
        self._end()
        reason = _OF_THE_GUIDE.get(status)
        if reason is None:
            raise CompilerLost(f"it ended with status {status}")
        return reason.format(limit_ms=self._limits.compile_ms)

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        self._end()
        if self._closed:
            raise CompilerLost("this server ends")
        limits = (str(self._limits.compile_ms), str(self._limits.step_ms))
        command = (sys.executable, "-P", "-m", "poolgrid.server.frontend.guide_compiler", *limits)
        ours, theirs = Pipe()
        try:
            with theirs:
                process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
        except OSError as error:
            ours.close()
            raise CompilerLost(f"it cannot be started: {error}") from error
        self.starts += 1
        self._end = weakref.finalize(self, _end, process, ours)
        return process, ours


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


@dataclass(slots=True, eq=False)
class _Queue:
    """The guides of one tenant: one of them at a time waits for its turn among those of all."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    """With the one that is being tried."""


class GuideCheck:
    """Verdicts on guides, for the event loop that calls ``check``."""

    def __init__(
        self,
        limits: GuideLimits | None = None,
        queue_limit: int = WAITING_MAX,
        count: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._compiler = GuideCompiler(limits or GuideLimits())
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="guides")
        self._queue_limit = queue_limit
        self._count = count
        self._verdicts = TenantCaches(VERDICTS_MAX, _verdicts)
        self._queues: dict[str, _Queue] = {}
        self._turn = asyncio.Lock()

    @property
    def waiting(self) -> int:
        return sum(queue.waiting for queue in self._queues.values())

    async def check(self, guide: Guide, param: str, domain: CacheDomain | None) -> None:
        """Return when a guide may go to a worker; raises ``RequestError`` 400 when it may not, 503 for "not now".

        Its verdict is found by requests of the same ``domain``, and without one by none.
        """
        if not guide or guide == _PLAIN:
            return
        packed = msgspec.msgpack.encode(guide)
        if domain is None:
            tenant, whose, verdicts = "", os.urandom(16), None
        else:
            tenant, whose = domain.tenant, msgspec.msgpack.encode((domain.tenant, domain.salt))
            verdicts = self._verdicts.of(tenant, domain.shares)
        key = hashlib.blake2b(packed, digest_size=16, key=hashlib.blake2b(whose).digest()).digest()
        found = self._known(verdicts, key)
        if found is None:
            found = await self._tried(key, packed, tenant, verdicts)
        if found:
            raise invalid(param, f"{param} cannot be kept to: {found}. The request was not run.", "guide_too_complex")

    def close(self) -> None:
        """End the process; guides that wait are not tried."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()

    def _known(self, verdicts: GuideVerdicts | None, key: bytes) -> str | None:
        found = None if verdicts is None else verdicts.get(key)
        if found is not None:
            self._count("known")
        return found

    async def _tried(self, key: bytes, packed: bytes, tenant: str, verdicts: GuideVerdicts | None) -> str:
        queue = self._queues.setdefault(tenant, _Queue())
        if self.waiting >= self._queue_limit or queue.waiting >= WAITING_PER_TENANT_MAX:
            raise self._busy(f"{self.waiting} guides wait to be tried already, the limit")
        queue.waiting += 1
        try:
            async with asyncio.timeout(WAIT_S), queue.turn, self._turn:
                found = self._known(verdicts, key)  # others may have asked for the same
                if found is not None:
                    return found
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._executor, self._compiler.verdict, packed)
        except TimeoutError:
            raise self._busy(f"the guide was not tried within {WAIT_S:.0f} s") from None
        except CompilerLost as lost:
            raise self._busy(f"guides cannot be tried now: {lost}") from None
        finally:
            queue.waiting -= 1
            if not queue.waiting:
                self._queues.pop(tenant, None)
        self._count("refused" if found else "accepted")
        if verdicts is not None:
            verdicts.keep(key, found)
        if found:
            log.info("a guide of tenant %r is refused: %s", tenant, found)
        return found

    def _busy(self, why: str) -> RequestError:
        self._count("busy")
        return RequestError(
            503,
            "guide_check_busy",
            f"trying the guide: {why}; try again later",
            headers=((b"retry-after", str(RETRY_AFTER_S).encode()),),
        )
