"""Workers of pools that refuse: without room they are left alone for a while, and what they cannot do is asked once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind, TokenDelta
from tests.global_router.documents import aggregated, disagg
from tests.global_router.fake_fleet import (
    FakeFleet,
    FakeLink,
    Script,
    read,
    request,
    right_answer,
    speak,
    targets,
    until,
)


def refusing(kind: RefusalKind, retry_after_ms: int | None = None, unknown: bool = False, after: int = 0) -> Script:
    def script(fleet: FakeFleet, link: FakeLink, message: Generate) -> None:
        tokens = pack_tokens(range(len(message.token_ids) // 4, len(message.token_ids) // 4 + after))
        if after:
            fleet.service.tracker.on_tokens(cast(Any, link), iter([TokenDelta(message.request_id, 0, tokens)]))
        worker = link.endpoint.removeprefix("tcp://")
        delta = TokenDelta(
            message.request_id,
            after,
            b"",
            FinishReason.ERROR,
            error=f"{worker} says no",
            refusal=kind,
            retry_after_ms=retry_after_ms,
            unknown_model=unknown,
        )
        fleet.service.tracker.on_tokens(cast(Any, link), iter([delta]))

    return script


@pytest.mark.parametrize("after", [0, 2])
async def test_a_request_goes_on_at_once_where_there_is_room_and_a_full_worker_gets_nothing_for_its_time(
    after: int,
) -> None:
    fleet = FakeFleet(aggregated(), migration_limit=0)
    fleet.scripts["a-1"] = refusing(RefusalKind.BUSY, 5000, after=after)

    tokens, last = await read(await fleet.service.submit(request(hints=targets(0, 0))))

    assert (tokens, last.finish_reason) == (right_answer(), "length")
    for number in range(4):
        await read(await fleet.service.submit(request(f"r{number}", hints=targets(0, 0))))
    assert [len(link.sent) for name, link in fleet.links.links.items() if name == "tcp://a-1"] == [1]
    assert fleet.pool("a").breaker_steps == [], "it is no failure"
    assert fleet.count("poolgrid_global_router_moves_total", cause="before_output") == 0
    fleet.clock.now_ms += 5001
    fleet.scripts.clear()
    for number in range(4, 8):
        await read(await fleet.service.submit(request(f"r{number}", hints=targets(0, 0))))
    assert len(fleet.links.links["tcp://a-1"].sent) > 1
    fleet.assert_nothing_is_left()


async def test_when_every_worker_is_full_a_request_waits_and_is_served_when_time_is_over() -> None:
    fleet = FakeFleet(aggregated(), migration_limit=0)
    fleet.default_script = refusing(RefusalKind.BUSY, 5000)
    stream = await fleet.service.submit(request())
    await until(lambda: len(fleet.service.queue) == 1)
    asked = sum(len(link.sent) for link in fleet.links.links.values())
    assert asked == 6, "every worker of three pools, once"
    for _ in range(50):
        fleet.service.queue.changed()
        await asyncio.sleep(0)
    assert sum(len(link.sent) for link in fleet.links.links.values()) == asked

    fleet.default_script = speak
    fleet.clock.now_ms += 5001
    fleet.service.queue.changed()

    assert (await read(stream))[0] == right_answer()
    fleet.assert_nothing_is_left()


@pytest.mark.parametrize("document", [aggregated(), disagg()])
async def test_without_room_in_time_the_client_is_told_when_to_come_back(document: dict[str, object]) -> None:
    fleet = FakeFleet(document, queue_timeout_ms=50)
    fleet.default_script = refusing(RefusalKind.BUSY, 5000)

    reading = asyncio.ensure_future(read(await fleet.service.submit(request())))
    while not reading.done():
        fleet.clock.now_ms += 1
        await asyncio.sleep(0.002)
    _, last = reading.result()

    assert last.finish_reason == "error"
    assert last.retry_after_s is not None
    fleet.assert_nothing_is_left()


@pytest.mark.parametrize("unknown", [False, True])
async def test_what_no_worker_can_do_each_is_asked_once_and_the_client_gets_their_words(unknown: bool) -> None:
    fleet = FakeFleet(aggregated(), migration_limit=20)
    fleet.default_script = refusing(RefusalKind.CANNOT_DO, unknown=unknown)

    _, last = await read(await fleet.service.submit(request()))

    assert (last.unsupported, last.unknown_model) == (True, unknown)
    assert (last.error or "").endswith("says no")
    assert [len(link.sent) for link in fleet.links.links.values()] == [1] * 6
    fleet.assert_nothing_is_left()
