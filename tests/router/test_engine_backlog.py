"""A router gives an engine no more prompts than it begins with soon; the rest waits in the queue, in its order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta
from poolgrid.kernel.routing.engine_times import card_prompt_ms
from poolgrid.kernel.wire.card import WorkerLimits
from poolgrid.kernel.wire.events import PrefillCompleted, RequestStarted, WorkerJoined
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.server.http.client_address import client_address
from poolgrid.server.router.engine_backlog import BACKLOG_MS
from poolgrid.server.router.lane_placer import MISSES_MAX, LanePlacer, Tried
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.serving.fair_queue import FairQueue, QueuedRequest
from tests.frontend.inference_requests import like
from tests.router.test_held_requests import end, settled, submit
from tests.router.test_service import Routed, card, routed

A, B = WorkerKey(WorkerId("a")), WorkerKey(WorkerId("b"))
AT_A, AT_B = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
LIMITS = WorkerLimits(1000, 8192, 100_000, 1_000_000)
LONG = InferenceRequest("long", "m", pack_tokens(range(8000)), Sampling(max_tokens=4))
LONG_MS = card_prompt_ms(msgspec.structs.replace(card(AT_A), limits=LIMITS), 8000)
GIVEN = int(BACKLOG_MS // LONG_MS) + 1
"""Long prompts that an engine is given at once: the last is begun with within the bound."""


def join(router: Routed, worker: WorkerKey, endpoint: str, **more: Any) -> None:
    router.feed.tell((worker, WorkerJoined(msgspec.structs.replace(card(endpoint), limits=LIMITS, **more))))
    router.bring_up(endpoint)


def request(name: str, tokens: int = 8000, **more: Any) -> InferenceRequest:
    return like(LONG, request_id=name, token_ids=pack_tokens(range(tokens)), **more)


def on_workers(router: Routed) -> list[str]:
    return list(router.service.tracker.requests)


def compute(router: Routed, name: str, tokens: int = 8000) -> None:
    router.feed.tell((A, RequestStarted(name, tokens, 0, tokens // 16)), (A, PrefillCompleted(name)))


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded", "random", "lmetric"])
async def test_one_of_many_goes_for_each_prompt_that_is_computed_in_the_order_of_turns(policy: str) -> None:
    async with routed(make_policy(policy)) as router:
        join(router, A, AT_A)
        tasks = await submit(router, *(request(f"flood-{number}", tenant="flood") for number in range(20)))
        assert on_workers(router) == [f"flood-{number}" for number in range(GIVEN)]

        tasks += await submit(router, request("low", 40, tenant="other", priority=-1), request("other", 40, tenant="o"))
        tasks += await submit(router, request("high", tenant="flood", priority=1))
        assert len(on_workers(router)) == GIVEN
        went: list[str] = []
        for number in range(3):
            compute(router, f"flood-{number}")
            await settled()
            went += on_workers(router)[GIVEN + len(went) :]

        assert went[:3] == ["high", f"flood-{GIVEN}", "other"], "which began to wait with the count of the other tenant"
        assert "low" not in went
        await end(*tasks)
        assert router.service.counts()[1] == 0


async def test_where_other_routers_send_too_the_bound_holds_for_the_sum() -> None:
    async with routed(make_policy("kv")) as router:
        join(router, A, AT_A)
        for number in range(20):
            router.feed.tell((A, RequestStarted(f"other-{number}", 8000, 0, 500)))
        tasks = await submit(router, request("long"), request("short", 40))
        assert on_workers(router) == []

        for number in range(20):
            router.feed.tell((A, PrefillCompleted(f"other-{number}")))
        await settled()
        assert on_workers(router) == ["short", "long"]
        await end(*tasks)


async def test_a_prompt_of_any_length_goes_to_an_engine_without_prompts() -> None:
    async with routed(make_policy("least-loaded")) as router:
        join(router, A, AT_A)
        tasks = await submit(router, request("first", 40), request("longest", 400_000))
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)


@pytest.mark.parametrize("policy", ["round-robin", "random", "least-loaded"])
async def test_a_policy_that_knows_no_queues_uses_the_other_worker_while_one_has_enough(policy: str) -> None:
    async with routed(make_policy(policy)) as router:
        join(router, A, AT_A)
        tasks = await submit(router, *(request(f"first-{number}") for number in range(GIVEN)))
        join(router, B, AT_B)
        tasks += await submit(router, *(request(f"second-{number}") for number in range(GIVEN)))

        assert router.sent == [AT_A] * GIVEN + [AT_B] * GIVEN
        tasks += await submit(router, request("third"))
        assert not tasks[-1].done()
        await end(*tasks)


async def test_without_a_queue_none_waits_for_an_engine() -> None:
    async with routed(make_policy("least-loaded"), max_queue_requests=0) as router:
        join(router, A, AT_A)
        tasks = await submit(router, *(request(f"r{number}") for number in range(2 * GIVEN)))
        assert all(task.done() for task in tasks)


async def test_what_waits_is_recorded_by_what_comes_of_it_alone() -> None:
    """A replay is given decisions and what was booked; that a request waited is no input of its own."""
    async with routed(make_policy("least-loaded")) as router:
        join(router, A, AT_A)
        noted: list[str] = []
        router.service.tracker._state.log = Log(noted.append)
        tasks = await submit(router, *(request(f"r{number}") for number in range(GIVEN + 2)))

        assert noted.count("Booked") == GIVEN
        assert set(noted) == {"WorkerWanted", "Booked"}
        await end(*tasks)


class Log:
    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take

    def note(self, given: Any, came: Any = None) -> None:
        self._take(type(given).__name__)


# -- answers in one piece ------------------------------------------------------------------------------------------


class Whole:
    """Takes a request to a server that answers in one piece."""

    is_streamed = False
    finish_reason = "stop"
    cached_tokens = None

    is_prefilled = False
    output_tokens: int | None = None
    prompt_tokens: int | None = None

    def can_be_split(self, kind: str) -> bool:
        return False

    def send(self, dispatch_id: str, worker: WorkerKey, stage: Stage, params: bytes) -> None: ...

    def withdraw(self, dispatch_id: str) -> None: ...

    def ended(self, last: StreamDelta) -> None: ...


@pytest.mark.parametrize("policy", ["kv", "least-loaded"])
async def test_a_prompt_whose_first_token_cannot_be_seen_counts_until_it_is_expected_to_be_computed(
    policy: str,
) -> None:
    async with routed(make_policy(policy)) as router:
        join(router, A, AT_A, server_url="http://127.0.0.1:9")
        ledger, slot = router.service.projection.ledger, router.service.projection.index.slot(A)
        tasks = await submit(router, *(request(f"r{number}", carrier=Whole()) for number in range(GIVEN + 3)))
        given = len(on_workers(router))
        assert 1 <= given <= GIVEN
        assert ledger.prefill_tokens[slot] == 8000 * given

        async with asyncio.timeout(60):
            while not all(task.done() for task in tasks) or ledger.prefill_tokens[slot]:  # noqa: ASYNC110 - timers
                await asyncio.sleep(0.01)
        assert len(on_workers(router)) == GIVEN + 3
        observer = router.service.tracker._state.selector.observer
        if observer is not None:
            assert observer.pool_pace(router.service._clock.monotonic_ms()) == 1.0, "nothing was observed"  # type: ignore[attr-defined]


# -- the order of tries ------------------------------------------------------------------------------------------------


def placer(
    found: Callable[[str], Tried], planned: list[list[str]], count: int = 40
) -> tuple[FairQueue[str], LanePlacer[str], list[str]]:
    """Return a queue of ``count`` requests of one tenant, its placer, and the list of those that were tried."""
    queue: FairQueue[str] = FairQueue(1000, 10**9)
    tried: list[str] = []

    def try_one(queued: QueuedRequest[str]) -> Tried:
        tried.append(queued.item)
        came = found(queued.item)
        if came is Tried.GONE:
            queue.leave(queued, dispatched=True)
        return came

    def plan(taken: Any) -> bool:
        planned.append([each.item for each in taken])
        return False

    for number in range(count):
        queue.enter(QueuedRequest(f"{number}", "m", "a", prompt_tokens=10, entered_ms=float(number)))
    return queue, LanePlacer(queue, 4000.0, try_one, plan), tried


@pytest.mark.parametrize(
    ("came", "plans", "tries", "plans_made", "waits"),
    [
        (Tried.BUSY, False, 1, 0, False),
        (Tried.BACKLOGGED, False, MISSES_MAX, 0, True),
        (Tried.BUSY, True, MISSES_MAX, 1, False),
        (Tried.BACKLOGGED, True, MISSES_MAX, 1, True),
    ],
)
def test_tries_end(came: Tried, plans: bool, tries: int, plans_made: int, waits: bool) -> None:
    planned: list[list[str]] = []
    queue, lanes, tried = placer(lambda name: came, planned)

    assert lanes.place("m", 10_000.0, plans) is waits
    assert tried == [str(number) for number in range(tries)]
    assert len(planned) == plans_made
    assert len(queue) == 40


def test_those_behind_one_that_waits_for_its_engine_go_elsewhere_and_it_keeps_its_turn() -> None:
    queue, lanes, tried = placer(lambda name: Tried.BACKLOGGED if name == "0" else Tried.GONE, [], 5)

    assert lanes.place("m", 0.0, False)
    head = queue.head("m")
    assert head is not None
    assert (head.item, len(queue)) == ("0", 1)
    assert tried == ["0", "1", "2", "3", "4", "0"]


def test_only_those_that_waited_for_the_limit_and_those_before_them_are_tried_without_a_plan() -> None:
    planned: list[list[str]] = []
    _, lanes, tried = placer(lambda name: Tried.BACKLOGGED, planned, 6)

    lanes.place("m", 4002.0, True)

    assert tried == ["0", "1", "2"]
    assert planned == [["0", "1", "2", "3", "4", "5"]]


def test_beside_a_tenants_backlog_others_wait_for_a_plan_as_long_as_for_an_engine() -> None:
    queue, lanes, _ = placer(lambda name: Tried.GONE, [])
    assert lanes.hold_limit_ms("m") == 4000.0
    queue.enter(QueuedRequest("b", "m", "b", prompt_tokens=10))
    assert lanes.hold_limit_ms("m") == BACKLOG_MS
    assert lanes.hold_limit_ms("other") == 4000.0


# -- clients without keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (None, ""),
        (("10.0.0.7", 4711), "10.0.0.7"),
        (("::ffff:10.0.0.7", 4711), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "20010db800010002"),
        (("2001:db8:1:2::9", 1), "20010db800010002"),
        (("::1", 1), "0000000000000000"),
        (("a:socket", 0), "a:socket"),
    ],
)
def test_clients_are_told_apart_by_their_network(client: Any, address: str) -> None:
    assert client_address({"client": client}) == address


async def test_without_keys_a_client_does_not_wait_behind_the_backlog_of_another() -> None:
    async with routed(make_policy("least-loaded")) as router:
        join(router, A, AT_A)
        tasks = await submit(router, *(request(f"flood-{number}", address="10.0.0.1") for number in range(20)))
        tasks += await submit(router, request("other", address="10.0.0.2"))
        compute(router, "flood-0")
        compute(router, "flood-1")
        await settled()

        assert "other" in on_workers(router)
        await end(*tasks)
