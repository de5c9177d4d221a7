"""The optional closed loop: a cell whose pool misses its target gives part of its traffic to the next faster pool.

Rules
    1. What is watched is a *cell with its pool*: the latencies that requests of the cell had on that pool (spilled
       requests are not counted), over the last ``window_ms``. The cell's target is the middle of its range on the
       ttft and itl axes.
    2. *missed*: a p95 (nearest rank) of at least ``samples_min`` measurements is above its target. *met*: every p95
       is at most ``return_below`` of its target. *quiet*: too few measurements to tell. *between*: anything else.
    3. Missed without interruption for ``spill_after_ms``: ``step_share`` more of the traffic spills, up to
       ``share_max``. Met or quiet for ``return_after_ms``: one step less. Between, nothing changes and no time is
       counted (hysteresis).
    4. After each step the measurements are forgotten: the next step is judged on what came after this one.
    5. The fastest pool has nowhere to spill to; that is recorded once per period of missing.
    6. Every change is a ``LoopStep``; applying the steps of another loop in their order gives its shares (``apply``).

Time is monotonic milliseconds, given as an argument; so is the draw that decides whether a request spills.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import Any

from global_router.core.fallback import retry_order
from global_router.core.grid import Selection
from global_router.core.grid_document import ClosedLoopSettings, GridDocument, Stage, StageName

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
class Measured:
    """A p95 beside its target."""

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
    measured: tuple[Measured, ...]
    reason: str

    def explanation(self) -> dict[str, Any]:
        """Return the step as plain JSON."""
        return {
            "time_ms": self.time_ms,
            "stage": self.key.stage,
            "cell": list(self.key.cell),
            "pool": self.key.pool,
            "spill_pool": self.spill_pool,
            "share_before": self.share_before,
            "share_after": self.share_after,
            "verdict": self.verdict.value,
            "measured": [
                {"metric": m.metric, "p95_ms": m.p95_ms, "target_ms": m.target_ms, "samples": m.samples}
                for m in self.measured
            ],
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Spill:
    """A request that goes to a faster pool than its cell's."""

    pool: str
    share: float


@dataclass(slots=True)
class _Watched:
    targets: dict[str, float]
    spill_pool: str | None
    samples: dict[str, deque[tuple[float, float]]]
    share: float = 0.0
    verdict: Verdict = Verdict.QUIET
    since_ms: float = field(default=float("-inf"))
    noted: bool = False
    """Whether this period of missing has been recorded although nothing can be done."""


