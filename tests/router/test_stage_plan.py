"""In how many legs a request is served follows from who is there and how much is left to compute."""

from __future__ import annotations

import pytest

from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.decision.stage_plan import (
    DECODE_ROLES,
    EITHER_ROLES,
    ONE_LEG_ROLES,
    PREFILL_ROLES,
    WHOLE_ROLES,
    Outlook,
    PromptWorker,
    RoleAvailability,
    choose_legs,
    first_leg,
    one_leg,
    two_legs,
)
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.selector import NoWorker
from poolgrid.kernel.wire.events import PrefillCompleted, RequestStarted, WorkerDraining, WorkerLeft
from poolgrid.kernel.wire.identifiers import Role, Stage
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, make_card, stored, worker_key


@pytest.mark.parametrize(
    ("aggregated", "prefill", "decode", "always_two", "stage", "roles", "reason"),
    [
        (True, False, False, False, Stage.WHOLE, WHOLE_ROLES, "aggregated"),
        (False, True, True, False, Stage.PREFILL, EITHER_ROLES, ""),
        (True, True, True, False, Stage.PREFILL, EITHER_ROLES, ""),
        (False, True, True, True, Stage.PREFILL, PREFILL_ROLES, "disaggregated"),
        (False, False, True, True, Stage.WHOLE, ONE_LEG_ROLES, "no_prefill_worker"),
        (False, False, True, False, Stage.WHOLE, ONE_LEG_ROLES, "no_prefill_worker"),
        (True, False, True, False, Stage.WHOLE, WHOLE_ROLES, "aggregated"),
        (False, True, False, False, Stage.WHOLE, WHOLE_ROLES, "aggregated"),
        (False, False, False, False, Stage.WHOLE, WHOLE_ROLES, "aggregated"),
    ],
)
def test_the_roles_of_the_first_leg(
    aggregated: bool, prefill: bool, decode: bool, always_two: bool, stage: Stage, roles: tuple[Role, ...], reason: str
) -> None:
    leg = first_leg(RoleAvailability(aggregated, prefill, decode, whole=aggregated or decode), always_two)

    assert (leg.stage, leg.roles, leg.reason) == (stage, roles, reason)


@pytest.mark.parametrize(
    ("there", "roles", "missing"),
    [
        (RoleAvailability(decode=True), PREFILL_ROLES, "prefill"),
        (RoleAvailability(prefill=True, decode=True), EITHER_ROLES, ""),
        (RoleAvailability(prefill=True), WHOLE_ROLES, "decode"),
        (RoleAvailability(aggregated=True, decode=True, whole=True), WHOLE_ROLES, ""),
        (RoleAvailability(), WHOLE_ROLES, ""),
    ],
)
def test_where_decode_workers_take_no_whole_request_it_waits_for_the_other_side(
    there: RoleAvailability, roles: tuple[Role, ...], missing: str
) -> None:
    assert first_leg(there, always_two=False).roles == roles
    assert there.missing == missing


@pytest.mark.parametrize(
    ("decode", "prefill", "transfer_ms", "reason"),
    [
        # An idle decode worker makes nobody pause, and nothing moves.
        ((0.0, 100.0, False), (0.0, 100.0), 50.0, "local_prefill"),
        # A busy one would pause longer than a transfer takes.
        ((0.0, 100.0, True), (0.0, 100.0), 50.0, "disaggregated"),
        # A short rest is no pause worth a transfer.
        ((0.0, 5.0, True), (0.0, 5.0), 50.0, "local_prefill"),
        # A queue on the prefill side that is longer than the pause counts sends prompts to decode workers.
        ((0.0, 100.0, True), (30.0, 100.0), 50.0, "overflow"),
        ((0.0, 100.0, True), (5.0, 100.0), 50.0, "disaggregated"),
        # Prompts that overflowed before count like the queue of the prefill side.
        ((100.0, 100.0, True), (100.0, 100.0), 50.0, "disaggregated"),
        (None, (9999.0, 100.0), 50.0, "disaggregated"),
        ((9999.0, 100.0, True), None, 50.0, "no_prefill_worker"),
    ],
)
def test_one_leg_or_two_by_expected_time(
    decode: tuple[float, float, bool] | None, prefill: tuple[float, float] | None, transfer_ms: float, reason: str
) -> None:
    whole = [PromptWorker(*decode)] if decode else []
    apart = [PromptWorker(*prefill, is_decoding=False)] if prefill else []

    assert choose_legs(one_leg(whole), two_legs(apart, transfer_ms)).reason == reason


def test_each_way_is_judged_by_its_best_worker() -> None:
    workers = [PromptWorker(50.0, 10.0, False), PromptWorker(0.0, 20.0, True), PromptWorker(0.0, 30.0, False)]

    assert one_leg(workers) == Outlook(0.0, 20.0, 20.0, one_leg(workers).weight)  # type: ignore[union-attr]
    assert two_legs(workers[:1], 7.0).further_ms == 7.0  # type: ignore[union-attr]
    assert one_leg([]) is None


