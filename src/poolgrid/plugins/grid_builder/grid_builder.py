"""A grid from pool profiles: every cell gets the cheapest pool that meets its target, with the evidence.

Rules
    1. A cell stands for its middle: the middle length with the middle target (``strict``: the longest length with the
       tightest target, which every request of the cell is served by, and costs more).
    2. A pool meets a cell when its latency at that length and the stated load is at most the target; in an aggregated
       grid both its TTFT and its ITL.
    3. The cheapest pool that meets the cell gets it; among equally cheap ones the fastest, then the first. When none
       does, the fastest gets it, and the evidence has by how much it misses.
    4. Fastest: the smallest latency as a share of the target; in an aggregated grid the larger of both shares.
    5. Speed ranks follow from that share, averaged over all cells. A pool that gets no cell is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

from poolgrid.kernel.pool_grids.axis import STAGES_OF_MODE, TARGETS, Axis, axes_of
from poolgrid.kernel.pool_grids.grid_document import GridDocumentError
from poolgrid.plugins.grid_builder.pool_profiles import PoolProfile, PoolProfiles, WantedGrid, load_profiles
from poolgrid.server.global_router.document.history import document_text, json_text
from poolgrid.server.global_router.document.reader import LoadedDocument, load_document


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a pool is expected to do in a cell."""

    pool: str
    latency_ms: dict[str, float]
    worst_share: float
    """The largest latency as a share of its target; at most 1 meets the cell."""
    cost: float
    extrapolated: bool

    @property
    def meets(self) -> bool:
        return self.worst_share <= 1.0

    def evidence(self) -> dict[str, Any]:
        latencies = {f"{metric}_ms": round(value, 3) for metric, value in self.latency_ms.items()}
        return {
            "pool": self.pool,
            **latencies,
            "cost": self.cost,
            "meets": self.meets,
            **({"extrapolated": True} if self.extrapolated else {}),
        }


@dataclass(slots=True)
class BuiltGrid:
    """A document and why each of its cells is what it is."""

    loaded: LoadedDocument
    text: str
    evidence: dict[str, Any]
    cells: int = 0
    missed: int = 0
    """Cells whose target no pool meets."""
    left_out: list[str] = field(default_factory=list)


def build_from(text: bytes, source: str, strict: bool = False) -> BuiltGrid:
    """Build a grid from the text of pool profiles; raises ``GridDocumentError`` with every problem."""
    return build_grid(load_profiles(text, source), strict)


def build_grid(profiles: PoolProfiles, strict: bool = False) -> BuiltGrid:
    """Return the grid of profiles that ``load_profiles`` accepted."""
    data: dict[str, Any] = {"version": 1, "description": profiles.description, "mode": profiles.mode}
    built_stages: dict[str, Any] = {}
    cells = missed = 0
    left_out: list[str] = []
    for stage in STAGES_OF_MODE[profiles.mode]:
        wanted = getattr(profiles, stage)
        assert isinstance(wanted, WantedGrid)
        pools = [pool for pool in profiles.pools if pool.stage == stage]
        section, evidence = _build_stage(stage, wanted, pools, profiles.load, strict)
        data[stage] = section
        built_stages[stage] = evidence
        cells += len(evidence["cells"])
        missed += sum(not cell["met"] for cell in evidence["cells"])
        left_out += evidence["left_out"]
    data = {key: value for key, value in data.items() if value is not None}
    loaded = _load(data)
    evidence = {
        "load": profiles.load,
        "cell_stands_for": "longest length, tightest target" if strict else "middle length, middle target",
        "sources": {pool.name: pool.source for pool in profiles.pools if pool.source},
        "warnings": [str(warning) for warning in loaded.warnings],
        **built_stages,
    }
    return BuiltGrid(loaded, document_text(loaded.document), evidence, cells, missed, left_out)


def _load(data: dict[str, Any]) -> LoadedDocument:
    """Read the built document like any other; where curves cross, no single speed rank is right everywhere."""
    try:
        return load_document(json_text(data), "the built grid")
    except GridDocumentError as error:
        if any(problem.rule != "slower-pool-for-faster-target" for problem in error.problems):
            raise
        return load_document(json_text({**data, "accept": ["slower-pool-for-faster-target"]}), "the built grid")


