"""The service over pools of engine servers: which pool's router gets a request, and what follows when it fails."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from poolgrid.kernel.requests.inference import OUTPUT_LIMIT, InferenceRequest, Refused, StreamDelta
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerId, WorkerKey
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, TokenDelta
from poolgrid.server.proxy.dispatch_reports import FIRST_OUTPUT
from poolgrid.server.proxy.prompt_reading import UNLIMITED
from tests.global_router.documents import aggregated, changed, disagg
from tests.global_router.fake_fleet import (
    FakeFleet,
    request,
    status,
    status_of_servers,
    targets,
    until,
    workers_of,
)

WORKER = (b"x-poolgrid-worker", b"gpu-1")
REASON = (b"x-poolgrid-decision", b"lowest_cost")


class FakeCarrier:
    """Keeps what it is ordered; a test says what becomes of each dispatch."""

    def __init__(self, fleet: FakeFleet, name: str, is_streamed: bool = True) -> None:
        self._fleet = fleet
        self._name = name
        self.is_streamed = is_streamed
        self.finish_reason: str = FinishReason.CANCELLED
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self.sent: list[tuple[str, str]] = []
        """Dispatch and pool."""
        self.withdrawn: list[str] = []
        self.last: StreamDelta | None = None
        self.is_over = asyncio.Event()

    @property
    def pools(self) -> list[str]:
        return [pool for _, pool in self.sent]

    is_prefilled = False
    prompt_tokens: int | None = None

    def can_be_split(self, kind: str) -> bool:
        raise AssertionError("pools split requests, and not the global router")

    def send(self, dispatch_id: str, worker: WorkerKey, stage: Stage, params: bytes) -> None:
        self.sent.append((dispatch_id, worker.worker_id))

    def withdraw(self, dispatch_id: str) -> None:
        self.withdrawn.append(dispatch_id)

    def ended(self, last: StreamDelta) -> None:
        self.last = last
        self.is_over.set()

    # -- what the router of the pool does ------------------------------------------------------------------------------

    def _report(self, position: int, tokens: bytes = b"", *rest: Any, **more: Any) -> None:
        self._fleet.service.on_carried(self._name, TokenDelta(self.sent[-1][0], position, tokens, *rest, **more))

    def answers(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        self._fleet.service.on_answered(self._name, status, headers)

    def begins(self) -> None:
        self.answers(200, WORKER, REASON)
        self._report(0, FIRST_OUTPUT)

    def ends(self, output_tokens: int | None = None) -> None:
        self.output_tokens = output_tokens
        self._report(1, b"", FinishReason.STOP)

    def is_refused(self, status: int = 429, *headers: tuple[bytes, bytes]) -> None:
        """Refuse it: in the router's own words, or in those of a server that ``headers`` name."""
        self.answers(status, *headers)
        self._report(0, b"", FinishReason.ERROR, error="refused", refusal=RefusalKind.BUSY, retry_after_ms=1000)

    def breaks(self) -> None:
        self._report(0, b"", FinishReason.ERROR, error="no connection", refusal=RefusalKind.BROKEN)


def fleet_of_servers(raw: dict[str, Any] | None = None, **settings: Any) -> FakeFleet:
    fleet = FakeFleet(raw or aggregated(), **settings)
    for pool in fleet.pools.all():
        fleet.pool(pool.name).say(status_of_servers())
    return fleet


async def forward(
    fleet: FakeFleet, name: str = "r", is_streamed: bool = True, **fields: Any
) -> tuple[FakeCarrier, TokenDelivery]:
    """Have a request placed."""
    carrier = FakeCarrier(fleet, name, is_streamed)
    return carrier, await fleet.service.submit(carried(carrier, name, **fields))


def carried(carrier: FakeCarrier, name: str = "r", only_worker: str = "", **fields: Any) -> InferenceRequest:
    made = request(name, max_tokens=UNLIMITED.max_tokens, **fields)
    made.carrier, made.only_worker = carrier, only_worker
    return made


A, C = targets(0, 0), targets(1000, 20)
"""Hints of short requests that the document sends to these pools."""


def is_at(carrier: FakeCarrier, pool: str) -> bool:
    return carrier.pools[-1] == pool