class PoolOfTwo:
    """One prefill and one decode worker, asked for prompts of 100 blocks."""

    def __init__(self, decodes_only: bool = False) -> None:
        self.pool = Pool()
        self.pool.join("p", card=make_card(role=Role.PREFILL))
        self.pool.join("d", card=make_card(role=Role.DECODE, decodes_only=decodes_only))
        self.prefill, self.decode = worker_key("p"), worker_key("d")
        self.selector = self.pool.selector(KvAware())
        self.asked = 0

    def ask(self, path: list[int] | None = None, is_booked: bool = True, unavailable: dict | None = None) -> str:  # type: ignore[type-arg]
        self.asked += 1
        request = RoutingRequest(f"r{self.asked}", "m", 100 * BLOCK_SIZE, BLOCK_SIZE, 100, stage=Stage.PREFILL)
        wanted = WorkerWanted(request, path or [], float(self.asked), 0, unavailable or {}, roles=EITHER_ROLES)
        decision = decided(self.selector.select(wanted))
        if is_booked:
            self.selector.book(decision, wanted.path, wanted.now_ms)
        assert decision.legs is not None
        assert (decision.worker == self.prefill) == (decision.request.stage is Stage.PREFILL)
        return decision.legs.reason


def test_prompts_go_to_an_idle_decode_worker_then_to_the_prefill_worker_then_overflow_and_come_back() -> None:
    asked = PoolOfTwo()

    assert [asked.ask() for _ in range(4)] == ["local_prefill", "disaggregated", "disaggregated", "overflow"]
    for request in ("r1", "r2", "r3", "r4"):
        worker = asked.decode if request in ("r1", "r4") else asked.prefill
        asked.pool.say(worker, PrefillCompleted(request))
    assert asked.ask() == "disaggregated"


def test_what_a_decode_worker_holds_is_served_there() -> None:
    asked = PoolOfTwo()
    asked.pool.say(asked.decode, RequestStarted("other", 16, 0, 1), stored(list(range(100))))

    assert asked.ask(is_booked=False) == "disaggregated"
    assert asked.ask(list(range(100))) == "local_prefill"


@pytest.mark.parametrize("why", ["draining", "left", "unreachable"])
def test_without_a_prefill_worker_that_takes_requests_there_is_one_leg(why: str) -> None:
    asked = PoolOfTwo()
    asked.pool.say(asked.decode, RequestStarted("other", 16, 0, 1))
    assert asked.ask(is_booked=False) == "disaggregated"

    if why == "draining":
        asked.pool.say(asked.prefill, WorkerDraining())
    elif why == "left":
        asked.pool.say(asked.prefill, WorkerLeft("killed"))

    assert asked.ask(unavailable={asked.prefill: why} if why == "unreachable" else None) == "no_prefill_worker"


def test_a_decode_worker_that_takes_no_whole_request_is_never_offered_one() -> None:
    asked = PoolOfTwo(decodes_only=True)
    asked.pool.say(asked.decode, stored(list(range(100))))

    assert [asked.ask(list(range(100))) for _ in range(5)] == ["disaggregated"] * 5
    asked.pool.say(asked.prefill, WorkerLeft("killed"))
    request = RoutingRequest("r", "m", 100 * BLOCK_SIZE, BLOCK_SIZE, 100, stage=Stage.PREFILL)
    for roles in (EITHER_ROLES, ONE_LEG_ROLES):
        found = asked.selector.select(WorkerWanted(request, [], 9.0, 0, roles=roles))
        assert isinstance(found, NoWorker)
    assert asked.selector.available("m", DECODE_ROLES)


def test_the_decode_stage_counts_neither_prefill_nor_overlap() -> None:
    pool = Pool()
    for name in ("d1", "d2"):
        pool.join(name, card=make_card(role=Role.DECODE))
    d1, d2 = worker_key("d1"), worker_key("d2")
    path = list(range(10))
    pool.say(d1, stored(path), RequestStarted("busy", 0, 0, 5))
    selector = pool.selector(KvAware())
    request = RoutingRequest("r", "m", 10 * BLOCK_SIZE, BLOCK_SIZE, 10, stage=Stage.DECODE)

    decision = decided(selector.select(WorkerWanted(request, path, 0.0, 0, roles=DECODE_ROLES)))
    selector.book(decision, path, 0.0)

    assert decision.worker == d2
    assert pool.projection.ledger.prefill_tokens.sum() == 0
    assert selector.best_overlap_blocks("m", DECODE_ROLES, path) == 10
    assert selector.best_overlap_blocks("m", PREFILL_ROLES, path) == 0


def test_roles_are_never_mixed() -> None:
    pool = Pool()
    pool.join("p", card=make_card(role=Role.PREFILL))
    pool.join("d", card=make_card(role=Role.DECODE))
    selector = pool.selector(KvAware())

    assert selector.available("m", PREFILL_ROLES)
    assert not selector.available("m", PREFILL_ROLES, {worker_key("p"): "unreachable"})
    assert not selector.available("m", WHOLE_ROLES)
    assert decided(
        selector.select(WorkerWanted(RoutingRequest("r", "m", 16, 16, 1), [], 0.0, 0, roles=PREFILL_ROLES))
    ).worker == worker_key("p")
