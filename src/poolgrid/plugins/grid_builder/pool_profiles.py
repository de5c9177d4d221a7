"""How fast pools are and what they cost, as tables: what a grid is built from.

A table gives milliseconds over a length and a load, measured or simulated. Load is any number that means the same for
every pool of the document, such as requests per second for the whole pool. Between points values are interpolated on
straight lines; beyond the last length the last slope continues (and the evidence notes it), before the first the first
value stays. A load above what was measured is refused: latencies do not grow on straight lines there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from poolgrid.kernel.pool_grids.axis import (
    STAGES_OF_MODE,
    TARGETS,
    AxisKind,
    Mode,
    StageName,
    axes_of,
)
from poolgrid.kernel.pool_grids.grid_document import (
    CELLS_MAX,
    COST_MAX,
    POOLS_MAX,
    TARGET_MS_MAX,
    DocumentModel,
    GridDocumentError,
    JsonPath,
    PoolName,
    PoolSimulation,
    PoolUrl,
    Problem,
    Resolution,
    TargetMs,
    Tokens,
    path_text,
    read_json,
    value_text,
)
from poolgrid.server.global_router.document.reader import frozen, sound_part, validate_model

POINTS_MAX = 1024
"""Points along one side of a table."""

Points = Annotated[tuple[Annotated[float, Field(ge=0.0, le=1e12)], ...], Field(min_length=1, max_length=POINTS_MAX)]
Latencies = Annotated[
    tuple[Annotated[float, Field(ge=0.0, le=TARGET_MS_MAX)], ...], Field(min_length=1, max_length=POINTS_MAX)
]


class LatencyTable(DocumentModel):
    """Milliseconds over a length (rows) and a load (columns)."""

    tokens: Points = Field(description="Lengths of the rows, increasing: ISL for ttft, context length for itl.")
    load: Points = Field(description="Loads of the columns, increasing.")
    ms: Annotated[tuple[Latencies, ...], Field(min_length=1, max_length=POINTS_MAX)]

    def at(self, tokens: float, load: float) -> tuple[float, bool]:
        """Return the latency at a length and a load, and whether it lies beyond the last length."""
        column = [float(np.interp(load, self.load, row)) for row in self.ms]
        beyond = tokens > self.tokens[-1]
        if beyond and len(column) > 1:
            slope = (column[-1] - column[-2]) / (self.tokens[-1] - self.tokens[-2])
            return max(0.0, column[-1] + slope * (tokens - self.tokens[-1])), True
        return float(np.interp(tokens, self.tokens, column)), beyond


class PoolProfile(DocumentModel):
    """One pool: its cost, and its TTFT or ITL or both."""

    stage: StageName
    name: PoolName
    url: PoolUrl | None = None
    cost_per_hour: float | None = Field(None, ge=0.0, le=COST_MAX)
    cost_per_million_tokens: float | None = Field(None, ge=0.0, le=COST_MAX)
    ttft: LatencyTable | None = Field(None, description="TTFT over ISL and load; for prefill and aggregated pools.")
    itl: LatencyTable | None = Field(None, description="ITL over context length and load; decode and aggregated.")
    source: str = Field("", max_length=4096, description="Where the numbers come from; goes into the evidence.")
    simulate: PoolSimulation | None = None

    def table(self, target: AxisKind) -> LatencyTable | None:
        table = getattr(self, target.name)
        assert table is None or isinstance(table, LatencyTable)
        return table

    @property
    def cost(self) -> float:
        return self.cost_per_hour if self.cost_per_hour is not None else self.cost_per_million_tokens or 0.0


class WantedGrid(DocumentModel):
    """The axes of the grid to build; those of its stage, as in a grid document."""

    isl_min: Tokens | None = None
    isl_max: Tokens | None = None
    isl_resolution: Resolution | None = None
    context_length_min: Tokens | None = None
    context_length_max: Tokens | None = None
    context_length_resolution: Resolution | None = None
    ttft_min_ms: TargetMs | None = None
    ttft_max_ms: TargetMs | None = None
    ttft_resolution: Resolution | None = None
    itl_min_ms: TargetMs | None = None
    itl_max_ms: TargetMs | None = None
    itl_resolution: Resolution | None = None
    typical_isl: Tokens | None = Field(None, description="ISL of an aggregated grid without an isl axis.")
    typical_osl: Tokens | None = Field(
        None, description="Output tokens assumed with the ISL, for an aggregated grid's ITL."
    )


class PoolProfiles(DocumentModel):
    """The input of ``poolgrid config build``."""

    version: Literal[1] = 1
    description: str | None = Field(None, max_length=65_536)
    mode: Mode = "disagg"
    load: float = Field(ge=0.0, le=1e12, description="The load at which the grid must hold.")
    prefill: WantedGrid | None = None
    decode: WantedGrid | None = None
    aggregated: WantedGrid | None = None
    pools: Annotated[tuple[PoolProfile, ...], Field(min_length=1, max_length=3 * POOLS_MAX)]


def load_profiles(text: bytes | str, source: str = "") -> PoolProfiles:
    """Read pool profiles; raise ``GridDocumentError`` with every problem."""
    value, problems = read_json(text)
    if not isinstance(value, dict):
        if not problems:
            problems.append(Problem((), f"is {value_text(value)}, must be an object"))
        raise GridDocumentError(tuple(problems), (), source)
    value.pop("$schema", None)
    profiles, found = validate_model(PoolProfiles, value)
    problems += [*found, *_check(sound_part(frozen(value), found))]
    if problems or profiles is None:
        raise GridDocumentError(tuple(dict.fromkeys(problems)), (), source)
    return profiles


def _check(raw: dict[str, Any]) -> Iterator[Problem]:
    """Yield what no single field shows; a value that its field refuses is ``None``."""
    mode = raw.get("mode", "disagg")
    stages = STAGES_OF_MODE[mode] if mode is not None else ()
    for stage in stages:
        if stage not in raw:
            yield Problem((stage,), f'is missing; mode "{mode}" needs it')
        elif raw[stage] is not None:
            yield from _check_wanted(stage, raw[stage])
    pools = [pool or {} for pool in raw.get("pools") or ()]
    names: dict[str, int] = {}
    kinds: dict[str, tuple[str, int]] = {}
    for index, pool in enumerate(pools):
        path: JsonPath = ("pools", index)
        name = pool.get("name")
        if name is not None and names.setdefault(name, index) != index:
            yield Problem((*path, "name"), f"is {value_text(name)} as in $.pools[{names[name]}]")
        yield from _check_pool(pool, path, raw.get("load"), stages)
        given = [key for key in ("cost_per_hour", "cost_per_million_tokens") if pool.get(key) is not None]
        if pool.get("stage") is not None and len(given) == 1:
            kind, first = kinds.setdefault(pool["stage"], (given[0], index))
            if kind != given[0]:
                other = path_text(("pools", first, kind))
                yield Problem((*path, given[0]), f"cannot be compared with {other}; give all pools one kind")
    present = {pool.get("stage") for pool in pools}
    yield from (Problem(("pools",), f"has no pool of stage {stage}") for stage in stages if stage not in present)


def _check_wanted(stage: StageName, raw: dict[str, Any]) -> Iterator[Problem]:
    axes = axes_of(stage)
    left_out = [axis.name for axis in axes if axis.stages[stage] == "optional" and raw.keys().isdisjoint(axis.keys)]
    cells = 1
    for axis in axes:
        if axis.name in left_out:
            continue
        yield from (Problem((stage, key), "is missing") for key in axis.keys if key not in raw)
        low, high, resolution = (raw.get(key) for key in axis.keys)
        if low is not None and high is not None and low >= high:
            yield Problem((stage, axis.keys[0]), f"is {value_text(low)}, must be less than {value_text(high)}")
        cells *= resolution or 1
    if cells > CELLS_MAX:
        yield Problem((stage,), f"has {cells} cells, allowed are at most {CELLS_MAX}")
    allowed = {key for axis in axes for key in axis.keys}
    if stage == "aggregated":
        allowed |= {"typical_isl", "typical_osl"}
        if "isl" in left_out and "typical_isl" not in raw:
            yield Problem((stage, "typical_isl"), "is missing; a grid without an isl axis needs it")
    for key in raw:
        if key in WantedGrid.model_fields and key not in allowed:
            yield Problem((stage, key), f"is no axis of a grid of stage {stage}")


def _check_pool(pool: dict[str, Any], path: JsonPath, load: Any, stages: tuple[str, ...]) -> Iterator[Problem]:
    stage = pool.get("stage")
    if stage is not None and stages and stage not in stages:
        yield Problem((*path, "stage"), f"is {value_text(stage)}, which the mode does not have")
    for target in TARGETS:
        if target.name not in pool and stage in target.stages:
            yield Problem((*path, target.name), f"is missing; a pool of stage {stage} needs it")
        elif pool.get(target.name) is not None:
            yield from _check_table(pool[target.name], (*path, target.name), load)
    given = [key for key in ("cost_per_hour", "cost_per_million_tokens") if key in pool]
    if not given:
        yield Problem((*path, "cost_per_hour"), "is missing; a pool needs a cost (or cost_per_million_tokens)")
    elif len(given) == 2:
        yield Problem((*path, given[1]), "cannot be combined with cost_per_hour; give one of the two")


def _check_table(table: dict[str, Any], path: JsonPath, load: Any) -> Iterator[Problem]:
    tokens, loads, rows = (table.get(key) for key in ("tokens", "load", "ms"))
    for key, points in (("tokens", tokens), ("load", loads)):
        for index, (before, after) in enumerate(pairwise(points or ()), start=1):
            if before is not None and after is not None and after <= before:
                text = f"is {value_text(after)} after {value_text(before)}, they must increase"
                yield Problem((*path, key, index), text)
    if rows is not None and tokens is not None and len(rows) != len(tokens):
        yield Problem((*path, "ms"), f"has {len(rows)} rows, tokens has {len(tokens)} values")
    for index, row in enumerate(rows or ()):
        if row is not None and loads is not None and len(row) != len(loads):
            yield Problem((*path, "ms", index), f"has {len(row)} columns, load has {len(loads)} values")
    last = loads[-1] if loads else None
    if load is not None and last is not None and load > last:
        text = f"ends at load {value_text(last)}, the grid is wanted at {value_text(load)}: measure up to there"
        yield Problem((*path, "load"), text)
