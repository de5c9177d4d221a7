"""A grid as a drawing in the terminal.

Rows and columns are labelled with their ranges in units; a cell is coloured by its pool's speed rank, from green
(fastest) to red. A grid with more cells than fit is drawn with every k-th row and column, with a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from poolgrid.kernel.pool_grids.axis import Axis, StageName
from poolgrid.kernel.pool_grids.grid_document import GridDocument, GridStage, Pool
from poolgrid.server.process.figures import percent
from poolgrid.server.process.terminal_table import Heading, TerminalTable

NAMED_COLUMNS_MAX = 10
"""Up to this many columns each has its range above it, if that fits; more are a strip of letters."""
COLUMNS_MAX = 64
ROWS_MAX = 48
LAYERS_MAX = 8

_SPEEDS = ("#2e9e4f", "#8fbf3f", "#d9c33b", "#e8963a", "#d9573b", "#a83246")
"""Fast to slow; readable with black text."""


def _colors(stage: GridStage) -> dict[str, str]:
    ranks = stage.speed_ranks()
    levels = sorted(set(ranks.values()))
    span = max(1, len(levels) - 1)
    return {pool: _SPEEDS[round(levels.index(rank) / span * (len(_SPEEDS) - 1))] for pool, rank in ranks.items()}


def _letters(stage: GridStage) -> dict[str, str]:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return {pool.name: alphabet[index % len(alphabet)] for index, pool in enumerate(stage.pools)}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _range(axis: Axis, index: int) -> str:
    low, high = axis.bounds(index)
    if axis.resolution == 1:
        return "all"
    if index == 0:
        return f"<\u00a0{_number(high)}"
    return f"≥\u00a0{_number(low)}" if index == axis.resolution - 1 else f"{_number(low)}–{_number(high)}"


def _sampled(axis: Axis, limit: int) -> range:
    return range(0, axis.resolution, -(-axis.resolution // limit))


def _title(axis: Axis) -> str:
    name = axis.name.upper() if len(axis.name) <= 4 else axis.name.replace("_", " ")
    return f"{name} ({axis.unit})"


def terminal_map(document: GridDocument, width: int = 80) -> RenderableType:
    """Return every grid of a document as tables for a terminal of ``width``, with the pools below each."""
    parts: list[RenderableType] = []
    for name, stage in document.stages.items():
        parts += [*_grid_tables(name, stage, width), _pool_table(stage), Text()]
    return Group(*parts)


def _layers(stage: GridStage) -> Iterator[tuple[tuple[int, ...], str]]:
    layers = stage.axes[:-2]
    for cell in product(*(_sampled(axis, LAYERS_MAX) for axis in layers)):
        labels = [f", {_title(axis)} {_range(axis, index)}" for axis, index in zip(layers, cell, strict=True)]
        yield cell, "".join(labels)


def _grid_tables(name: StageName, stage: GridStage, width: int) -> Iterator[RenderableType]:
    rows, columns = stage.axes[-2:]
    shown_rows, shown_columns = _sampled(rows, ROWS_MAX), _sampled(columns, COLUMNS_MAX)
    for layer, label in _layers(stage):
        yield Text(f"{name}: rows {_title(rows)}, columns {_title(columns)}{label}", style="bold")
        cells = [[stage.pool_at((*layer, row, column)) for column in shown_columns] for row in shown_rows]
        yield _grid_table(stage, cells, shown_rows, shown_columns, width)
        if shown_rows.step > 1 or shown_columns.step > 1:
            yield Text(f"shown: every {shown_rows.step}. row, every {shown_columns.step}. column")


def _grid_table(
    stage: GridStage, cells: Sequence[Sequence[str]], shown_rows: range, shown_columns: range, width: int
) -> TerminalTable:
    """Return a layer of a grid: with names of pools where they fit, with letters where columns do, else as a strip."""
    rows, columns = stage.axes[-2:]
    colors, letters = _colors(stage), _letters(stage)
    corner = Heading(f"{_title(rows)} \\ {_title(columns)}")
    if columns.resolution <= NAMED_COLUMNS_MAX:
        ranges = [Heading(_range(columns, index), numeric=False) for index in shown_columns]
        for marks in ({pool.name: pool.name for pool in stage.pools}, letters):
            table = TerminalTable([corner, *ranges])
            for row, pools in zip(shown_rows, cells, strict=True):
                named = (Text(f" {marks[pool]} ", style=f"black on {colors[pool]}") for pool in pools)
                table.add(_range(rows, row), *named)
            if table.width <= width:
                return table
    table = TerminalTable([corner, Heading(f"{_number(columns.minimum)} to {_number(columns.maximum)}", numeric=False)])
    for row, pools in zip(shown_rows, cells, strict=True):
        strip = Text.assemble(*((letters[pool], f"black on {colors[pool]}") for pool in pools))
        table.add(_range(rows, row), strip)
    return table


def _cost(pool: Pool) -> str:
    if pool.cost_per_hour is not None:
        return f"{pool.cost_per_hour:g} / h"
    return "" if pool.cost_per_million_tokens is None else f"{pool.cost_per_million_tokens:g} / M tokens"


def _pool_table(stage: GridStage) -> TerminalTable:
    count = Counter(_all_pools(stage.mapping))
    total = sum(count.values())
    colors, letters, ranks = _colors(stage), _letters(stage), stage.speed_ranks()
    overrides = Counter(override.target_pool for override in stage.priority_overrides)
    words = ("pool", "mark", "cost", "url")
    names = ("pool", "mark", "speed rank", "cost", "cells", "overrides", "url")
    table = TerminalTable([Heading(name, numeric=name not in words, optional=name == "url") for name in names])
    for pool in stage.pools:
        table.add(
            pool.name,
            Text(f" {letters[pool.name]} ", style=f"black on {colors[pool.name]}"),
            str(ranks[pool.name]),
            _cost(pool),
            f"{count[pool.name]:,} ({percent(count[pool.name] / total, 0)})",
            str(overrides[pool.name] or ""),
            pool.url or "given at start",
        )
    return table


def _all_pools(rows: Any) -> Iterator[str]:
    if isinstance(rows, str):
        yield rows
    else:
        for child in rows:
            yield from _all_pools(child)
