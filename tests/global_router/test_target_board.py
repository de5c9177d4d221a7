"""Targets met and missed as series: by pool, by cell, bounded, and forgotten with what they stand for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from poolgrid.kernel.pool_grids.closed_loop import CellKey
from poolgrid.kernel.pool_grids.destination import Served
from poolgrid.kernel.pool_grids.grid import Grid, GridRequest, Selection
from poolgrid.kernel.pool_grids.grid_document import GridDocument
from poolgrid.kernel.pool_grids.request_hints import RequestHints, Target
from poolgrid.server.global_router.metrics import LINES_MAX, TargetBoard
from tests.global_router.documents import aggregated, disagg, document

JUDGED = "poolgrid_global_router_target_judgements_total"
CELLS = "poolgrid_global_router_cell_requests_total"
CELL_JUDGED = "poolgrid_global_router_cell_judgements_total"


class Board:
    def __init__(self, made: GridDocument) -> None:
        self.grid = {str(name): each for name, each in Grid(made).stages.items()}
        self.registry = CollectorRegistry()
        self.board = TargetBoard(self.registry)

    def selection(self, stage: str, isl: int = 1, **targets: float) -> Selection:
        hints = RequestHints(targets={name: Target(value, name) for name, value in targets.items()})  # type: ignore[misc]  # names of axes
        return self.grid[stage].select(GridRequest(isl, hints))

    def judge(self, selection: Selection, target: str, latency_ms: float, revision: int = 1) -> None:
        key = CellKey.of(selection)
        assert key is not None
        self.board.judged(selection, Served(key, selection.pool), target, latency_ms, revision)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name
        }


def test_a_latency_is_judged_by_the_target_that_the_request_asked_for() -> None:
    board = Board(document(aggregated()))
    selection = board.selection("aggregated", ttft=120.0, itl=30.0)

    board.judge(selection, "ttft", 120.0)
    board.judge(selection, "ttft", 120.1)
    board.judge(selection, "itl", 29.0)

    assert board.series(JUDGED) == {
        (selection.pool, "aggregated", "ttft", "met"): 1,
        (selection.pool, "aggregated", "ttft", "missed"): 1,
        (selection.pool, "aggregated", "itl", "met"): 1,
    }
    assert sum(board.series(CELL_JUDGED).values()) == 3


def test_a_stage_is_not_judged_by_a_target_that_its_grid_does_not_have() -> None:
    board = Board(document(disagg()))

    board.judge(board.selection("decode"), "ttft", 1.0)

    assert board.series(JUDGED) == board.series(CELL_JUDGED) == {}


def test_a_grid_of_many_cells_has_few_series() -> None:
    raw = aggregated()
    stage = raw["aggregated"]
    fine = 100
    for key in ("isl_min", "isl_max", "isl_resolution"):
        del stage[key]
    stage |= {"ttft_resolution": fine, "itl_resolution": fine, "mapping": [["a"] * fine] * fine}
    board = Board(document({**raw, "accept": ["unreachable-pool", "slower-pool-for-faster-target"]}))
    axes = board.grid["aggregated"].axes[-2:]

    for row in range(fine):
        for column in range(0, fine, 9):
            middles = [axis.cell_middle(index) for axis, index in zip(axes, (row, column), strict=True)]
            board.board.placed(board.selection("aggregated", ttft=middles[0], itl=middles[1]), "a", 1)

    cells = board.series(CELLS)
    assert len({labels[1] for labels in cells}) == len({labels[2] for labels in cells}) == LINES_MAX
    assert sum(cells.values()) == fine * len(range(0, fine, 9))


def test_a_new_revision_begins_its_cells_anew_and_a_late_request_of_the_old_one_is_left_out() -> None:
    board = Board(document(aggregated()))
    selection = board.selection("aggregated")
    board.board.placed(selection, "a", 1)
    board.judge(selection, "ttft", 1.0)

    board.board.placed(selection, "a", 2)
    board.judge(selection, "ttft", 1.0, revision=1)

    assert list(board.series(CELLS).values()) == [1]
    assert board.series(CELL_JUDGED) == {}
    assert sum(board.series(JUDGED).values()) == 2, "a pool stays the same pool"


def test_the_series_of_pools_that_left_the_document_end() -> None:
    board = Board(document(aggregated()))
    selection = board.selection("aggregated")
    board.board.placed(selection, selection.pool, 1)
    board.judge(selection, "ttft", 1.0)

    board.board.keep({"another"})

    assert board.series(CELLS) == board.series(JUDGED) == {}