class ClosedLoop:
    """The loop over all cells of a document."""

    def __init__(self, document: GridDocument, cells_max: int = CELLS_MAX) -> None:
        self._settings: ClosedLoopSettings = document.closed_loop
        self._enabled = document.adapt
        self._stages: dict[StageName, Stage] = document.stages
        self._cells_max = cells_max
        self._watched: OrderedDict[CellKey, _Watched] = OrderedDict()

    def spill(self, key: CellKey, draw: float) -> Spill | None:
        """Return the faster pool for a request of the cell, or ``None``; ``draw`` is uniform in [0, 1)."""
        watched = self._watched.get(key)
        if watched is None or watched.spill_pool is None or draw >= watched.share:
            return None
        return Spill(watched.spill_pool, watched.share)

    def share(self, key: CellKey) -> float:
        """Return the share of a cell's traffic that spills now."""
        watched = self._watched.get(key)
        return 0.0 if watched is None else watched.share

    def observe(self, key: CellKey, metric: str, value_ms: float, now_ms: float) -> list[LoopStep]:
        """Count a latency (``ttft`` or ``itl``) that a request of the cell had on the cell's own pool.

        A metric that the stage has no axis for is ignored. Returns the steps of cells that had to be forgotten.
        """
        if not self._enabled:
            return []
        watched, steps = self._watch(key, now_ms)
        samples = watched.samples.get(metric)
        if samples is not None and value_ms >= 0:
            samples.append((now_ms, value_ms))
        return steps

    def evaluate(self, now_ms: float) -> list[LoopStep]:
        """Judge every watched cell; return the steps that follow. Meant to be called about once a second."""
        steps: list[LoopStep] = []
        for key, watched in self._watched.items():
            step = self._judge(key, watched, now_ms)
            if step is not None:
                steps.append(step)
        return steps

    def apply(self, step: LoopStep) -> None:
        """Take over a recorded step: the cell's share is what the step left."""
        if step.key.stage not in self._stages:
            return
        watched, _ = self._watch(step.key, step.time_ms)
        watched.share = step.share_after
        self._begin(watched, Verdict.QUIET, step.time_ms)
        self._forget_samples(watched)

    def __len__(self) -> int:
        return len(self._watched)

    def _watch(self, key: CellKey, now_ms: float) -> tuple[_Watched, list[LoopStep]]:
        watched = self._watched.get(key)
        if watched is not None:
            self._watched.move_to_end(key)
            return watched, []
        stage = self._stages[key.stage]
        targets = {
            axis.name: axis.cell_middle(index)
            for axis, index in zip(stage.axes, key.cell, strict=True)
            if axis.name in ("ttft", "itl")
        }
        faster = retry_order(stage, key.pool)
        watched = _Watched(
            targets,
            faster[0] if faster else None,
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

    def _judge(self, key: CellKey, watched: _Watched, now_ms: float) -> LoopStep | None:
        settings = self._settings
        measured = self._measured(watched, now_ms)
        verdict = self._verdict(measured)
        if verdict is not watched.verdict:
            self._begin(watched, verdict, now_ms)
        lasted_ms = now_ms - watched.since_ms
        if verdict is Verdict.MISSED and lasted_ms >= settings.spill_after_ms:
            if watched.spill_pool is None:
                if watched.noted:
                    return None
                watched.noted = True
                reason = "missed, and no pool is faster"
                return LoopStep(now_ms, key, None, 0.0, 0.0, verdict, measured, reason)
            after = min(settings.share_max, watched.share + settings.step_share)
            return self._step(key, watched, after, measured, now_ms)
        if verdict in (Verdict.MET, Verdict.QUIET) and lasted_ms >= settings.return_after_ms:
            after = max(0.0, watched.share - settings.step_share)
            # steps of binary fractions never leave a rest, others may: what is next to nothing is nothing
            return self._step(key, watched, after if after > 1e-9 else 0.0, measured, now_ms)
        return None

    def _step(
        self, key: CellKey, watched: _Watched, after: float, measured: tuple[Measured, ...], now_ms: float
    ) -> LoopStep | None:
        before = watched.share
        if after == before:
            return None
        reason = f"{watched.verdict.value} for {now_ms - watched.since_ms:g} ms"
        step = LoopStep(now_ms, key, watched.spill_pool, before, after, watched.verdict, measured, reason)
        watched.share = after
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
        for samples in watched.samples.values():
            samples.clear()

    def _measured(self, watched: _Watched, now_ms: float) -> tuple[Measured, ...]:
        measured = []
        for metric, samples in watched.samples.items():
            while samples and samples[0][0] <= now_ms - self._settings.window_ms:
                samples.popleft()
            if len(samples) >= self._settings.samples_min:
                values = sorted(value for _, value in samples)
                p95 = values[ceil(PERCENTILE * len(values)) - 1]
                measured.append(Measured(metric, p95, watched.targets[metric], len(values)))
        return tuple(measured)

    def _verdict(self, measured: tuple[Measured, ...]) -> Verdict:
        if not measured:
            return Verdict.QUIET
        if any(m.p95_ms > m.target_ms for m in measured):
            return Verdict.MISSED
        if all(m.p95_ms <= self._settings.return_below * m.target_ms for m in measured):
            return Verdict.MET
        return Verdict.BETWEEN
