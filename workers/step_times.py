"""What a worker with a real engine says of how long its engine's steps take."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from poolgrid.process.settings import InputFile, Settings
from poolgrid.wire.card import NO_STEP_TIMES, StepTimes
from poolgrid.workers.core.shipped_timing import PUBLISHED, TimingName, timing_model
from poolgrid.workers.core.timing import step_times_of


class StepTimesSettings(Settings):
    """Step times for the card; the engine itself has its own."""

    panel: ClassVar[str] = "Worker"

    timing: TimingName | None = Field(
        None,
        description="Step times that the worker's card says, from which routers with the policy predicted begin: "
        "published are the formulas of the field's simulator, h100-qwen3-8b and h200-qwen3-8b were measured on "
        "one H100 and one H200; empty = the card says none, and they begin with published.",
    )
    timing_table: InputFile | None = Field(
        None, description="JSON file of measured step times of your own, instead of those that timing names."
    )

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        self.step_times()  # before an engine is loaded, which takes minutes
        return self

    def step_times(self) -> StepTimes:
        """Return what the card says; raises ``TableError`` for a table that cannot be used, and for both at once."""
        if self.timing is None and self.timing_table is None:
            return NO_STEP_TIMES
        return step_times_of(timing_model(self.timing or PUBLISHED, self.timing_table))
