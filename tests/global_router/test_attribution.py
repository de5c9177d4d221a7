"""For which cell, and on which pool, a request's latencies count."""

from __future__ import annotations

from poolgrid.kernel.pool_grids.closed_loop import CellKey, ClosedLoop, Spill
from poolgrid.kernel.pool_grids.destination import Attribution, Destination, Served, destination
from poolgrid.kernel.pool_grids.grid import Grid, GridRequest
from poolgrid.kernel.pool_grids.request_hints import RequestHints
from poolgrid.kernel.wire.identifiers import Stage
from tests.global_router.documents import aggregated, disagg, document

DISAGG = document(disagg())


def to(stage: str, raw: dict[str, object] | None = None, priority: int | None = None) -> Destination:
    made = DISAGG if raw is None else document(raw)
    grid = {str(name): each for name, each in Grid(made).stages.items()}[stage]
    return destination(grid, ClosedLoop(made), GridRequest(1, RequestHints(priority=priority)), 0.0)


def cell(there: Destination) -> CellKey:
    assert there.cell is not None
    return there.cell


def test_a_prefill_and_its_decode_count_for_their_own_cells() -> None:
    prefill, decode, made = to("prefill"), to("decode"), Attribution()

    made.placed(prefill, "p-fast", Stage.PREFILL, is_first=True, has_moved=False)
    made.placed(decode, "d-cheap", Stage.DECODE, is_first=False, has_moved=False)

    assert made == Attribution(Served(cell(prefill), "p-fast"), Served(cell(decode), "d-cheap"))


def test_the_ttft_of_a_prefill_that_moved_to_a_decode_pool_counts_nowhere() -> None:
    prefill, decode, made = to("prefill"), to("decode"), Attribution()

    made.placed(prefill, "p-fast", Stage.PREFILL, is_first=True, has_moved=False)
    made.placed(decode, "d-cheap", Stage.WHOLE, is_first=False, has_moved=True)

    assert made == Attribution()


def test_a_prompt_that_a_decode_pool_computes_says_nothing_of_a_prefill_cell() -> None:
    decode, made = to("decode"), Attribution()
    loop = ClosedLoop(document({**disagg(), "adapt": True, "closed_loop": {"samples_min": 1, "spill_after_ms": 1}}))

    made.placed(decode, "d-cheap", Stage.WHOLE, is_first=True, has_moved=False)
    assert made.ttft is not None
    for now in (0, 1, 2):
        loop.observe(made.ttft.cell, "ttft", 99_999, now, made.ttft.pool)

    assert loop.evaluate(3) == loop.evaluate(10) == []


def test_a_spilled_request_counts_for_its_cell_on_the_pool_that_served_it() -> None:
    plain = to("aggregated", aggregated())
    there, made = Destination(plain.stage, plain.selection, Spill("a", 0.5)), Attribution()

    made.placed(there, "a", Stage.WHOLE, is_first=True, has_moved=False)

    assert made == Attribution(Served(cell(plain), "a"), Served(cell(plain), "a"))
    assert cell(plain).pool != "a"


def test_after_a_move_nothing_counts() -> None:
    there, made = to("aggregated", aggregated()), Attribution()
    made.placed(there, "a", Stage.WHOLE, is_first=True, has_moved=False)

    made.placed(there, "b", Stage.WHOLE, is_first=False, has_moved=True)

    assert made == Attribution()


def test_an_encode_leg_changes_nothing() -> None:
    there, made = to("aggregated", aggregated()), Attribution()

    made.placed(there, "b", Stage.ENCODE, is_first=True, has_moved=False)
    assert made == Attribution()
    made.placed(there, "a", Stage.WHOLE, is_first=True, has_moved=False)

    assert made.ttft == made.itl == Served(cell(there), "a")
