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
import contextlib
import hashlib
import logging
import os
import select
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from poolgrid.frontend.errors import RequestError, invalid
from poolgrid.frontend.guide_compiler import write_frame
from poolgrid.frontend.guides import ANY_OBJECT, Guide
from poolgrid.inference.cache_domain import CacheDomain
from poolgrid.process.caches import BudgetedLru, TenantCaches

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
    """The process said nothing of a guide, and the guide is not known to be the reason."""


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
        process = self._process if self._process is not None and self._process.poll() is None else self._start()
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            write_frame(process.stdin, guide)
            answer = _read(
                process.stdout.fileno(), monotonic() + START_S + WALL_FACTOR * self._limits.compile_ms / 1000
            )
        except TimeoutError:
            self._end()
            raise CompilerLost("it did not answer in time") from None
        except OSError:
            answer = None
        if answer is not None:
            return str(msgspec.msgpack.decode(answer))
        status = process.wait()
        self._end()
        reason = _OF_THE_GUIDE.get(status)
        if reason is None:
            raise CompilerLost(f"it ended with status {status}")
        return reason.format(limit_ms=self._limits.compile_ms)

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        if self._closed:
            raise CompilerLost("this server ends")
        limits = (str(self._limits.compile_ms), str(self._limits.step_ms))
        command = (sys.executable, "-m", "poolgrid.frontend.guide_compiler", *limits)
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, close_fds=True
            )
        except OSError as error:
            raise CompilerLost(f"it cannot be started: {error}") from error
        self.starts += 1
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _read(descriptor: int, until_s: float) -> bytes | None:
    """Return a frame, ``None`` when the writer has ended; raises ``TimeoutError``."""
    received = b""
    wanted = 4
    while len(received) < wanted:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, until_s - monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(descriptor, 65_536)
        if not part:
            return None
        received += part
        if len(received) >= 4:
            wanted = 4 + int.from_bytes(received[:4], "little")
    return received[4:]


@dataclass(slots=True, eq=False)
class _Asked:
    """One guide on its way to a verdict, and who waits for it."""

    key: bytes
    guide: bytes
    tenant: str
    verdicts: GuideVerdicts | None
    """Where its verdict is kept."""
    verdict: asyncio.Future[str]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    waiting: int = 0


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
        self._asked: dict[bytes, _Asked] = {}
        self._queues: OrderedDict[str, deque[_Asked]] = OrderedDict()
        self._working: _Asked | None = None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    async def check(self, guide: Guide, param: str, domain: CacheDomain | None) -> None:
        """Return when a guide may go to a worker; raises ``RequestError`` 400 when it may not, 503 for "not now".

        Its verdict is found by requests of the same ``domain``, and without one by nobody.
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
        found = None if verdicts is None else verdicts.get(key)
        if found is not None:
            self._count("known")
        else:
            found = await self._tried(key, packed, tenant, verdicts)
        if found:
            raise invalid(param, f"{param} cannot be kept to: {found}. The request was not run.", "guide_too_complex")

    def close(self) -> None:
        """End the process; guides that wait are not tried."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()

    async def _tried(self, key: bytes, packed: bytes, tenant: str, verdicts: GuideVerdicts | None) -> str:
        asked = self._asked.get(key)
        if asked is None:
            queue = self._queues.get(tenant)
            if self.waiting >= self._queue_limit or (queue is not None and len(queue) >= WAITING_PER_TENANT_MAX):
                raise self._busy(f"{self.waiting} guides wait to be tried already, the limit")
            asked = _Asked(key, packed, tenant, verdicts, asyncio.get_running_loop().create_future())
            self._asked[key] = asked
            self._queues.setdefault(tenant, deque()).append(asked)
            self._pump()
        asked.waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(asked.verdict)
        except TimeoutError:
            raise self._busy(f"the guide was not tried within {WAIT_S:.0f} s") from None
        except CompilerLost as lost:
            raise self._busy(f"guides cannot be tried now: {lost}") from None
        finally:
            asked.waiting -= 1
            if not asked.waiting and asked is not self._working:
                self._forget(asked)

    def _pump(self) -> None:
        """Hand the next guide to the thread: each tenant's first in turn."""
        if self._working is not None or not self._queues:
            return
        tenant, queue = self._queues.popitem(last=False)
        asked = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        self._working = asked
        self._executor.submit(self._compiler.verdict, asked.guide).add_done_callback(
            lambda done: self._tell(asked, done)
        )

    def _tell(self, asked: _Asked, done: Future[str]) -> None:
        # Called in the thread. A loop that is closed has nobody who waits.
        with contextlib.suppress(RuntimeError):
            asked.loop.call_soon_threadsafe(self._done, asked, done)

    def _done(self, asked: _Asked, done: Future[str]) -> None:
        self._working = None
        self._asked.pop(asked.key, None)
        if not asked.verdict.done() and not done.cancelled():
            error = done.exception()
            if error is None:
                found = done.result()
                self._count("refused" if found else "accepted")
                if asked.verdicts is not None:
                    asked.verdicts.keep(asked.key, found)
                if found:
                    log.info("a guide of tenant %r is refused: %s", asked.tenant, found)
                asked.verdict.set_result(found)
            elif asked.waiting:
                if not isinstance(error, CompilerLost):
                    log.error("trying a guide failed: this is a bug", exc_info=error)
                    error = CompilerLost("trying it failed")
                asked.verdict.set_exception(error)
        self._pump()

    def _forget(self, asked: _Asked) -> None:
        """Take a guide that nobody waits for any more out of its queue."""
        self._asked.pop(asked.key, None)
        queue = self._queues.get(asked.tenant)
        if queue is not None and asked in queue:
            queue.remove(asked)
            if not queue:
                del self._queues[asked.tenant]

    def _busy(self, why: str) -> RequestError:
        self._count("busy")
        return RequestError(
            503,
            "guide_check_busy",
            f"trying the guide: {why}; try again later",
            headers=((b"retry-after", str(RETRY_AFTER_S).encode()),),
        )
