"""The service over fake pools that fail at chosen moments: what the client sees, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from poolgrid.kernel.requests.inference import Refused, StreamDelta
from poolgrid.kernel.wire.card import ChatSpec, MediaSpec
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.requests import FinishReason, Generate, RefusalKind
from poolgrid.kernel.wire.selection import ModelStatus, PoolStatus, RoleStatus, SelectRefusal, SelectRefused, WorkerRank
from poolgrid.server.global_router.service import PoolsView
from poolgrid.server.process.clock import SystemClock
from tests.global_router.documents import aggregated, changed, disagg
from tests.global_router.fake_fleet import (
    FakeFleet,
    FakeLink,
    output_of,
    read,
    request,
    right_answer,
    speak,
    status,
    targets,
    until,
    workers_of,
)

BUSY = SelectRefused(0, SelectRefusal.BUSY, "every worker is busy", 3.0)
NO_WORKER = SelectRefused(0, SelectRefusal.NO_WORKER, "too long for every worker")
LEAVING = SelectRefused(0, SelectRefusal.DRAINING, "all are leaving", None, ((WorkerRank("w"), "draining"),))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_whole(scenario), 120))


async def _whole(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


async def answer(fleet: FakeFleet, **fields: Any) -> tuple[list[int], StreamDelta, str]:
    stream = await fleet.service.submit(request(**fields))
    tokens, last = await read(stream)
    return tokens, last, stream.pool


def fail_at(
    position: int, refusal: RefusalKind | None = RefusalKind.BROKEN
) -> Callable[[FakeFleet, FakeLink, Generate], None]:
    """A worker that generates ``position`` tokens and then reports an error."""

    def script(fleet: FakeFleet, link: FakeLink, message: Generate) -> None:
        if position:
            fleet.say(link, message, output_of(message)[:position], 0)
        fleet.say(link, message, [], position, FinishReason.ERROR, "out of memory", refusal)

    return script


def break_at(position: int) -> Callable[[FakeFleet, FakeLink, Generate], None]:
    """A worker that generates ``position`` tokens and dies."""

    def script(fleet: FakeFleet, link: FakeLink, message: Generate) -> None:
        if position:
            fleet.say(link, message, output_of(message)[:position], 0)
        fleet.break_link(link.endpoint.removeprefix("tcp://"))

    return script


def silent(fleet: FakeFleet, link: FakeLink, message: Generate) -> None:
    """Take the request and say nothing."""


class TestTheGrid:
    async def test_headers_ask_too_and_the_record_says_so(self) -> None:
        fleet = FakeFleet(aggregated())
        hints = {"headers": {"x-ttft-target-ms": "0", "x-itl-target-ms": "0"}}

        stream = await fleet.service.submit(request(hints=hints))
        await read(stream)

        record = fleet.service.decisions.get("r")
        assert record is not None
        explained = record.explanation()
        assert stream.pool == "a"
        assert stream.decision_reason == "grid-kv"
        assert explained.hints["ttft_target_ms"] == 0
        assert explained.placements[0].selection["axes"][1]["source"] == "x-ttft-target-ms"
        assert (explained.outcome, explained.output_tokens) == ("length", 6)

    @pytest.mark.parametrize(
        ("headers", "priority", "pool"),
        [
            ({}, 5, "c"),
            ({"x-dynamo-request-priority": "50"}, 5, "a"),
            ({"x-dynamo-request-priority": "5"}, 50, "c"),
            ({"x-dynamo-request-priority": "soon"}, 50, "a"),
            ({"x-dynamo-request-priority": "9999999999"}, 50, "a"),
        ],
    )
    async def test_priority_header_wins_over_the_body(self, headers: dict[str, str], priority: int, pool: str) -> None:
        override = {"min_priority": 10, "max_priority": 100, "target_pool": "a"}
        fleet = FakeFleet(changed(aggregated(), ("aggregated", "priority_overrides"), [override]))
        slow = targets(2000, 100, priority=priority)

        assert (await answer(fleet, hints={**slow, "headers": headers}))[2] == pool

    @pytest.mark.parametrize(
        ("hints", "field"),
        [
            (targets(-1), "nvext.router.ttft_target"),
            ({"nvext": {"router": "fast"}}, "nvext.router"),
            ({"headers": {"x-itl-target-ms": "soon"}}, "x-itl-target-ms"),
        ],
    )
    async def test_a_bad_hint_is_a_400_that_names_the_field(self, hints: dict[str, Any], field: str) -> None:
        fleet = FakeFleet(aggregated())

        with pytest.raises(Refused) as refused:
            await fleet.service.submit(request(hints=hints))

        assert (refused.value.status, refused.value.param) == (400, field)
        fleet.assert_nothing_is_left()

    async def test_the_pool_is_asked_with_the_hashes_of_whole_blocks_and_no_tokens(self) -> None:
        fleet = FakeFleet(aggregated())
        await answer(fleet, isl=40, hints=targets(0, 0))

        select = fleet.pool("a").selects[0]
        assert (select.isl, select.stage, select.model) == (40, Stage.WHOLE, "m")
        assert len(unpack_hashes(select.sequence_hashes)) == 2

    async def test_uncached_work_is_what_counts_when_the_document_says_so(self) -> None:
        raw = changed(aggregated(), ("isl_basis",), "uncached")
        fleet = FakeFleet(raw)
        hints = targets(100, 15)
        _, _, cold = await answer(fleet, isl=1500, hints=hints)
        fleet.pool("b").overlap_blocks = 80
        _, _, warm = await answer(fleet, request_id="r2", isl=1500, hints=hints)
        fleet.pool("b").lost = True
        fleet.pool("b").overlap_blocks = 0
        _, _, unknown = await answer(fleet, request_id="r3", isl=1500, hints=hints)

        assert (cold, warm, unknown) == ("a", "b", "a")
        record = fleet.service.decisions.get("r3")
        assert record is not None
        assert "not known" in record.notes[0]

    async def test_the_expected_output_is_learned(self) -> None:
        raw = changed(aggregated(), ("output_length",), {"default_tokens": 1, "learn_after_requests": 2})
        fleet = FakeFleet(raw)
        for number in range(3):
            await answer(fleet, request_id=f"r{number}", max_tokens=6)

        first, last = fleet.service.decisions.get("r0"), fleet.service.decisions.get("r2")
        assert first is not None
        assert last is not None
        assert (first.expected.tokens, last.expected.tokens) == (1, 6)


class TestPoolsThatCannotBeUsed:
    @pytest.mark.parametrize(
        ("break_pool", "state"),
        [
            (lambda pool: setattr(pool, "status", None), "down"),
            (lambda pool: setattr(pool, "lost", True), "down"),
            (lambda pool: setattr(pool, "status", status(workers_of(Role.AGGREGATED, 2, 16))), "saturated"),
            (lambda pool: setattr(pool, "refuse", BUSY), "saturated"),
            (lambda pool: setattr(pool, "refuse", NO_WORKER), "down"),
            (lambda pool: setattr(pool, "refuse", LEAVING), "draining"),
            (lambda pool: setattr(pool, "status", status(workers_of(Role.AGGREGATED, 0, 0, 1))), "draining"),
            (lambda pool: setattr(pool, "status", status(workers_of(Role.AGGREGATED), model="other")), "down"),
        ],
        ids=[
            "no status",
            "lost when asked",
            "full",
            "busy when asked",
            "no worker",
            "leaving",
            "draining",
            "other model",
        ],
    )
    async def test_the_next_in_order_serves_and_it_shows(self, break_pool: Callable[[Any], None], state: str) -> None:
        fleet = FakeFleet(aggregated())
        break_pool(fleet.pool("b"))

        stream = await fleet.service.submit(request(hints=targets(100, 15)))
        tokens, last = await read(stream)

        assert (tokens, last.finish_reason, stream.pool) == (right_answer(), "length", "a")
        assert stream.decision_reason.startswith("fallback")
        record = fleet.service.decisions.get("r")
        assert record is not None
        passed = record.explanation().placements[0].fallback["passed_over"]
        assert passed == [{"pool": "b", "state": state}]
        assert fleet.count("poolgrid_global_router_passed_over_total", pool="b", state=state) == 1
        fleet.assert_nothing_is_left()

    async def test_when_every_pool_is_full_the_client_may_come_back(self) -> None:
        fleet = FakeFleet(aggregated(), max_queue_requests=0)
        for name in "abc":
            fleet.pool(name).refuse = BUSY

        with pytest.raises(Refused) as refused:
            await fleet.service.submit(request())

        assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "busy", 3.0)
        fleet.assert_nothing_is_left()

    async def test_when_every_pool_is_down_it_is_a_503_that_names_them(self) -> None:
        fleet = FakeFleet(aggregated())
        for name in "abc":
            fleet.pool(name).status = None

        with pytest.raises(Refused, match="c is down, b is down, a is down") as refused:
            await fleet.service.submit(request())

        assert refused.value.status == 503
        assert fleet.service.view.missing() == "no aggregated pool is up"

    async def test_a_worker_out_of_reach_is_excluded_and_its_reservation_released(self) -> None:
        fleet = FakeFleet(aggregated())
        fleet.links.out_of_reach = {"a-0", "a-1", "b-0"}

        tokens, _, pool = await answer(fleet, hints=targets(0, 0))

        assert (tokens, pool) == (right_answer(), "b")
        assert [len(select.excluded) for select in fleet.pool("a").selects] == [0, 1, 2]
        fleet.assert_nothing_is_left()

    async def test_requests_that_a_pool_cannot_serve_do_not_open_its_breaker(self) -> None:
        fleet = FakeFleet(changed(aggregated(), ("circuit_breaker",), {"failures_to_open": 1}))
        for refusal in (NO_WORKER, BUSY, LEAVING):
            fleet.pool("a").refuse = refusal
            assert (await answer(fleet, hints=targets(0, 0)))[2] == "b"
        fleet.pool("a").refuse = None

        assert (await answer(fleet, hints=targets(0, 0)))[2] == "a"
        assert fleet.pool("a").breaker_steps == []

    async def test_a_failing_pool_is_left_alone_then_probed_then_used_again(self) -> None:
        settings = {"failures_to_open": 2, "open_ms": 1000, "successes_to_close": 1}
        fleet = FakeFleet(changed(aggregated(), ("circuit_breaker",), settings))
        fleet.pool("a").lost = True
        for number in range(3):
            assert (await answer(fleet, request_id=f"r{number}", hints=targets(0, 0)))[2] == "b"
        assert len(fleet.pool("a").selects) == 2, "the open breaker keeps the third request away"
        assert fleet.service.view.pool_states()["a"].value == "breaker-open"

        fleet.pool("a").lost = False
        fleet.clock.now_ms += 1001
        assert (await answer(fleet, request_id="probe", hints=targets(0, 0)))[2] == "a"
        assert (await answer(fleet, request_id="after", hints=targets(0, 0)))[2] == "a"
        assert [step.after.value for step in fleet.pool("a").breaker_steps] == ["open", "half-open", "closed"]


class TestFailuresUnderWay:
    @pytest.mark.parametrize(("position", "pool", "how"), [(0, "b", "retry"), (1, "c", "same-pool")])
    async def test_priority_retry_goes_to_the_next_faster_pool_before_the_first_token_only(
        self, position: int, pool: str, how: str
    ) -> None:
        fleet = FakeFleet(changed(aggregated(), ("enable_priority_retry",), True))
        fleet.scripts["c-1"] = fail_at(position)

        tokens, _, served_by = await answer(fleet, hints=targets(900, 15))

        assert (tokens, served_by) == (right_answer(), pool)
        record = fleet.service.decisions.get("r")
        assert record is not None
        assert [placement.how for placement in record.placements] == ["grid", how]

    async def test_a_request_that_lost_its_worker_waits_for_a_pool_with_room(self) -> None:
        fleet = FakeFleet(aggregated())
        full = asyncio.Event()

        def die_in_a_full_fleet(_: FakeFleet, link: FakeLink, message: Generate) -> None:
            for name in "abc":
                fleet.pool(name).refuse = BUSY
            fleet.scripts.clear()
            break_at(1)(fleet, link, message)
            full.set()

        fleet.scripts["a"] = die_in_a_full_fleet
        stream = await fleet.service.submit(request(hints=targets(0, 0)))
        await full.wait()
        await asyncio.sleep(0)
        fleet.pool("c").refuse = None
        while not stream.finished:
            fleet.pools.say_news()
            await asyncio.sleep(0)

        tokens, last = await read(stream)

        assert (tokens, last.finish_reason, stream.pool) == (right_answer(), "length", "c")
        fleet.assert_nothing_is_left()

    async def test_a_hole_in_the_stream_moves_the_request_and_stops_the_worker(self) -> None:
        fleet = FakeFleet(aggregated())
        fleet.scripts["a-1"] = lambda f, link, message: f.say(link, message, [7], 2)

        tokens, _, _ = await answer(fleet, hints=targets(0, 0))

        assert tokens == right_answer()
        assert fleet.links.links["tcp://a-1"].cancelled[:1] == ["r"]
        assert fleet.count("poolgrid_global_router_stream_faults_total", kind="position") == 1

    async def test_output_for_nobody_is_answered_by_a_cancel(self) -> None:
        fleet = FakeFleet(aggregated())
        await answer(fleet, hints=targets(0, 0))
        link = fleet.links.links["tcp://a-1"]

        fleet.say(link, link.sent[0], [1], 6)

        assert link.cancelled == ["r"]


class TestClientsThatLeave:
    async def test_while_a_worker_serves_it_is_told_and_the_reservation_ends(self) -> None:
        fleet = FakeFleet(aggregated())
        fleet.default_script = silent
        stream = await fleet.service.submit(request(hints=targets(0, 0)))

        stream.cancel()

        assert fleet.links.links["tcp://a-1"].cancelled == ["r"]
        fleet.assert_nothing_is_left()

    async def test_while_the_pool_is_asked_nothing_is_dispatched(self) -> None:
        fleet = FakeFleet(aggregated())
        fleet.pool("a").answering = asyncio.Event()
        waiting = asyncio.create_task(fleet.service.submit(request(hints=targets(0, 0))))
        await until(lambda: bool(fleet.pool("a").selects))

        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        assert fleet.links.links == {}
        fleet.assert_nothing_is_left()

    async def test_while_it_is_being_moved_the_move_ends(self) -> None:
        fleet = FakeFleet(aggregated())
        fleet.scripts["a-1"] = break_at(1)
        stream = await fleet.service.submit(request(hints=targets(0, 0)))
        pool = fleet.pool("a")
        pool.answering = asyncio.Event()
        await until(lambda: len(pool.selects) == 2)

        stream.cancel()
        pool.answering.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        assert len(fleet.sent_to("a")) == 1
        fleet.assert_nothing_is_left()


def prefill(fleet: FakeFleet, link: FakeLink, message: Generate) -> None:
    assert message.stage is Stage.PREFILL
    fleet.say(link, message, output_of(message)[:1], 0, FinishReason.PREFILLED, params=b"kv")


def decode(fleet: FakeFleet, link: FakeLink, message: Generate) -> None:
    if message.stage is Stage.DECODE:
        assert message.disaggregated_params == b"kv"
    speak(fleet, link, message)


class TestDisaggregated:
    @staticmethod
    def fleet(**settings: Any) -> FakeFleet:
        fleet = FakeFleet(disagg(), **settings)
        fleet.scripts |= {"p-fast": prefill, "p-cheap": prefill, "d-fast": decode, "d-cheap": decode}
        return fleet

    async def test_a_prefill_pool_and_a_decode_pool_share_the_request(self) -> None:
        fleet = self.fleet()

        tokens, last, pool = await answer(fleet, hints=targets(900, 25))

        assert (tokens, last.finish_reason, pool) == (right_answer(), "length", "p-cheap,d-cheap")
        fleet.assert_nothing_is_left()

    async def test_without_prefill_pools_the_decode_pool_does_the_whole(self) -> None:
        fleet = self.fleet()
        fleet.pool("p-fast").status = fleet.pool("p-cheap").status = None

        tokens, _, pool = await answer(fleet, hints=targets(900, 25))

        assert (tokens, pool) == (right_answer(), "d-cheap")
        assert fleet.sent_to("d-cheap")[0].stage is Stage.WHOLE

    async def test_without_decode_pools_nothing_is_prefilled(self) -> None:
        fleet = self.fleet()
        fleet.pool("d-fast").status = fleet.pool("d-cheap").status = None

        with pytest.raises(Refused, match="d-cheap is down"):
            await fleet.service.submit(request())

        assert fleet.links.links == {}
        fleet.assert_nothing_is_left()

    async def test_a_short_prompt_may_be_prefilled_where_it_is_decoded(self) -> None:
        fleet = self.fleet(local_prefill_max_tokens=32)

        assert (await answer(fleet, isl=32, hints=targets(900, 25)))[2] == "d-cheap"
        assert (await answer(fleet, request_id="r2", isl=33, hints=targets(900, 25)))[2] == "p-cheap,d-cheap"

    async def test_decode_workers_that_take_no_whole_request_get_legs_alone(self) -> None:
        fleet = self.fleet(local_prefill_max_tokens=32)
        for name in ("d-fast", "d-cheap"):
            fleet.pool(name).status = status(workers_of(Role.DECODE, decodes_only=True))

        assert (await answer(fleet, isl=32, hints=targets(900, 25)))[2] == "p-cheap,d-cheap"
        fleet.pool("p-fast").status = fleet.pool("p-cheap").status = None
        with pytest.raises(Refused, match="p-cheap is down") as refused:
            await fleet.service.submit(request("r2"))
        assert refused.value.status == 503

    async def test_a_decode_worker_that_dies_costs_a_second_prefill_and_no_token(self) -> None:
        fleet = self.fleet()
        fleet.scripts["d-cheap-1"] = break_at(3)

        tokens, last, _ = await answer(fleet, hints=targets(900, 25))

        assert (tokens, last.finish_reason) == (right_answer(), "length")
        record = fleet.service.decisions.get("r")
        assert record is not None
        assert [each.work for each in record.placements] == ["prefill", "decode", "prefill", "decode"]
        fleet.assert_nothing_is_left()


class TestHousekeeping:
    async def test_a_reservation_that_no_worker_confirmed_is_renewed_until_output_comes(self) -> None:
        fleet = FakeFleet(aggregated())
        fleet.default_script = silent
        stream = await fleet.service.submit(request(hints=targets(0, 0)))
        pool = fleet.pool("a")

        fleet.service.tracker.renew(fleet.clock.now_ms + 10_000)
        assert pool.renewed == []
        fleet.service.tracker.renew(fleet.clock.now_ms + 16_000)
        assert [each.request_id for each in pool.renewed] == ["r"]
        link = fleet.links.links["tcp://a-1"]
        fleet.say(link, link.sent[0], [1], 0)
        fleet.service.tracker.renew(fleet.clock.now_ms + 60_000)

        assert len(pool.renewed) == 1
        stream.cancel()

    async def test_a_cell_that_misses_its_target_spills_to_the_next_faster_pool(self) -> None:
        loop = {"samples_min": 2, "spill_after_ms": 100, "step_share": 0.9, "share_max": 0.9}
        raw = changed(changed(aggregated(), ("adapt",), True), ("closed_loop",), loop)
        fleet = FakeFleet(raw)

        def late(_: FakeFleet, link: FakeLink, message: Generate) -> None:
            fleet.clock.now_ms += 900
            speak(fleet, link, message)

        fleet.scripts["c"] = late
        for number in range(4):
            await answer(fleet, request_id=f"slow{number}", hints=targets(900, 15))
        fleet.service.judge(fleet.clock.now_ms)
        fleet.clock.now_ms += 200
        fleet.service.judge(fleet.clock.now_ms)
        spilled = [await answer(fleet, request_id=f"r{number}", hints=targets(900, 15)) for number in range(20)]

        assert len(fleet.service.tracker.loop_steps) == 1
        assert sum(pool == "b" for _, _, pool in spilled) >= 14
        assert {pool for _, _, pool in spilled} <= {"b", "c"}
        assert fleet.count("poolgrid_global_router_loop_steps_total", pool="c") == 1

    async def test_the_end_of_the_process_ends_every_request(self) -> None:
        fleet = FakeFleet(aggregated())
        fleet.default_script = silent
        stream = await fleet.service.submit(request())

        fleet.service.stop()

        _, last = await read(stream)
        assert last.error == "the global router is shutting down"
        with pytest.raises(Refused, match="shutting down"):
            await fleet.service.submit(request("r2"))
        fleet.assert_nothing_is_left()


def view_of(**chats: ChatSpec) -> PoolsView:
    """Return a view of pools, in this order, whose workers were told these."""
    pools: list[Any] = [SimpleNamespace(name="away", status=None)]
    for name, chat in chats.items():
        served = ModelStatus("m", 32, "xxh3-64/1337", 4096, (), (), MediaSpec(item_bytes_max=7), chat)
        pools.append(SimpleNamespace(name=name, status=PoolStatus(1, True, (served,))))
    return PoolsView(cast(Any, SimpleNamespace(all=lambda: pools)), cast(Any, None), SystemClock())


def test_what_workers_were_told_comes_from_every_pool_and_the_first_counts(caplog: pytest.LogCaptureFixture) -> None:
    view = view_of(
        east=ChatSpec("qwen3"), quiet=ChatSpec(), west=ChatSpec("deepseek_r1", "hermes"), south=ChatSpec("qwen3")
    )
    with caplog.at_level(logging.WARNING):
        (served,) = view.models()
        assert view.models() == [served]

    assert served.chat == ChatSpec("qwen3", "hermes")
    (record,) = caplog.records
    assert record.getMessage() == (
        "pool west reports of model 'm': reasoning_parser 'deepseek_r1'; an earlier pool of the document reports "
        "'qwen3', which is used"
    )


def test_pools_whose_workers_were_told_nothing_say_nothing() -> None:
    (served,) = view_of(east=ChatSpec(), west=ChatSpec()).models()

    assert served.chat == ChatSpec()


def test_models_that_serve_tasks_alone_are_left_to_the_routers_of_their_pools() -> None:
    def served(model: str, role: Role) -> ModelStatus:
        return ModelStatus(model, 32, "xxh3-64/1337", 4096, (RoleStatus(role, 1, 0, 0, 0, 8),))

    status = PoolStatus(1, True, (served("flux", Role.IMAGE), served("m", Role.AGGREGATED)))
    pools = SimpleNamespace(all=lambda: [SimpleNamespace(name="east", status=status)])

    assert [each.name for each in PoolsView(cast(Any, pools), cast(Any, None), SystemClock()).models()] == ["m"]