class TestChoice:
    @pytest.mark.parametrize(("hints", "pool"), [(A, "a"), (targets(0, 20), "b"), (C, "c")])
    async def test_the_grid_names_the_pool_and_its_router_says_which_server(
        self, hints: dict[str, Any], pool: str
    ) -> None:
        fleet = fleet_of_servers()
        carrier, stream = await forward(fleet, hints=hints)

        assert carrier.pools == [pool]
        assert (stream.pool, stream.worker, stream.decision_reason) == (pool, pool, "grid")
        carrier.begins()
        assert (stream.worker, stream.decision_reason) == ("gpu-1", "grid-lowest_cost")
        carrier.ends(12)
        record = fleet.service.decisions.get("r")
        assert record is not None
        (placed,) = record.placements
        assert (placed.pool, placed.worker, placed.pool_reason, placed.how) == (pool, "gpu-1", "lowest_cost", "grid")
        assert (record.outcome, record.output_tokens) == ("stop", 12)
        assert not fleet.pool(pool).selects
        fleet.assert_nothing_is_left()

    async def test_a_pool_that_is_down_or_full_is_passed_over(self) -> None:
        fleet = fleet_of_servers()
        fleet.pool("a").say(None)
        fleet.pool("b").say(status_of_servers(16, 16))

        carrier, stream = await forward(fleet, hints=A)

        assert carrier.pools == ["c"]
        assert stream.decision_reason == "fallback"

    async def test_what_a_pool_keeps_is_asked_of_that_pool_alone(self) -> None:
        fleet = fleet_of_servers()
        carrier, _ = await forward(fleet, hints=A, only_worker="c")
        assert carrier.pools == ["c"]

        fleet.pool("c").say(None)
        with pytest.raises(Refused, match="c is down"):
            await forward(fleet, "r2", hints=A, only_worker="c")

    async def test_a_prefill_pool_does_all_of_it_and_decode_pools_stand_in(self) -> None:
        fleet = fleet_of_servers(disagg())
        short, long = targets(1000, 30), targets(0, 0)

        assert (await forward(fleet, "r1", isl=100, hints=short))[0].pools == ["p-cheap"]
        assert (await forward(fleet, "r2", isl=1500, hints=long))[0].pools == ["p-fast"]
        for name in ("p-fast", "p-cheap"):
            fleet.pool(name).say(status_of_servers(16, 16))
        assert (await forward(fleet, "r3", isl=100, hints=short))[0].pools == ["d-cheap"]
        assert (await forward(fleet, "r4", isl=100, hints=long))[0].pools == ["d-fast"]
        record = fleet.service.decisions.get("r4")
        assert record is not None
        assert "p-fast is saturated" in record.notes[0]
        assert record.placements[0].stage == "decode"

    async def test_one_that_waits_for_both_stages_goes_where_there_is_room_first(self) -> None:
        fleet = fleet_of_servers(disagg())
        for pool in fleet.pools.all():
            fleet.pool(pool.name).say(status_of_servers(16, 16))
        carrier = FakeCarrier(fleet, "r")
        waiting = asyncio.create_task(fleet.service.submit(carried(carrier)))
        await until(lambda: len(fleet.service.queue) == 1)

        fleet.pool("d-cheap").say(status_of_servers(15, 16))

        await waiting
        assert carrier.pools == ["d-cheap"]

    async def test_text_is_never_compared_with_the_hashes_of_tokens(self) -> None:
        fleet = fleet_of_servers(changed(aggregated(), ("isl_basis",), "uncached"))
        await forward(fleet, "r1", isl=64)
        assert all(len(fleet.pool(name).probes) == 1 for name in "abc")

        await forward(fleet, "r2", isl=64, by_text=True)
        assert all(len(fleet.pool(name).probes) == 1 for name in "abc")

    async def test_the_length_of_answers_is_learnt_as_servers_count_it(self) -> None:
        fleet = fleet_of_servers(changed(aggregated(), ("output_length",), {"learn_after_requests": 2}))
        for number in range(2):
            carrier, _ = await forward(fleet, f"r{number}")
            carrier.begins()
            carrier.ends(40)

        await forward(fleet, "free")
        await forward(fleet, "bounded", hints={OUTPUT_LIMIT: 7})
        expected = [fleet.service.decisions.get(name) for name in ("free", "bounded")]
        assert [None if each is None else each.expected.tokens for each in expected] == [40, 7]


