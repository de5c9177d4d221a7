"""Turns of sessions wait at the router while the pool's working set has no room for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.requests.inference import InferenceRequest, Refused, SessionHint
from poolgrid.kernel.routing import working_set
from poolgrid.kernel.wire.card import WorkerLimits
from poolgrid.kernel.wire.events import RequestFinished, RequestStarted, WorkerJoined, WorkerLeft
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, TokenDelta
from poolgrid.server.router import service
from poolgrid.server.router.admission_review import TURNS_MIN
from poolgrid.server.router.choosing import CROWDED
from poolgrid.server.router.http_api import waiting_row
from poolgrid.server.router.lane_placer import HEAD_MS
from poolgrid.server.router.settings import RouterSettings
from tests.frontend.inference_requests import like
from tests.router.test_held_requests import end, on_workers, settled, submit
from tests.router.test_service import REQUEST, Routed, card, routed
from tests.router.test_turn_replay import past

A, B = WorkerKey(WorkerId("a")), WorkerKey(WorkerId("b"))
AT_A, AT_B = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
LIMITS = WorkerLimits(1000, 1024, 100, 100_000)
"""100 blocks of 16 tokens."""


@pytest.fixture(autouse=True)
def slow_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the caches are: places are kept as long as pauses last."""
    monkeypatch.setattr(working_set, "RUNNING_SHARE", 1e6)


def join(router: Routed, worker: WorkerKey = A, endpoint: str = AT_A) -> None:
    router.feed.tell((worker, WorkerJoined(msgspec.structs.replace(card(endpoint), limits=LIMITS))))
    router.bring_up(endpoint)


def call(session: str, number: int = 0, blocks: int = 40, parent: str = "unknown", **more: object) -> InferenceRequest:
    """A call of a session whose prompt begins as no other does; it forked, so it is no first turn."""
    tokens = pack_tokens([hash_of(session)] * 16 * blocks)
    hint = SessionHint(session, parent)
    return like(REQUEST, request_id=f"{session}-{number}", token_ids=tokens, session=hint, **more)


def hash_of(session: str) -> int:
    return sum(map(ord, session)) * 7


async def restart(router: Routed) -> None:
    """Have a worker come back with an empty cache."""
    joined = WorkerJoined(msgspec.structs.replace(card(AT_A), limits=LIMITS))
    router.feed.tell((A, WorkerLeft("lease")), (A, joined))
    router.bring_up(AT_A)
    await settled()


async def finish(router: Routed, request_id: str, worker: WorkerKey = A, endpoint: str = AT_A) -> None:
    """Have a request run and end on its worker."""
    router.feed.tell((worker, RequestStarted(request_id, 640, 0, 40)))
    router.say(endpoint, TokenDelta(request_id, 0, pack_tokens([7]), FinishReason.STOP))
    router.feed.tell((worker, RequestFinished(request_id, "stop")))
    await settled()


@asynccontextmanager
async def full_pool(**settings: Any) -> AsyncIterator[Routed]:
    """A worker with room for two sessions, which two have."""
    async with routed(**{"session_admission": True, **settings}) as router:
        join(router)
        for session in ("one", "two"):
            await asyncio.gather(*await submit(router, call(session)))
            await finish(router, f"{session}-0")
        yield router


def causes(router: Routed) -> dict[str, float]:
    return {
        sample.labels["cause"]: sample.value
        for metric in router.metrics.queue_seconds.collect()
        for sample in metric.samples
        if sample.name.endswith("_count")
    }


async def test_a_third_session_waits_and_turns_of_the_two_pass_it() -> None:
    async with full_pool() as router:
        [third] = await submit(router, call("three"))
        [again] = await submit(router, call("one", 1, 42))

        assert again.done()
        assert not third.done()
        assert on_workers(router) == ["one-1"]
        [row] = [waiting_row(each, each.entered_ms + 250) for each in router.service.queue.turns_without_place()]
        assert (row.session, row.request_id, row.isl, row.waited_ms) == ("three", "three-0", 640, 250)
        await end(third)
        assert not router.service.queue.turns_without_place()
        assert causes(router)["working_set"] == 1


async def test_no_turn_waits_without_session_admission() -> None:
    async with full_pool(session_admission=RouterSettings().session_admission) as router:
        [third] = await submit(router, call("three"))

        assert third.done()