def _axes(stage: str, wanted: WantedGrid) -> list[Axis]:
    axes = []
    for kind in axes_of(stage):
        low, high, resolution = (getattr(wanted, key) for key in kind.keys)
        if resolution is not None:
            axes.append(Axis(kind, low, high, resolution))
    return axes


def _build_stage(
    stage: str, wanted: WantedGrid, pools: list[PoolProfile], load: float, strict: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    axes = _axes(stage, wanted)
    chosen: dict[tuple[int, ...], str] = {}
    latencies: dict[str, list[float]] = {pool.name: [] for pool in pools}
    evidence_cells = []
    for cell in product(*(range(axis.resolution) for axis in axes)):
        point: dict[str, float] = {
            axis.name: _point(axis, index, strict) for axis, index in zip(axes, cell, strict=True)
        }
        predictions = [_predict(pool, point, wanted, load) for pool in pools]
        for prediction in predictions:
            latencies[prediction.pool].append(prediction.worst_share)
        meeting = [prediction for prediction in predictions if prediction.meets]
        if meeting:
            best = min(meeting, key=lambda prediction: (prediction.cost, prediction.worst_share))
            why = f"cheapest of {len(meeting)} that meet the target"
        else:
            best = min(predictions, key=lambda prediction: prediction.worst_share)
            why = f"none meets the target; fastest, at {best.worst_share:.2f} of it"
        chosen[cell] = best.pool
        evidence_cells.append(
            {
                "cell": list(cell),
                "at": {name: round(value, 3) for name, value in point.items()},
                "pool": best.pool,
                "met": best.meets,
                "why": why,
                "predictions": [prediction.evidence() for prediction in predictions],
            }
        )
    used = [pool for pool in pools if pool.name in chosen.values()]
    order = sorted(used, key=lambda pool: fmean(latencies[pool.name]))
    ranks = {pool.name: rank for rank, pool in enumerate(order)}
    section: dict[str, Any] = {
        "pools": [_pool_section(pool, ranks[pool.name]) for pool in used],
        **{
            key: value
            for axis in axes
            for key, value in zip(axis.kind.keys, (axis.minimum, axis.maximum, axis.resolution), strict=True)
        },
        "mapping": _nest(chosen, [axis.resolution for axis in axes]),
    }
    left_out = [pool.name for pool in pools if pool not in used]
    return section, {"cells": evidence_cells, "speed_ranks": ranks, "left_out": left_out}


def _point(axis: Axis, index: int, strict: bool) -> float:
    return axis.hardest(index) if strict else axis.cell_middle(index)


def _predict(pool: PoolProfile, point: dict[str, float], wanted: WantedGrid, load: float) -> Prediction:
    lengths = {"isl": point.get("isl", float(wanted.typical_isl or 0))}
    lengths["context_length"] = point.get("context_length", lengths["isl"] + (wanted.typical_osl or 0))
    latency: dict[str, float] = {}
    shares = []
    extrapolated = False
    for kind in TARGETS:
        metric, table = kind.name, pool.table(kind)
        if metric not in point or table is None:
            continue
        assert kind.latency_over is not None, "a target's latency is given over a length"
        latency[metric], beyond = table.at(lengths[kind.latency_over], load)
        extrapolated |= beyond
        target = point[metric]
        # a target of 0 is met by nothing; how far it is missed still distinguishes the pools
        shares.append(latency[metric] / target if target > 0 else 1e9 + latency[metric])
    return Prediction(pool.name, latency, max(shares), pool.cost, extrapolated)


def _pool_section(pool: PoolProfile, rank: int) -> dict[str, Any]:
    section = {
        "name": pool.name,
        "url": pool.url,
        "priority": rank,
        "cost_per_hour": pool.cost_per_hour,
        "cost_per_million_tokens": pool.cost_per_million_tokens,
        "simulate": None if pool.simulate is None else pool.simulate.model_dump(mode="json"),
    }
    return {key: value for key, value in section.items() if value is not None}


def _nest(chosen: dict[tuple[int, ...], str], resolutions: list[int], path: tuple[int, ...] = ()) -> Any:
    if len(path) == len(resolutions):
        return chosen[path]
    return [_nest(chosen, resolutions, (*path, index)) for index in range(resolutions[len(path)])]