class TestRoom:
    async def test_no_more_are_sent_than_a_pool_had_room_for_when_it_reported(self) -> None:
        fleet = fleet_of_servers()
        fleet.pool("a").say(status_of_servers(13, 16))

        pools = [(await forward(fleet, f"r{number}", hints=A))[0].pools[0] for number in range(5)]

        assert pools == ["a", "a", "a", "b", "b"]
        fleet.pool("a").say(status_of_servers(15, 16))
        assert (await forward(fleet, "r5", hints=A))[0].pools == ["a"]

    async def test_the_end_of_a_request_makes_room_before_the_next_report(self) -> None:
        fleet = fleet_of_servers()
        fleet.pool("a").say(status_of_servers(15, 16))
        carrier, _ = await forward(fleet, "r1", hints=A)
        carrier.begins()
        assert (await forward(fleet, "r2", hints=A))[0].pools == ["b"]

        carrier.ends()

        assert (await forward(fleet, "r3", hints=A))[0].pools == ["a"]

    async def test_a_pool_that_is_full_after_all_gets_it_again_once_it_reports_room(self) -> None:
        fleet = fleet_of_servers(changed(aggregated(), ("aggregated", "fallback"), {"rule": "none"}))
        carrier, _ = await forward(fleet, hints=A)
        other, _ = await forward(fleet, "other", hints=A)

        carrier.is_refused()
        await until(lambda: len(fleet.service.queue) == 1)
        await asyncio.sleep(0)
        assert carrier.pools == ["a"]
        fleet.pool("a").say(status_of_servers(3, 16))
        await until(lambda: len(carrier.sent) == 2)
        assert carrier.pools == ["a", "a"]

        carrier.is_refused()
        await until(lambda: len(fleet.service.queue) == 1)
        other.begins()
        other.ends()  # which makes room without a report
        await until(lambda: len(carrier.sent) == 3)
        carrier.begins()
        carrier.ends()
        assert fleet.pool("a").breaker.state.value == "closed"
        fleet.assert_nothing_is_left()

    async def test_one_that_found_no_room_in_time_ends_with_the_time_to_come_back(self) -> None:
        fleet = fleet_of_servers(queue_timeout_ms=30)
        carrier, _ = await forward(fleet, hints=A)
        for name in "bc":
            fleet.pool(name).say(status_of_servers(16, 16))

        carrier.is_refused()
        await until(lambda: len(fleet.service.queue) == 1)
        fleet.clock.now_ms += 31
        await asyncio.wait_for(carrier.is_over.wait(), 120)

        assert carrier.last is not None
        assert carrier.last.retry_after_s is not None
        fleet.assert_nothing_is_left()

    @pytest.mark.parametrize(("code", "headers"), [(429, (WORKER,)), (503, (WORKER,)), (503, ())])
    async def test_a_pool_of_which_no_server_takes_it_gets_it_once(
        self, code: int, headers: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        fleet = fleet_of_servers()
        carrier, _ = await forward(fleet, hints=A)

        for expected in ("a", "b", "c"):
            await until(partial(is_at, carrier, expected))
            carrier.is_refused(code, *headers)
        await until(lambda: carrier.last is not None)

        assert carrier.pools == ["a", "b", "c"]
        assert all(fleet.pool(name).breaker.state.value == "closed" for name in "abc")
        fleet.assert_nothing_is_left()


class TestFailures:
    async def test_a_router_that_does_not_answer_moves_it_and_opens_the_breaker(self) -> None:
        fleet = fleet_of_servers()
        for number in range(5):
            carrier, _ = await forward(fleet, f"r{number}", hints=A)
            assert carrier.pools == ["a"]
            carrier.breaks()
            await until(partial(is_at, carrier, "b"))
            assert carrier.pools == ["a", "b"]
            carrier.begins()
            carrier.ends()

        assert fleet.pool("a").breaker.state.value == "open"
        assert (await forward(fleet, "last", hints=A))[0].pools == ["b"]
        assert fleet.count("poolgrid_global_router_moves_total", cause="before_output") == 5

    async def test_one_that_breaks_every_pool_ends_at_once(self) -> None:
        fleet = fleet_of_servers(changed(aggregated(), ("aggregated", "fallback"), {"rule": "none"}))
        carrier, _ = await forward(fleet, hints=A)

        carrier.breaks()
        await until(lambda: carrier.last is not None)

        assert carrier.pools == ["a"]
        assert carrier.last is not None
        assert "a is down" in (carrier.last.error or "")
        fleet.assert_nothing_is_left()

    async def test_a_client_that_leaves_takes_its_request_off_the_pool(self) -> None:
        fleet = fleet_of_servers()
        carrier, stream = await forward(fleet, hints=A)

        stream.cancel()

        assert carrier.withdrawn == [carrier.sent[0][0]]
        fleet.assert_nothing_is_left()

    async def test_requests_are_not_renewed_at_pools_that_reserved_nothing(self) -> None:
        fleet = fleet_of_servers()
        await forward(fleet, hints=A)
        fleet.clock.now_ms += 60_000

        fleet.service.tracker.renew(fleet.clock.monotonic_ms())

        assert not fleet.pool("a").renewed


class TestView:
    def test_one_pool_of_servers_makes_a_fleet_forward_and_its_loss_does_not_end_that(self) -> None:
        fleet = FakeFleet(aggregated())
        assert not fleet.service.forwards("")

        fleet.pool("b").say(status_of_servers())
        assert fleet.service.forwards("")
        fleet.pool("b").say(None)
        assert fleet.service.forwards("")
        fleet.pool("b").say(status(workers_of(Role.AGGREGATED)))
        assert not fleet.service.forwards("")

    async def test_requests_that_are_no_work_go_to_pools_that_take_requests_first(self) -> None:
        fleet = fleet_of_servers()
        fleet.pool("a").say(None)
        fleet.pool("b").say(status(workers_of(Role.AGGREGATED, ready=0, draining=2)))
        await forward(fleet, hints=C)

        assert [(place.worker, place.is_router) for place in fleet.service.places("")] == [
            (WorkerKey(WorkerId("c")), True),
            (WorkerKey(WorkerId("b")), True),
        ]

    @pytest.mark.parametrize(("kind", "shown"), [("vllm", "vllm"), ("openai", "openai"), ("", "poolgrid")])
    def test_a_pools_router_is_of_the_kind_of_its_servers(self, kind: str, shown: str) -> None:
        fleet = FakeFleet(aggregated())
        fleet.pool("a").say(status_of_servers(kind=kind))

        place = fleet.service.place_of(WorkerKey(WorkerId("a")))

        assert place is not None
        assert place.kind == shown
        assert fleet.service.place_of(WorkerKey(WorkerId("gone"))) is None