async def test_admission_rests_after_reviews_without_gain_and_turns_that_wait_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "REVIEW_MS", 20.0)
    async with full_pool() as router:
        [third] = await submit(router, call("three"))
        admission, now_ms = router.service.admission, router.service._clock.monotonic_ms()
        assert admission is not None
        assert not third.done()
        admission.log._past.extend(past(0, now_ms - 100_000 + 1000.0 * number, 5) for number in range(TURNS_MIN))

        await asyncio.wait_for(third, 10.0)
        assert admission.rests
        assert admission.row(now_ms).state == "rests"
        [fourth] = await submit(router, call("four"))
        assert fourth.done()


async def test_first_and_small_turns_pass_turns_that_wait() -> None:
    async with full_pool() as router:
        tasks = await submit(router, call("three"), call("first", parent=""), call("small", blocks=5))

        assert [task.done() for task in tasks] == [False, True, True]
        await end(*tasks)


async def test_turn_behind_a_large_one_is_offered_a_place_until_that_has_waited_long() -> None:
    async with full_pool() as router:
        places = router.service.chooser._state.sessions.working_set
        large, *small = await submit(
            router, call("large", blocks=60), call("small", blocks=30), call("late", blocks=30)
        )
        assert not any(task.done() for task in (large, *small))
        places._send_away((0, "one"))
        router.service.queue.pump()
        await settled()
        assert on_workers(router) == ["small-0"]

        await finish(router, "small-0")
        places._send_away((0, "small"))
        router.service.queue.turns_without_place()[0].entered_ms -= HEAD_MS
        router.service.queue._offered.clear()
        router.service.queue.pump()
        await settled()
        assert on_workers(router) == [], "only the large one is offered a place"
        await end(large, *small)


async def test_a_waiting_session_gets_the_place_of_one_whose_lease_is_over() -> None:
    async with full_pool() as router:
        router.service.chooser._state.sessions.working_set.lease_ms = 30.0
        async with asyncio.timeout(120):
            [third] = await submit(router, call("three"))
            await third

        assert on_workers(router) == ["three-0"]
        [decision] = router.service.tracker.decisions.of_request("three-0")
        assert decision.queued_ms > 0.0


async def test_a_session_goes_to_the_worker_that_has_room_and_the_decision_says_why() -> None:
    async with full_pool() as router:
        join(router, B, AT_B)
        await asyncio.gather(*await submit(router, call("three")))

        [decision] = router.service.tracker.decisions.of_request("three-0")
        assert decision.worker == B
        assert decision.filtered[A] == CROWDED


async def test_a_session_is_served_on_a_crowded_worker_where_the_one_with_room_cannot() -> None:
    async with full_pool() as router:
        join(router, B, AT_B)
        router.lose(AT_B)
        [third] = await submit(router, call("three"))
        await third

        assert router.service.tracker.decisions.of_request("three-0")[0].worker == A


async def test_sessions_wait_in_order_and_by_priority() -> None:
    async with full_pool() as router:
        tasks = await submit(router, *(call(name, priority=-1) for name in ("three", "four")), call("five"))
        await restart(router)

        assert on_workers(router) == ["five-0", "three-0"]
        await end(*tasks)


async def test_a_client_that_was_refused_keeps_its_turn_when_it_comes_back() -> None:
    async with full_pool(queue_timeout_ms=30) as router:
        [early] = await submit(router, call("early"))
        with pytest.raises(Refused):
            await early
        router.service.queue._timeout_ms = 60_000.0
        tasks = await submit(router, call("late"), call("later"), call("early", 1))
        await restart(router)

        assert on_workers(router)[0] == "early-1"
        await end(*tasks)


async def test_a_subagent_does_not_wait_behind_strangers() -> None:
    async with full_pool() as router:
        tasks = await submit(router, call("three"), call("child", parent="one"))
        assert [task.done() for task in tasks] == [False, True]
        await end(*tasks)


async def test_a_roomy_pool_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routed(session_admission=True) as router:
        join(router)
        await asyncio.gather(*await submit(router, call("one", blocks=10)))
        await finish(router, "one-0")
        monkeypatch.setattr(router.service.chooser._state, "offer", None)
        tasks = await submit(router, *(call(f"s{number}", blocks=10) for number in range(5)))
        assert all(task.done() for task in tasks)
