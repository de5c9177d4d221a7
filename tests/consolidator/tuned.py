"""Settings and tuning of a consolidator from one list of changes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from poolgrid.server.consolidator.settings import ConsolidatorSettings, Tuning

NAMES = {each.name for each in fields(Tuning)}


def tuned(**changes: Any) -> tuple[ConsolidatorSettings, Tuning]:
    """Return both with the changes that each has."""
    tuning = Tuning(**{name: value for name, value in changes.items() if name in NAMES})
    return ConsolidatorSettings(**{name: value for name, value in changes.items() if name not in NAMES}), tuning
