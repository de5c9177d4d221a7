"""One axis of a grid: a range of values, cut into cells of equal width.

A value's cell is ``clamp(int((x − min)/((max − min)/resolution)), 0, resolution − 1)`` (Dynamo's global router): the
outer cells also take what lies beyond the range.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP_MIN = 1e-6
"""Narrowest cell, in the axis's unit: below it, the formula divides by what a float cannot tell from nothing."""


def cell_index(value: float, minimum: float, maximum: float, resolution: int) -> int:
    """Return the cell of a finite ``value``; clamped before it is truncated, so that no value is too large for it."""
    position = (value - minimum) / ((maximum - minimum) / resolution)
    if position >= resolution - 1:
        return resolution - 1
    return int(position) if position > 0 else 0


@dataclass(frozen=True, slots=True)
class Axis:
    """Name, range and resolution of an axis."""

    name: str
    """``isl``, ``ttft``, ``itl`` or ``context_length``."""
    unit: str
    """``tokens`` or ``ms``."""
    minimum: float
    maximum: float
    resolution: int

    def index(self, value: float) -> int:
        """Return the cell of a finite value."""
        return cell_index(value, self.minimum, self.maximum, self.resolution)

    def bounds(self, index: int) -> tuple[float, float]:
        """Return where a cell begins and ends; the outer cells also take what lies beyond."""
        step = (self.maximum - self.minimum) / self.resolution
        return self.minimum + index * step, self.minimum + (index + 1) * step

    def cell_middle(self, index: int) -> float:
        """Return the middle of a cell: what the cell stands for when a grid is built, and its target when measured."""
        low, high = self.bounds(index)
        return (low + high) / 2

    @property
    def middle(self) -> float:
        """Return the middle of the range: the target of a request when nobody gave one."""
        return (self.minimum + self.maximum) / 2
