"""Workers that refuse: without room they are left alone for a while, and what they cannot do they are asked once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from poolgrid.kernel.requests.inference import Refused, StreamDelta, TokenStream
from poolgrid.kernel.wire.events import WorkerJoined
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.identifiers import WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, TokenDelta
from poolgrid.server.serving.admission_queue import RETRY_AFTER_DEFAULT_MS, RETRY_AFTER_MAX_MS, FullWorkers
from tests.clock import HandClock
from tests.frontend.inference_requests import like
from tests.router.test_service import AFTER, BEFORE, NEW, OLD, REQUEST, Routed, card, routed


async def test_a_full_worker_is_left_alone_for_its_time_which_is_bounded() -> None:
    clock = HandClock()
    full: FullWorkers[str] = FullWorkers(clock)
    assert not full.at(clock.now_ms)
    assert full.retry_after_s(clock.now_ms) == 0.0
    full.note("long", 10**9)
    full.note("short", 2000)
    full.note("short", 500)  # what was said before still holds
    full.note("silent", None)
    full.note("none", 0)
    known = full.at(clock.now_ms)
    assert set(known) == {"long", "short", "silent", "none"}
    assert set(full.at(clock.now_ms + 1)) == {"long", "short", "silent"}
    assert set(known) == {"long", "short", "silent", "none"}, "what was handed out does not change"
    assert full.retry_after_s(clock.now_ms + 1) == pytest.approx((RETRY_AFTER_DEFAULT_MS - 1) / 1000)
    assert set(full.at(clock.now_ms + RETRY_AFTER_DEFAULT_MS)) == {"long", "short"}
    assert set(full.at(clock.now_ms + 2000)) == {"long"}
    assert not full.at(clock.now_ms + RETRY_AFTER_MAX_MS)
    full.close()


async def test_somebody_is_told_when_there_may_be_room_again() -> None:
    clock, told = HandClock(), asyncio.Event()
    full: FullWorkers[str] = FullWorkers(clock)
    full.observe(told.set)
    full.note("w", 1)
    clock.now_ms += 1
    await asyncio.wait_for(told.wait(), 120)
    assert not full.at(clock.now_ms)


@pytest.mark.parametrize("other", [False, True])
async def test_a_look_at_full_workers_takes_away_no_word_of_room(other: bool) -> None:
    """A page of metrics may be the first to see that a time is over, and another worker may become full then."""
    clock, told = HandClock(), asyncio.Event()
    full: FullWorkers[str] = FullWorkers(clock)
    full.observe(told.set)
    full.note("w", 1)
    clock.now_ms += 1
    assert not full.at(clock.now_ms)
    if other:
        full.note("other", RETRY_AFTER_MAX_MS)
    await asyncio.wait_for(told.wait(), 20)
    full.close()


def join(router: Routed, *loras: tuple[str, ...]) -> None:
    served = loras or ((), ())
    for worker, endpoint, names in zip((OLD, NEW), (BEFORE, AFTER), served, strict=False):
        router.feed.tell((worker, WorkerJoined(msgspec.structs.replace(card(endpoint), loras=names))))
        router.bring_up(endpoint)


def refuse(router: Routed, kind: RefusalKind, error: str = "no", **more: Any) -> None:
    """Have the worker that got the last request refuse it."""
    endpoint = router.sent[-1]
    [leg] = router.service.tracker.legs_on(endpoint)
    router.say(endpoint, TokenDelta(leg, 0, b"", FinishReason.ERROR, error=error, refusal=kind, **more))


async def last_of(stream: TokenStream) -> StreamDelta:
    async with asyncio.timeout(120):
        while True:
            for delta in await stream.next():
                if delta.finish_reason is not None:
                    return delta


def answer(router: Routed) -> None:
    endpoint = router.sent[-1]
    [leg] = router.service.tracker.legs_on(endpoint)
    router.say(endpoint, TokenDelta(leg, 0, pack_tokens([1, 2, 3, 4]), FinishReason.LENGTH))


async def test_with_one_full_worker_a_request_goes_to_the_free_one_at_once_and_so_do_later_ones() -> None:
    async with routed(migration_limit=0) as router:
        join(router)
        stream = await router.service.submit(REQUEST)
        was_full = router.sent[-1]
        refuse(router, RefusalKind.BUSY, retry_after_ms=60_000)
        free = router.sent[-1]
        assert free != was_full
        answer(router)
        assert (await last_of(stream)).finish_reason == "length"
        for number in range(5):
            await router.service.submit(like(REQUEST, request_id=f"r{number}"))
            assert router.sent[-1] == free
            answer(router)


@pytest.mark.parametrize("streamed", [0, 2])
async def test_a_request_that_finds_no_room_in_time_ends_as_busy_with_a_time_to_come_back(streamed: int) -> None:
    async with routed(queue_timeout_ms=100, worker_timeout_ms=100) as router:
        join(router)
        stream = await router.service.submit(REQUEST)
        if streamed:
            [leg] = router.service.tracker.legs_on(router.sent[-1])
            router.say(router.sent[-1], TokenDelta(leg, 0, pack_tokens([1, 2])))
            endpoint = router.sent[-1]
            refusal = TokenDelta(
                leg, 2, b"", FinishReason.ERROR, error="no", refusal=RefusalKind.BUSY, retry_after_ms=30_000
            )
            router.say(endpoint, refusal)
        else:
            refuse(router, RefusalKind.BUSY, retry_after_ms=30_000)
        refuse(router, RefusalKind.BUSY, retry_after_ms=40_000)
        with pytest.raises(Refused) as refused:
            await router.service.submit(like(REQUEST, request_id="new"))
        assert (refused.value.status, refused.value.code) == (429, "busy")
        last = await last_of(stream)
        assert last.error == "no worker had room within 100 ms"
        assert last.retry_after_s is not None
        assert 25 <= last.retry_after_s <= 30
        assert len(router.sent) == 2, "full workers are not asked again before their time"


async def test_a_request_that_may_not_wait_is_refused_at_once_and_takes_no_turn_of_others() -> None:
    async with routed() as router:
        join(router, ())
        await router.service.submit(REQUEST)
        refuse(router, RefusalKind.BUSY, retry_after_ms=60_000)
        assert router.service.counts()[1] == 1

        with pytest.raises(Refused) as refused:
            await router.service.submit(like(REQUEST, request_id="hop", may_wait=False))
        assert (refused.value.status, refused.value.code) == (429, "busy")
        assert refused.value.retry_after_s is not None
        assert router.service.counts()[1] == 1


async def test_a_request_that_may_not_wait_ends_as_busy_when_its_worker_has_no_room_after_all() -> None:
    async with routed() as router:
        join(router, ())
        stream = await router.service.submit(like(REQUEST, may_wait=False))
        refuse(router, RefusalKind.BUSY, retry_after_ms=60_000)

        last = await last_of(stream)

        assert last.retry_after_s is not None
        assert router.service.counts() == (0, 0)


async def test_a_worker_that_refuses_again_and_again_does_not_make_the_wait_longer() -> None:
    async with routed(queue_timeout_ms=150, worker_timeout_ms=100) as router:
        join(router, ())
        stream = await router.service.submit(REQUEST)
        ending = asyncio.ensure_future(last_of(stream))
        while not ending.done():
            if router.service.tracker.legs_on(BEFORE):
                refuse(router, RefusalKind.BUSY, retry_after_ms=10)
            await asyncio.sleep(0.005)
        assert ending.result().retry_after_s is not None
        assert len(router.sent) > 2


async def test_what_workers_cannot_do_each_is_asked_once_and_the_client_gets_their_words() -> None:
    async with routed() as router:
        join(router)
        stream = await router.service.submit(REQUEST)
        refuse(router, RefusalKind.CANNOT_DO, "first says no")
        refuse(router, RefusalKind.CANNOT_DO, "second says no", unknown_model=True)
        last = await last_of(stream)
        assert sorted(router.sent) == [BEFORE, AFTER]
        assert (last.error, last.unsupported, last.unknown_model) == ("second says no", True, True)


async def test_what_one_rank_cannot_do_no_other_rank_of_its_worker_is_asked() -> None:
    async with routed() as router:
        for key in (OLD, WorkerKey(OLD.worker_id, OLD.dp_rank + 1)):
            router.feed.tell((key, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        stream = await router.service.submit(REQUEST)
        refuse(router, RefusalKind.CANNOT_DO, "no rank can")
        last = await last_of(stream)
        assert (last.error, last.unsupported, len(router.sent)) == ("no rank can", True, 1)


async def test_requests_with_an_adapter_go_to_workers_that_list_it() -> None:
    async with routed() as router:
        join(router, (), ("sql",))
        for number in range(6):
            await router.service.submit(like(REQUEST, request_id=f"r{number}", lora_name="sql"))
        assert set(router.sent) == {AFTER}
