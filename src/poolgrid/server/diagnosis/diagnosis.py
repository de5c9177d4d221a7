"""What a diagnosis says, whatever it is about."""

from __future__ import annotations

from enum import Enum
from typing import Self


class Diagnosis(Enum):
    """A diagnosis: its name, whether it is a fault, what it means and what to change."""

    def __new__(cls, name: str, is_fault: bool, meaning: str, fix: str) -> Self:
        diagnosis = object.__new__(cls)
        diagnosis._value_ = name
        diagnosis.is_fault = is_fault
        diagnosis.meaning = meaning
        diagnosis.fix = fix
        return diagnosis

    is_fault: bool
    meaning: str
    fix: str
