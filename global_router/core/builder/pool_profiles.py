"""How fast pools are and what they cost, as tables: what a grid is built from.

A table gives milliseconds over a length and a load, measured or simulated. Load is any number that means the same for
every pool of the document, such as requests per second for the whole pool. Between points values are interpolated on
straight lines; beyond the last length the last slope goes on (and the evidence says so), before the first the first
value stays. A load above what was measured is refused: latencies do not grow on straight lines there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from poolgrid.global_router.core.document.axis import (
    STAGES,
    STAGES_OF_MODE,
    TARGETS,
    AxisKind,
    Mode,
    StageName,
    axes_of,
)
from poolgrid.global_router.core.document.grid_document import (
    CELLS_MAX,
    COST_MAX,
    POOLS_MAX,
    TARGET_MS_MAX,
    DocumentModel,
    PoolName,
    PoolSimulation,
    PoolUrl,
    Resolution,
    TargetMs,
    Tokens,
)
from poolgrid.global_router.core.document.problems import (
    GridDocumentError,
    JsonPath,
    Problem,
    is_finite_number,
    is_integer,
    path_text,
    read_json,
    value_text,
)
from poolgrid.global_router.core.document.reader import validate_model

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
        """Return the latencies of one kind of target."""
        table = getattr(self, target.name)
        assert table is None or isinstance(table, LatencyTable)
        return table

    @property
    def cost(self) -> float:
        """Return the pool's cost, of whichever kind the profiles give."""
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
    typical_osl: Tokens | None = Field(None, description="Output tokens beside the ISL, for an aggregated grid's ITL.")


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
    problems += found + _check(value)
    if problems or profiles is None:
        raise GridDocumentError(tuple(dict.fromkeys(problems)), (), source)
    return profiles


def _check(raw: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    mode = raw.get("mode", "disagg")
    stages = STAGES_OF_MODE.get(mode, ()) if isinstance(mode, str) else ()
    for stage in stages:
        if isinstance(raw.get(stage), dict):
            problems += _check_wanted(stage, raw[stage])
        elif raw.get(stage) is None:
            problems.append(Problem((stage,), f'is missing; mode "{mode}" needs it'))
    pools = raw.get("pools")
    entries = pools if isinstance(pools, list) else []
    names: dict[str, int] = {}
    kinds: dict[str, tuple[str, int]] = {}
    for index, pool in enumerate(entries):
        if isinstance(pool, dict):
            problems += _check_pool(pool, ("pools", index), raw.get("load"), stages, names, kinds)
    present = {pool.get("stage") for pool in entries if isinstance(pool, dict) and isinstance(pool.get("stage"), str)}
    problems += [Problem(("pools",), f"has no pool of stage {stage}") for stage in stages if stage not in present]
    return problems


def _check_wanted(stage: StageName, raw: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    axes = axes_of(stage)
    left_out = [
        axis.name
        for axis in axes
        if axis.stages[stage] == "optional" and all(raw.get(key) is None for key in axis.keys)
    ]
    cells = 1
    for axis in axes:
        keys = axis.keys
        if axis.name in left_out:
            continue
        problems += [Problem((stage, key), "is missing") for key in keys if raw.get(key) is None]
        low, high, resolution = (raw.get(key) for key in keys)
        if is_finite_number(low) and is_finite_number(high) and low >= high:
            problems.append(Problem((stage, keys[0]), f"is {value_text(low)}, must be less than {value_text(high)}"))
        cells *= resolution if is_integer(resolution) and resolution > 0 else 1
    if cells > CELLS_MAX:
        problems.append(Problem((stage,), f"has {cells} cells, allowed are at most {CELLS_MAX}"))
    allowed = {key for axis in axes for key in axis.keys}
    if stage == "aggregated":
        allowed |= {"typical_isl", "typical_osl"}
        if "isl" in left_out and raw.get("typical_isl") is None:
            problems.append(Problem((stage, "typical_isl"), "is missing; a grid without an isl axis needs it"))
    for key in raw:
        if key in WantedGrid.model_fields and key not in allowed and raw[key] is not None:
            problems.append(Problem((stage, key), f"is no axis of a grid of stage {stage}"))
    return problems


def _check_pool(
    pool: dict[str, Any],
    path: JsonPath,
    load: Any,
    stages: tuple[str, ...],
    names: dict[str, int],
    kinds: dict[str, tuple[str, int]],
) -> list[Problem]:
    problems: list[Problem] = []
    index = path[-1]
    assert isinstance(index, int)
    name = pool.get("name")
    if isinstance(name, str) and names.setdefault(name, index) != index:
        problems.append(Problem((*path, "name"), f"is {value_text(name)} as in $.pools[{names[name]}]"))
    stage = pool.get("stage")
    if isinstance(stage, str) and stages and stage in STAGES and stage not in stages:
        problems.append(Problem((*path, "stage"), f"is {value_text(stage)}, which the mode does not have"))
    for target in TARGETS:
        metric, table = target.name, pool.get(target.name)
        if table is None and isinstance(stage, str) and stage in target.stages:
            problems.append(Problem((*path, metric), f"is missing; a pool of stage {stage} needs it"))
        elif isinstance(table, dict):
            problems += _check_table(table, (*path, metric), load)
    given = [key for key in ("cost_per_hour", "cost_per_million_tokens") if pool.get(key) is not None]
    if len(given) != 1:
        both = "stands beside cost_per_hour; give one of the two"
        text = both if given else "is missing; a pool needs a cost (or cost_per_million_tokens)"
        problems.append(Problem((*path, "cost_per_million_tokens" if given else "cost_per_hour"), text))
    elif isinstance(stage, str):
        kind, first = kinds.setdefault(stage, (given[0], index))
        if kind != given[0]:
            other = path_text(("pools", first, kind))
            problems.append(Problem((*path, given[0]), f"cannot be compared with {other}; give all pools one kind"))
    return problems


def _check_table(table: dict[str, Any], path: JsonPath, load: Any) -> list[Problem]:
    problems: list[Problem] = []
    lengths: dict[str, int | None] = {}
    for key in ("tokens", "load"):
        points = table.get(key)
        lengths[key] = len(points) if isinstance(points, list) else None
        if not isinstance(points, list):
            continue
        for index, (before, after) in enumerate(pairwise(points), start=1):
            if is_finite_number(before) and is_finite_number(after) and after <= before:
                text = f"is {value_text(after)} after {value_text(before)}, they must increase"
                problems.append(Problem((*path, key, index), text))
    rows = table.get("ms")
    if isinstance(rows, list):
        if lengths["tokens"] is not None and len(rows) != lengths["tokens"]:
            problems.append(Problem((*path, "ms"), f"has {len(rows)} rows, tokens has {lengths['tokens']} values"))
        for index, row in enumerate(rows):
            if isinstance(row, list) and lengths["load"] is not None and len(row) != lengths["load"]:
                text = f"has {len(row)} columns, load has {lengths['load']} values"
                problems.append(Problem((*path, "ms", index), text))
    loads = table.get("load")
    last = loads[-1] if isinstance(loads, list) and loads else None
    if is_finite_number(load) and is_finite_number(last) and load > last:
        text = f"ends at load {value_text(last)}, the grid is wanted at {value_text(load)}: measure up to there"
        problems.append(Problem((*path, "load"), text))
    return problems
