"""Step times by name: the published formulas, and measurements that come with the package.

A measurement is a timing table in ``timings/``, whose ``source`` says of what and how. Its name is the file's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from poolgrid.workers.core.timing import PolynomialTiming, TableError, TableTiming, TimingModel

TimingName = Literal["published", "h100-qwen3-8b", "h200-qwen3-8b"]
"""The names there are; ``published`` are the formulas, every other is a file."""

DIRECTORY = Path(__file__).parent / "timings"

PUBLISHED: TimingName = "published"
MEASURED: tuple[str, ...] = tuple(name for name in get_args(TimingName) if name != PUBLISHED)

TIMING_TEXT = (
    "Step times of the engine: published are the formulas of the field's simulator, h100-qwen3-8b and h200-qwen3-8b "
    "were measured on one H100 and one H200."
)


def timing_model(timing: TimingName = PUBLISHED, table: Path | None = None) -> TimingModel:
    """Return the step times of a name, or of a file of one's own; raises ``TableError`` for both at once."""
    if table is not None:
        if timing != PUBLISHED:
            raise TableError(f"choosing step times: timing is {timing!r} and timing_table is {str(table)!r}, give one")
        return TableTiming.from_file(table)
    return PolynomialTiming() if timing == PUBLISHED else shipped_timing(timing)


def shipped_timing(name: str) -> TableTiming:
    """Return a measurement that comes with the package; raises ``TableError`` naming those that there are."""
    if name not in MEASURED:
        raise TableError(f"choosing step times: {name!r} is unknown, there are {', '.join(get_args(TimingName))}")
    return TableTiming.from_file(DIRECTORY / f"{name}.json")
