"""The axes of grids as data: what each measures, which stages have it, its names.

Rules
    1. ``AXES`` is the one table. Keys of documents and profiles, names of hints and headers, ranks of speed and the
       dimensions of mappings follow from a row; the order of the rows is the order in which mappings are nested.
    2. An axis is a cut of a range into cells of equal width. A value's cell is ``clamp(int((x − min)/((max −
       min)/resolution)), 0, resolution − 1)`` (Dynamo's global router): the outer cells also take what lies beyond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["disagg", "aggregated"]
StageName = Literal["prefill", "decode", "aggregated"]
AxisName = Literal["isl", "context_length", "ttft", "itl"]

STAGES: tuple[StageName, ...] = ("prefill", "decode", "aggregated")
STAGES_OF_MODE: Mapping[str, tuple[StageName, ...]] = {
    "disagg": ("prefill", "decode"),
    "aggregated": ("aggregated",),
}

STEP_MIN = 1e-6
"""Narrowest cell, in the axis's unit: below it, the formula divides by a number that rounds to zero."""


@dataclass(frozen=True, slots=True)
class AxisKind:
    """What an axis measures: a length of the request, or a latency target that it must meet."""

    name: AxisName
    unit: Literal["tokens", "ms"]
    stages: Mapping[StageName, Literal["required", "optional"]]
    """The stages whose grids have the axis. The keys of an optional one come together, or not at all."""
    faster_end: Literal["low", "high"] | None = None
    """The end at which a request needs a faster pool: the low one of a latency target; ``None`` for a length."""
    latency_over: AxisName | None = None
    """For a target: the length over which pool profiles give this latency."""
    not_in_dynamo: frozenset[StageName] = field(default_factory=frozenset)
    """Stages in which Dynamo's form of a document does not have it."""

    @property
    def is_target(self) -> bool:
        """Return whether a request's value is a target that it asks for, and the closed loop watches."""
        return self.faster_end is not None

    @property
    def keys(self) -> tuple[str, str, str]:
        """Return the keys of minimum, maximum and resolution in documents and profiles."""
        unit = "_ms" if self.unit == "ms" else ""
        return f"{self.name}_min{unit}", f"{self.name}_max{unit}", f"{self.name}_resolution"

    @property
    def default_key(self) -> str:
        return f"{self.name}_target_ms"

    @property
    def hint_field(self) -> str:
        return f"nvext.router.{self.name}_target"

    @property
    def hint_header(self) -> str:
        return f"x-{self.name}-target-ms"


AXES: tuple[AxisKind, ...] = (
    AxisKind("isl", "tokens", {"prefill": "required", "aggregated": "optional"}),
    AxisKind(
        "context_length",
        "tokens",
        {"decode": "required", "aggregated": "optional"},
        not_in_dynamo=frozenset({"aggregated"}),
    ),
    AxisKind("ttft", "ms", {"prefill": "required", "aggregated": "required"}, "low", "isl"),
    AxisKind("itl", "ms", {"decode": "required", "aggregated": "required"}, "low", "context_length"),
)
AXIS: Mapping[AxisName, AxisKind] = {kind.name: kind for kind in AXES}
TARGETS = tuple(kind for kind in AXES if kind.is_target)


def axes_of(stage: str) -> tuple[AxisKind, ...]:
    """Return the axes that grids of a stage have, or may have, in the order of nesting."""
    return tuple(kind for kind in AXES if stage in kind.stages)


def cell_index(value: float, minimum: float, maximum: float, resolution: int) -> int:
    """Return the cell of a finite ``value``; clamped before it is truncated, so that no value is too large for it."""
    position = (value - minimum) / ((maximum - minimum) / resolution)
    if position >= resolution - 1:
        return resolution - 1
    return int(position) if position > 0 else 0


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of one grid: its range and resolution."""

    kind: AxisKind
    minimum: float
    maximum: float
    resolution: int

    @property
    def name(self) -> AxisName:
        return self.kind.name

    @property
    def unit(self) -> str:
        return self.kind.unit

    def index(self, value: float) -> int:
        return cell_index(value, self.minimum, self.maximum, self.resolution)

    def bounds(self, index: int) -> tuple[float, float]:
        """Return where a cell begins and ends; the outer cells also take what lies beyond."""
        step = (self.maximum - self.minimum) / self.resolution
        return self.minimum + index * step, self.minimum + (index + 1) * step

    def cell_middle(self, index: int) -> float:
        """Return the middle of a cell: what the cell stands for when a grid is built, and its target when measured."""
        low, high = self.bounds(index)
        return (low + high) / 2

    def hardest(self, index: int) -> float:
        """Return the end of a cell that asks most of a pool: its tightest target, or its longest length."""
        low, high = self.bounds(index)
        return low if self.kind.faster_end == "low" else high

    @property
    def middle(self) -> float:
        return (self.minimum + self.maximum) / 2
