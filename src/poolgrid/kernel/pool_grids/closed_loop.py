"""The optional closed loop: a cell whose pool misses its target gives part of its traffic to the next faster pool.

Rules
    1. What is watched is a *cell with its pool*: the latencies that requests of the cell had there, and, apart from
       them, those that requests of the cell had on the pool that it spills to; over the last ``window_ms``. The cell's
       target is the middle of its range on the axes that are targets.
    2. *missed*: a p95 (nearest rank) of at least ``samples_min`` measurements is above its target. *met*: every p95
       is at most ``return_below`` of its target. *quiet*: too few measurements to decide. *between*: anything else.
    3. Missed without interruption for ``spill_after_ms``: ``step_share`` more of the traffic spills, up to
       ``share_max``. Met or quiet for ``return_after_ms``: one step less. Between, nothing changes and no time is
       counted (hysteresis).
    4. *crowded*, the brake: the requests that spilled miss the target too, or a cell of the pool that they went to
       misses its own since the last step up. Then nothing more spills; crowded for ``spill_after_ms``: one step less,
       and none up for ``return_after_ms`` after it.
    5. After each step the measurements are forgotten: the next step is judged on what came after this one.
    6. The fastest pool has nowhere to spill to; that is recorded once per period of missing.
    7. Every change is a ``LoopStep``.
    8. The loop of a new document takes over what is known of the cells that it leaves as they were: same axes, same
       pool, same next faster pool, both at the same address.

Time is monotonic milliseconds, given as an argument; so is the draw that decides whether a request spills.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil

import msgspec

from poolgrid.kernel.pool_grids.axis import StageName
from poolgrid.kernel.pool_grids.grid import Selection, retry_order
from poolgrid.kernel.pool_grids.grid_document import ClosedLoopSettings, GridDocument, GridStage
from poolgrid.kernel.wire.answers import LoopStepRow, MeasuredRow

CELLS_MAX = 4096
"""Cells watched at a time; the one that was measured longest ago is forgotten, and stops spilling."""

SAMPLES_MAX = 512
"""Measurements kept per cell and metric: a p95 of more of them hardly differs."""

PERCENTILE = 0.95


class Verdict(StrEnum):
    """How a cell's pool does."""

    MISSED = "missed"
    MET = "met"
    QUIET = "quiet"
    BETWEEN = "between"
    CROWDED = "crowded"
    """The pool that the cell spills to does no better: the brake."""


@dataclass(frozen=True, slots=True)
class CellKey:
    """A cell of a stage with the pool that serves it."""

    stage: StageName
    cell: tuple[int, ...]
    pool: str

    @classmethod
    def of(cls, selection: Selection) -> CellKey | None:
        """Return what a selection is watched as; ``None`` when an override took it away from its cell's pool."""
        if selection.pool != selection.grid_pool:
            return None
        return cls(selection.stage, selection.cell, selection.pool)


@dataclass(frozen=True, slots=True)
class LoopMeasurement:
    """A p95 and its target."""

    pool: str
    metric: str
    p95_ms: float
    target_ms: float
    samples: int


@dataclass(frozen=True, slots=True)
class LoopStep:
    """A change of the share that spills, or the note that nothing can."""

    time_ms: float
    key: CellKey
    spill_pool: str | None
    share_before: float
    share_after: float
    verdict: Verdict
    measured: tuple[LoopMeasurement, ...]
    reason: str

    def explanation(self) -> LoopStepRow:
        return LoopStepRow(
            time_ms=self.time_ms,
            stage=self.key.stage,
            cell=list(self.key.cell),
            pool=self.key.pool,
            spill_pool=self.spill_pool,
            share_before=self.share_before,
            share_after=self.share_after,
            verdict=self.verdict.value,
            measured=msgspec.convert(self.measured, list[MeasuredRow], from_attributes=True),
            reason=self.reason,
        )


@dataclass(frozen=True, slots=True)
class Spill:
    """A request that goes to a faster pool than its cell's."""

    pool: str
    share: float


Samples = dict[str, deque[tuple[float, float]]]
"""Time and latency, by metric."""


@dataclass(slots=True)
class _Watched:
    targets: dict[str, float]
    spill_pool: str | None
    own: Samples
    """Latencies on the cell's pool."""
    spilled: Samples
    """Latencies on ``spill_pool``."""
    share: float = 0.0
    verdict: Verdict = Verdict.QUIET
    since_ms: float = field(default=float("-inf"))
    noted: bool = False
    """Whether this period of missing has been recorded although nothing can be done."""
    raised_ms: float = field(default=float("-inf"))
    """When the share rose last."""
    crowded_since_ms: float | None = None
    braked_until_ms: float = field(default=float("-inf"))


