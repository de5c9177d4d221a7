"""Records of the pool's journal that are missing."""

from __future__ import annotations


class Hole(RuntimeError):
    """Records do not continue the ones before: what was in between is missing, or they were there already."""

    def __init__(self, came: int, expected: int) -> None:
        super().__init__(
            f"applying records of the journal: record {came} came, expected is record {expected}; nothing of it was "
            "applied, and only a snapshot leads on"
        )
