"""A guide is opened beside the engine's steps: who sends a huge one waits for it, and nobody else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from poolgrid.kernel.wire.events import RequestFinished
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind, Sampling, TokenDelta
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.kernel.worker_protocol.refusal import UnsupportedError
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulated.core.next_token import TokenGuide, Vocabulary, prompt_logprobs
from poolgrid.plugins.simulated.core.token_texts import TokenTexts
from poolgrid.plugins.simulated.guides import LazyGuides
from poolgrid.plugins.simulated.real_time import RealTimeSimulatedEngine
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.timing import PolynomialTiming, ScaledTiming
from tests.workers.fakes import PATIENCE_S

VOCABULARY = Vocabulary(4096, 3, 2)
GUIDES = LazyGuides(TINY_MODEL_PATH, VOCABULARY)


class Panic(BaseException):
    """As compiled libraries raise it: no ``Exception``."""


class SlowGuides:
    """Opens no guide before it may; an expression of ``?`` is refused then, at ``!`` the opening itself fails."""

    def __init__(self) -> None:
        self.may_open = threading.Event()

    @property
    def texts(self) -> TokenTexts:
        return GUIDES.texts

    def open(self, sampling: Sampling) -> TokenGuide:
        assert self.may_open.wait(PATIENCE_S)
        if sampling.guided_regex == "?":
            raise UnsupportedError("guided_regex is set, and it is none")
        if sampling.guided_regex == "!":
            raise Panic("a compiled library gave up")
        return GUIDES.open(sampling)


class Scene:
    def __init__(self, engine: RealTimeSimulatedEngine, guides: SlowGuides) -> None:
        self.engine = engine
        self.guides = guides
        self.reports: list[EngineReport] = []
        self._news = asyncio.Event()

    def deliver(self, report: EngineReport) -> None:
        self.reports.append(report)
        self._news.set()

    def submit(self, request_id: str, regex: str | None = None) -> None:
        self.engine.submit(Generate(request_id, pack_tokens((5, 6, 7)), Sampling(8, guided_regex=regex)))

    async def last(self, request_id: str) -> TokenDelta:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for report in self.reports:
                    for delta in report.deltas:
                        if delta.request_id == request_id and delta.finish_reason is not None:
                            return delta
                self._news.clear()
                await self._news.wait()

    def finished(self) -> list[tuple[str, str]]:
        events = [event for report in self.reports for rank in report.ranks.values() for event in rank.events]
        return [(event.request_id, event.reason) for event in events if isinstance(event, RequestFinished)]


@asynccontextmanager
async def stepping() -> AsyncIterator[Scene]:
    guides = SlowGuides()
    timing = ScaledTiming(PolynomialTiming(), 100.0)
    scene = Scene(RealTimeSimulatedEngine(SimulatedLimits(), VOCABULARY, timing, SystemClock(), guides=guides), guides)
    running = asyncio.ensure_future(scene.engine.run(scene.deliver))
    await asyncio.sleep(0)
    try:
        yield scene
    finally:
        guides.may_open.set()
        running.cancel()
        await asyncio.wait({running})


async def test_others_go_on_while_a_guide_is_opened_and_its_request_follows() -> None:
    async with stepping() as scene:
        scene.submit("guided", "[ab]{4}")
        scene.submit("plain")
        assert (await scene.last("plain")).finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert [delta.request_id for report in scene.reports for delta in report.deltas].count("guided") == 0

        scene.guides.may_open.set()
        assert (await scene.last("guided")).finish_reason == FinishReason.STOP


async def test_a_request_whose_guide_is_being_opened_can_be_cancelled() -> None:
    async with stepping() as scene:
        scene.submit("guided", "[ab]{4}")
        scene.engine.cancel("guided")
        assert (await scene.last("guided")).finish_reason == FinishReason.CANCELLED
        scene.guides.may_open.set()
        scene.submit("plain")
        await scene.last("plain")
        assert scene.finished()[0] == ("guided", FinishReason.CANCELLED)
        assert scene.engine.load().running_requests == 0


async def test_a_guide_that_cannot_be_opened_ends_its_request_with_the_reason() -> None:
    async with stepping() as scene:
        scene.guides.may_open.set()
        scene.submit("guided", "?")
        last = await scene.last("guided")
        assert (last.finish_reason, last.refusal) == (FinishReason.ERROR, RefusalKind.INVALID)
        assert last.error == "guided_regex is set, and it is none"
        assert scene.finished() == [("guided", FinishReason.ERROR)]


async def test_a_guide_whose_opening_fails_is_answered_as_broken_so_that_another_worker_may_try() -> None:
    async with stepping() as scene:
        scene.guides.may_open.set()
        scene.submit("guided", "!")
        last = await scene.last("guided")
        assert (last.finish_reason, last.refusal) == (FinishReason.ERROR, RefusalKind.BROKEN)
        assert last.error == "guided_regex is set, and opening it failed here: Panic: a compiled library gave up"
        assert scene.finished() == [("guided", FinishReason.ERROR)]
        scene.submit("plain")
        await scene.last("plain")


async def test_others_go_on_while_the_log_probabilities_of_a_long_prompt_are_made() -> None:
    prompt = pack_tokens(range(10, 1000))
    asked = Sampling(2, seed=5, prompt_logprobs=2)

    async with stepping() as scene:
        scene.submit("guided", "[ab]{4}")  # the one thread is busy with it
        scene.engine.submit(Generate("long", prompt, asked))
        scene.engine.submit(Generate("cancelled", prompt, asked))
        scene.engine.submit(Generate("short", prompt[:40], asked))
        assert (await scene.last("short")).finish_reason == FinishReason.LENGTH
        scene.engine.cancel("cancelled")
        assert (await scene.last("cancelled")).finish_reason == FinishReason.CANCELLED
        scene.guides.may_open.set()
        await scene.last("long")
        told = [delta for report in scene.reports for delta in report.deltas if delta.request_id == "long"]
        assert told[0].prompt_logprobs == prompt_logprobs(VOCABULARY, b"", prompt, 5, 2)
        assert all(delta.prompt_logprobs is None for delta in told[1:])
