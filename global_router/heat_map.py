"""A grid as a picture: in the terminal with rich, as PNG with matplotlib.

Rows and columns are labelled with their ranges in units; a cell is coloured by its pool's speed rank, from green
(fastest) to red. A grid with more cells than fit is drawn with every k-th row and column, and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from poolgrid.global_router.core.document.axis import Axis, StageName
from poolgrid.global_router.core.document.grid_document import GridDocument, Pool, Stage

NAMED_COLUMNS_MAX = 10
"""Up to this many columns, if they fit, cells show their pool's name; beyond, its letter."""
HEADING_CHARS = 40
"""Room for the rows' labels."""
COLUMNS_MAX = 64
ROWS_MAX = 48
LAYERS_MAX = 8
CELL_LABELS_MAX = 400
"""More labels than this in a picture cannot be read."""

_SPEEDS = ("#2e9e4f", "#8fbf3f", "#d9c33b", "#e8963a", "#d9573b", "#a83246")
"""Fast to slow; readable with black text."""


class DrawingUnavailable(Exception):
    """matplotlib is not installed."""


def _colors(stage: Stage) -> dict[str, str]:
    ranks = stage.speed_ranks()
    levels = sorted(set(ranks.values()))
    span = max(1, len(levels) - 1)
    return {pool: _SPEEDS[round(levels.index(rank) / span * (len(_SPEEDS) - 1))] for pool, rank in ranks.items()}


def _letters(stage: Stage) -> dict[str, str]:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return {pool.name: alphabet[index % len(alphabet)] for index, pool in enumerate(stage.pools)}


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u00a0") if value >= 1000 else f"{value:.4g}"


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


def _layers(stage: Stage) -> Iterator[tuple[tuple[int, ...], str]]:
    layers = stage.axes[:-2]
    for cell in product(*(_sampled(axis, LAYERS_MAX) for axis in layers)):
        labels = [f", {_title(axis)} {_range(axis, index)}" for axis, index in zip(layers, cell, strict=True)]
        yield cell, "".join(labels)


def _grid_tables(name: StageName, stage: Stage, width: int) -> Iterator[RenderableType]:
    rows, columns = stage.axes[-2:]
    colors, letters = _colors(stage), _letters(stage)
    shown_rows, shown_columns = _sampled(rows, ROWS_MAX), _sampled(columns, COLUMNS_MAX)
    separate = columns.resolution <= NAMED_COLUMNS_MAX
    longest = max(len(pool.name) for pool in stage.pools)
    named = separate and HEADING_CHARS + columns.resolution * (longest + 5) <= width
    for layer, label in _layers(stage):
        yield Text(f"{name}: rows {_title(rows)}, columns {_title(columns)}{label}", style="bold")
        table = Table(pad_edge=False, padding=(0, 1) if separate else (0, 0))
        table.add_column(f"{_title(rows)} \\ {_title(columns)}", justify="right", no_wrap=True)
        if separate:
            for index in shown_columns:
                table.add_column(_range(columns, index), justify="center", overflow="fold")
        else:
            table.add_column(f"{_number(columns.minimum)} … {_number(columns.maximum)}", no_wrap=True)
        for row in shown_rows:
            pools = [stage.pool_at((*layer, row, column)) for column in shown_columns]
            marks = [(f" {pool if named else letters[pool]} ", f"black on {colors[pool]}") for pool in pools]
            if separate:
                cells = [Text(*mark) for mark in marks]
            else:
                cells = [Text.assemble(*((mark.strip(), style) for mark, style in marks))]
            table.add_row(_range(rows, row), *cells)
        yield table
        if shown_rows.step > 1 or shown_columns.step > 1:
            yield Text(f"shown: every {shown_rows.step}. row, every {shown_columns.step}. column")


def _cost(pool: Pool) -> str:
    if pool.cost_per_hour is not None:
        return f"{pool.cost_per_hour:g} / h"
    return "" if pool.cost_per_million_tokens is None else f"{pool.cost_per_million_tokens:g} / M tokens"


def _pool_table(stage: Stage) -> Table:
    count = Counter(_all_pools(stage.mapping))
    total = sum(count.values())
    colors, letters, ranks = _colors(stage), _letters(stage), stage.speed_ranks()
    overrides = Counter(override.target_pool for override in stage.priority_overrides)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "pool", "speed rank", "cost", "cells", "overrides", "url"):
        table.add_column(heading, justify="right" if heading in ("speed rank", "cells", "overrides") else "left")
    for pool in stage.pools:
        table.add_row(
            Text(f" {letters[pool.name]} ", style=f"black on {colors[pool.name]}"),
            Text(pool.name),
            str(ranks[pool.name]),
            _cost(pool),
            f"{count[pool.name]} ({100 * count[pool.name] / total:.0f} %)",
            str(overrides[pool.name] or ""),
            Text(pool.url or "given at start"),
        )
    return table


def _all_pools(rows: Any) -> Iterator[str]:
    if isinstance(rows, str):
        yield rows
    else:
        for child in rows:
            yield from _all_pools(child)


def save_png(document: GridDocument, path: Path) -> None:
    """Draw every grid of a document into one PNG; raise ``DrawingUnavailable`` without matplotlib, ``OSError``."""
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]

        matplotlib.use("Agg")
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise DrawingUnavailable(
            f"matplotlib cannot be imported ({error}); install it with: pip install matplotlib"
        ) from None
    pictures = [(name, stage, *layer) for name, stage in document.stages.items() for layer in _layers(stage)]
    figure, all_axes = pyplot.subplots(
        1, len(pictures), figsize=(2 + 6 * len(pictures), 5.5), squeeze=False, layout="constrained"
    )
    for (name, stage, layer, label), axes in zip(pictures, all_axes[0], strict=True):
        _draw(axes, stage, layer)
        axes.set_title(f"{name}{label}")
    try:
        figure.savefig(path, dpi=120, format="png")
    finally:
        pyplot.close(figure)


def _draw(axes: Any, stage: Stage, layer: tuple[int, ...]) -> None:
    from matplotlib.colors import ListedColormap  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.patches import Patch  # type: ignore[import-not-found,unused-ignore]

    rows, columns = stage.axes[-2:]
    order = [pool.name for pool in stage.pools]
    colors, letters = _colors(stage), _letters(stage)
    pools = [
        [stage.pool_at((*layer, row, column)) for column in range(columns.resolution)] for row in range(rows.resolution)
    ]
    axes.imshow(
        [[order.index(pool) for pool in row] for row in pools],
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([colors[pool] for pool in order]),
        vmin=-0.5,
        vmax=len(order) - 0.5,
        extent=(columns.minimum, columns.maximum, rows.minimum, rows.maximum),
    )
    axes.set_xlabel(_title(columns))
    axes.set_ylabel(_title(rows))
    named = columns.resolution <= NAMED_COLUMNS_MAX // 2
    axes.legend(
        [Patch(color=colors[pool]) for pool in order],
        [pool if named else f"{letters[pool]}  {pool}" for pool in order],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        ncols=2,
        frameon=False,
    )
    if rows.resolution * columns.resolution > CELL_LABELS_MAX:
        return
    for row, column in product(range(rows.resolution), range(columns.resolution)):
        pool = pools[row][column]
        x, y = columns.cell_middle(column), rows.cell_middle(row)
        axes.text(x, y, pool if named else letters[pool], ha="center", va="center", fontsize=7)