class ClosedLoop:
    """The loop over all cells of a document; ``before`` is the loop of the document that it replaces."""

    def __init__(self, document: GridDocument, cells_max: int = CELLS_MAX, before: ClosedLoop | None = None) -> None:
        self._settings: ClosedLoopSettings = document.closed_loop
        self._enabled = document.adapt
        self._stages: dict[StageName, GridStage] = document.stages
        self._cells_max = cells_max
        self._watched: OrderedDict[CellKey, _Watched] = OrderedDict()
        if before is not None and self._enabled:
            self._take_over(before)

    def _take_over(self, before: ClosedLoop) -> None:
        for key, watched in before._watched.items():
            old, new = before._stages[key.stage], self._stages.get(key.stage)
            if new is not None and _is_unchanged(key, watched.spill_pool, old, new):
                self._watched[key] = replace(
                    watched,
                    own={metric: samples.copy() for metric, samples in watched.own.items()},
                    spilled={metric: samples.copy() for metric, samples in watched.spilled.items()},
                    share=min(watched.share, self._settings.share_max),
                )

    def spill(self, key: CellKey, draw: float) -> Spill | None:
        """Return the faster pool for a request of the cell, or ``None``; ``draw`` is uniform in [0, 1)."""
        watched = self._watched.get(key)
        if watched is None or watched.spill_pool is None or draw >= watched.share:
            return None
        return Spill(watched.spill_pool, watched.share)

    def share(self, key: CellKey) -> float:
        watched = self._watched.get(key)
        return 0.0 if watched is None else watched.share

    def observe(
        self, key: CellKey, metric: str, value_ms: float, now_ms: float, pool: str | None = None
    ) -> list[LoopStep]:
        """Count a latency (``ttft`` or ``itl``) that a request of the cell had on ``pool``, by default the cell's own.

        A metric that the stage has no axis for is ignored, and so is any pool but the cell's own and the one that it
        spills to. Returns the steps of cells that had to be forgotten.
        """
        if not self._enabled:
            return []
        watched, steps = self._watch(key, now_ms)
        if pool is None or pool == key.pool:
            samples = watched.own.get(metric)
        else:
            samples = watched.spilled.get(metric) if pool == watched.spill_pool else None
        if samples is not None and value_ms >= 0:
            samples.append((now_ms, value_ms))
        return steps

    def evaluate(self, now_ms: float) -> list[LoopStep]:
        """Judge every watched cell; return the steps that follow. Meant to be called about once a second."""
        measured: dict[CellKey, tuple[LoopMeasurement, ...]] = {}
        missing_since_ms: dict[str, float] = {}
        """By pool, since when the cell of it that came to miss its target last has missed it."""
        for key, watched in self._watched.items():
            own = measured[key] = self._measured(key.pool, watched.own, watched.targets, now_ms)
            verdict = self._verdict(own)
            if verdict is not watched.verdict:
                self._begin(watched, verdict, now_ms)
            if verdict is Verdict.MISSED:
                missing_since_ms[key.pool] = max(watched.since_ms, missing_since_ms.get(key.pool, watched.since_ms))
        steps: list[LoopStep] = []
        for key, watched in self._watched.items():
            step = self._brake(key, watched, missing_since_ms, now_ms) or self._judge(
                key, watched, measured[key], now_ms
            )
            if step is not None:
                steps.append(step)
        return steps

    def __len__(self) -> int:
        return len(self._watched)

    def _watch(self, key: CellKey, now_ms: float) -> tuple[_Watched, list[LoopStep]]:
        watched = self._watched.get(key)
        if watched is not None:
            self._watched.move_to_end(key)
            return watched, []
        stage = self._stages[key.stage]
        targets: dict[str, float] = {
            axis.name: axis.cell_middle(index)
            for axis, index in zip(stage.axes, key.cell, strict=True)
            if axis.kind.is_target
        }
        watched = _Watched(
            targets,
            _next_faster(stage, key.pool),
            {metric: deque(maxlen=SAMPLES_MAX) for metric in targets},
            {metric: deque(maxlen=SAMPLES_MAX) for metric in targets},
            since_ms=now_ms,
        )
        self._watched[key] = watched
        steps = []
        while len(self._watched) > self._cells_max:
            old_key, old = self._watched.popitem(last=False)
            if old.share > 0:
                reason = f"more than {self._cells_max} cells are watched"
                steps.append(LoopStep(now_ms, old_key, old.spill_pool, old.share, 0.0, old.verdict, (), reason))
        return watched, steps

    def _brake(
        self, key: CellKey, watched: _Watched, missing_since_ms: dict[str, float], now_ms: float
    ) -> LoopStep | None:
        """Note whether the pool that a cell spills to is crowded; return the step back when it has been for long."""
        if watched.spill_pool is None:
            return None
        measured = self._measured(watched.spill_pool, watched.spilled, watched.targets, now_ms)
        if self._verdict(measured) is Verdict.MISSED:
            why = f"what spills to {watched.spill_pool} misses the target too"
        elif watched.share > 0 and missing_since_ms.get(watched.spill_pool, float("-inf")) >= watched.raised_ms:
            why = f"since the last step a cell of {watched.spill_pool} misses its target"
        else:
            watched.crowded_since_ms = None
            return None
        if watched.crowded_since_ms is None:
            watched.crowded_since_ms = now_ms
        lasted_ms = now_ms - watched.crowded_since_ms
        if lasted_ms < self._settings.spill_after_ms or watched.share == 0:
            return None
        watched.braked_until_ms = now_ms + self._settings.return_after_ms
        after = self._less(watched.share)
        return self._step(key, watched, after, Verdict.CROWDED, measured, now_ms, f"{why}, for {lasted_ms:g} ms")

    def _judge(
        self, key: CellKey, watched: _Watched, measured: tuple[LoopMeasurement, ...], now_ms: float
    ) -> LoopStep | None:
        settings = self._settings
        verdict = watched.verdict
        lasted_ms = now_ms - watched.since_ms
        reason = f"{verdict.value} for {lasted_ms:g} ms"
        if verdict is Verdict.MISSED and lasted_ms >= settings.spill_after_ms:
            if watched.spill_pool is None:
                if watched.noted:
                    return None
                watched.noted = True
                reason = "missed, and no pool is faster"
                return LoopStep(now_ms, key, None, 0.0, 0.0, verdict, measured, reason)
            if watched.crowded_since_ms is not None or now_ms < watched.braked_until_ms:
                return None
            after = min(settings.share_max, watched.share + settings.step_share)
            return self._step(key, watched, after, verdict, measured, now_ms, reason)
        if verdict in (Verdict.MET, Verdict.QUIET) and lasted_ms >= settings.return_after_ms:
            return self._step(key, watched, self._less(watched.share), verdict, measured, now_ms, reason)
        return None

    def _less(self, share: float) -> float:
        after = max(0.0, share - self._settings.step_share)
        # steps of binary fractions never leave a rest, others may: what is next to nothing is nothing
        return after if after > 1e-9 else 0.0

    def _step(
        self,
        key: CellKey,
        watched: _Watched,
        after: float,
        verdict: Verdict,
        measured: tuple[LoopMeasurement, ...],
        now_ms: float,
        reason: str,
    ) -> LoopStep | None:
        before = watched.share
        if after == before:
            return None
        step = LoopStep(now_ms, key, watched.spill_pool, before, after, verdict, measured, reason)
        watched.share = after
        if after > before:
            watched.raised_ms = now_ms
        watched.crowded_since_ms = None
        self._forget_samples(watched)
        self._begin(watched, Verdict.QUIET, now_ms)
        return step

    @staticmethod
    def _begin(watched: _Watched, verdict: Verdict, now_ms: float) -> None:
        watched.verdict = verdict
        watched.since_ms = now_ms
        watched.noted = False

    @staticmethod
    def _forget_samples(watched: _Watched) -> None:
        for samples in (*watched.own.values(), *watched.spilled.values()):
            samples.clear()

    def _measured(
        self, pool: str, all_samples: Samples, targets: dict[str, float], now_ms: float
    ) -> tuple[LoopMeasurement, ...]:
        measured = []
        for metric, samples in all_samples.items():
            while samples and samples[0][0] <= now_ms - self._settings.window_ms:
                samples.popleft()
            if len(samples) >= self._settings.samples_min:
                values = sorted(value for _, value in samples)
                p95 = values[ceil(PERCENTILE * len(values)) - 1]
                measured.append(LoopMeasurement(pool, metric, p95, targets[metric], len(values)))
        return tuple(measured)

    def _verdict(self, measured: tuple[LoopMeasurement, ...]) -> Verdict:
        if not measured:
            return Verdict.QUIET
        if any(m.p95_ms > m.target_ms for m in measured):
            return Verdict.MISSED
        if all(m.p95_ms <= self._settings.return_below * m.target_ms for m in measured):
            return Verdict.MET
        return Verdict.BETWEEN


def _next_faster(stage: GridStage, pool: str) -> str | None:
    faster = retry_order(stage, pool)
    return faster[0] if faster else None


def _is_unchanged(key: CellKey, spill_pool: str | None, old: GridStage, new: GridStage) -> bool:
    """Return whether what was measured of a cell under one document holds under another."""
    ranks = new.speed_ranks()
    if old.axes != new.axes or old.pool_at(key.cell) != new.pool_at(key.cell) or key.pool not in ranks:
        return False
    if _next_faster(new, key.pool) != spill_pool:
        return False
    return all(old.pool(name).url == new.pool(name).url for name in (key.pool, spill_pool) if name is not None)
