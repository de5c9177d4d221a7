"""In how many legs a request is served follows from who is there and how much is left to compute."""

from __future__ import annotations

import pytest

from poolgrid.router.core.candidates import RoutingRequest
from poolgrid.router.core.inputs import WorkerWanted
from poolgrid.router.core.kv_policy import KvAware
from poolgrid.router.core.stage_plan import DECODE_ROLES, PREFILL_ROLES, WHOLE_ROLES, first_leg
from poolgrid.wire.events import RequestStarted
from poolgrid.wire.identifiers import Role, Stage
from tests.router.fleet_builder import BLOCK_SIZE, Pool, decided, make_card, stored, worker_key


@pytest.mark.parametrize(
    ("aggregated", "prefill", "decode", "uncached", "stage", "roles", "reason"),
    [
        (True, False, False, 9999, Stage.WHOLE, WHOLE_ROLES, "aggregated"),
        (False, True, True, 257, Stage.PREFILL, PREFILL_ROLES, "disaggregated"),
        (False, True, True, 256, Stage.WHOLE, DECODE_ROLES, "local_prefill"),
        (True, True, True, 9999, Stage.PREFILL, PREFILL_ROLES, "disaggregated"),
        (False, False, True, 9999, Stage.WHOLE, DECODE_ROLES, "no_prefill_worker"),
        (True, False, True, 9999, Stage.WHOLE, WHOLE_ROLES, "aggregated"),
        (False, True, False, 9999, Stage.WHOLE, WHOLE_ROLES, "aggregated"),
        (False, False, False, 1, Stage.WHOLE, WHOLE_ROLES, "aggregated"),
    ],
)
def test_the_first_leg(
    aggregated: bool, prefill: bool, decode: bool, uncached: int, stage: Stage, roles: tuple[Role, ...], reason: str
) -> None:
    leg = first_leg(aggregated, prefill, decode, uncached, local_prefill_max_tokens=256)

    assert (leg.stage, leg.roles, leg.reason) == (stage, roles, reason)


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
