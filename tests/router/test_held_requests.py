"""Requests wait at a router for the worker that is best for them, where the policy plans."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from poolgrid.kernel.decision.policy import HELD_MAX
from poolgrid.kernel.requests.inference import InferenceRequest, Refused
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.routing.engine_times import card_prompt_ms
from poolgrid.kernel.wire.card import WorkerLimits
from poolgrid.kernel.wire.events import PrefillCompleted, RequestStarted, WorkerJoined
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, Sampling, TokenDelta
from poolgrid.server.router.engine_backlog import BACKLOG_MS
from poolgrid.server.router.policy_loading import make_policy
from tests.frontend.inference_requests import like
from tests.router.test_service import Routed, card, routed

A, B = WorkerKey(WorkerId("a")), WorkerKey(WorkerId("b"))
AT_A, AT_B = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
LIMITS = WorkerLimits(1000, 1024, 100_000, 1_000_000)
OF_2000_MS = card_prompt_ms(msgspec.structs.replace(card(AT_A), limits=LIMITS), 2000)
LONG = InferenceRequest("long", "m", pack_tokens(range(6000)), Sampling(max_tokens=4))


def join(router: Routed, worker: WorkerKey, endpoint: str) -> None:
    router.feed.tell((worker, WorkerJoined(msgspec.structs.replace(card(endpoint), limits=LIMITS))))
    router.bring_up(endpoint)


def named(name: str, tokens: int = 6000, priority: int = 0) -> InferenceRequest:
    return like(LONG, request_id=name, token_ids=pack_tokens(range(tokens)), priority=priority)


async def submit(router: Routed, *requests: InferenceRequest) -> list[asyncio.Task[TokenDelivery]]:
    """Have requests come in one turn of the loop, and let the router do what follows at once."""
    tasks = [asyncio.ensure_future(router.service.submit(each)) for each in requests]
    await settled()
    return tasks


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def end(*tasks: asyncio.Task[TokenDelivery]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def on_workers(router: Routed) -> list[str]:
    return list(router.service.tracker.requests)


async def test_a_second_long_prompt_waits_until_the_first_is_computed() -> None:
    async with routed(make_policy("kv")) as router:
        join(router, A, AT_A)
        first, second = await submit(router, named("first"), named("second", 7000))
        assert (first.done(), second.done()) == (True, False)
        assert router.service.counts() == (1, 1)

        router.feed.tell((A, RequestStarted("first", 6000, 0, 375)))
        await settled()
        assert not second.done()
        router.feed.tell((A, PrefillCompleted("first")))
        await settled()

        assert second.done()
        assert router.sent == [AT_A, AT_A]
        [decision] = router.service.tracker.decisions.of_request("second")
        assert decision.queued_ms > 0.0


async def test_a_first_token_that_is_seen_before_the_event_frees_the_worker() -> None:
    async with routed(make_policy("kv")) as router:
        join(router, A, AT_A)
        _, second = await submit(router, named("first"), named("second", 7000))

        router.say(AT_A, TokenDelta("first", 0, pack_tokens([7])))
        await settled()

        assert second.done()


async def test_what_comes_in_one_turn_is_placed_with_a_view_to_each_other() -> None:
    async with routed(make_policy("kv")) as router:
        join(router, A, AT_A)
        tasks = await submit(router, named("longest", 8000), named("shortest", 3000), named("other", 7000))

        assert on_workers(router) == ["shortest"], "though the longest came first"
        [decision] = router.service.tracker.decisions.of_request("shortest")
        assert list(decision.choice.terms["behind_ms"]) == [
            pytest.approx(2 * decision.choice.terms["own_ms"][0] * decision.choice.terms["pace"][0])
        ]
        await end(*tasks)
        assert router.service.counts()[1] == 0


async def test_nobody_waits_longer_than_the_limit_and_none_at_all_where_it_is_0() -> None:
    async with routed(make_policy("kv"), hold_limit_ms=40) as router:
        join(router, A, AT_A)
        _, second = await submit(router, named("first"), named("second", 7000))
        assert not second.done()
        async with asyncio.timeout(120):
            while not second.done():  # whatever happens next, as events of other workers do
                router.service.queue.pump()
                await asyncio.sleep(0.005)
        [decision] = router.service.tracker.decisions.of_request("second")
        assert decision.queued_ms >= 40

    async with routed(make_policy("kv"), hold_limit_ms=0) as router:
        join(router, A, AT_A)
        await submit(router, named("first"), named("second", 7000))
        assert on_workers(router) == ["first", "second"]


async def test_housekeeping_looks_after_those_that_waited_too_long() -> None:
    async with routed(make_policy("kv"), hold_limit_ms=10, worker_timeout_ms=100) as router:
        join(router, A, AT_A)
        _, second = await submit(router, named("first"), named("second", 7000))
        async with asyncio.timeout(120):
            await second


async def test_nobody_is_refused_because_others_are_held() -> None:
    async with routed(make_policy("kv"), max_queue_requests=2) as router:
        join(router, A, AT_A)
        tasks = await submit(router, *(named(f"r{number}", 6000 + number) for number in range(4)))

        active, waiting = router.service.counts()
        assert (active, waiting) == (2, 2), "the second of 200 ms each is begun with soon enough, a third is not"
        with pytest.raises(Refused, match="waiting already: 2 requests"):
            await (await submit(router, named("sixth", 6006)))[0]
        await end(*tasks)

    async with routed(make_policy("kv"), max_queue_prompt_tokens=10_000) as router:
        join(router, A, AT_A)
        tasks = await submit(router, *(named(f"r{number}", 6000 + number) for number in range(3)))
        assert router.service.counts() == (2, 1)
        await end(*tasks)


async def test_no_more_are_held_than_there_is_a_point_in_while_engines_have_room() -> None:
    async with routed(make_policy("kv")) as router:
        join(router, A, AT_A)
        tasks = await submit(router, *(named(f"r{number}", 2000) for number in range(HELD_MAX + 5)))

        active, waiting = router.service.counts()
        assert active + waiting == HELD_MAX + 5
        assert active * OF_2000_MS < BACKLOG_MS + OF_2000_MS
        more = await submit(router, *(named(f"s{number}", 2000) for number in range(50)))
        active, waiting = router.service.counts()
        assert active * OF_2000_MS < BACKLOG_MS + 2 * OF_2000_MS
        assert active + waiting == HELD_MAX + 55
        await end(*tasks, *more)


async def test_a_request_that_no_worker_can_serve_is_told_at_once() -> None:
    async with routed(make_policy("kv")) as router:
        [nobody] = await submit(router, named("nobody"))
        with pytest.raises(Refused, match="no worker serves this model"):
            await nobody
        join(router, A, AT_A)
        first, too_long = await submit(router, named("first"), named("too long", 1_000_001))
        with pytest.raises(Refused, match="prompt of 1000001 tokens, room for 999999"):
            await too_long
        assert first.done()


async def test_whoever_leaves_while_it_waits_is_gone_and_the_next_one_goes() -> None:
    async with routed(make_policy("kv")) as router:
        join(router, A, AT_A)
        tasks = await submit(router, named("first"), named("second", 7000), named("third", 8000))
        await end(tasks[1])
        assert router.service.counts() == (1, 1)

        router.say(AT_A, TokenDelta("first", 0, pack_tokens([1, 2, 3, 4]), FinishReason.LENGTH))
        await settled()
        assert on_workers(router) == ["third"]


async def test_nobody_is_held_where_other_routers_send_to_the_same_workers() -> None:
    async with routed(make_policy("kv")) as router:
        join(router, A, AT_A)
        join(router, B, AT_B)
        for number in range(20):
            others = f"other-{number}"
            router.feed.tell((B, RequestStarted(others, 6000, 0, 375)), (B, PrefillCompleted(others)))

        await submit(router, named("first"), named("second", 7000), named("third", 8000))

        assert on_workers(router) == ["first", "second", "third"]


async def test_of_two_that_waited_to_continue_the_same_turn_the_second_is_a_fork() -> None:
    async with routed(make_policy("kv")) as router:
        join(router, A, AT_A)
        first = named("first", 200)
        await submit(router, first)
        router.say(AT_A, TokenDelta("first", 0, pack_tokens([7]), FinishReason.STOP))
        busy, *both = (
            like(LONG, request_id=name, token_ids=pack_tokens([*before, *range(at, at + 6000)]))
            for name, at, before in (("b", 9000, ()), ("x", 20_000, (*range(200), 7)), ("y", 30_000, (*range(200), 7)))
        )
        tasks = await submit(router, busy, *both)
        assert [each.turn and each.turn.session for each in both] == 2 * [first.turn and first.turn.session]
        for name in ("b", "x"):
            router.feed.tell((A, RequestStarted(name, 6201, 0, 400)), (A, PrefillCompleted(name)))
            await settled()

        assert [each.turn and each.turn.parent for each in both if tasks[-1].done()] == [
            "",
            first.turn and first.turn.session,
        ]
