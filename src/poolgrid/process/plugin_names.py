"""Names of plug-ins: parts of the product that the core does not import and finds by their entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

POLICIES: Final = "poolgrid.policies"
RETENTION: Final = "poolgrid.retention"


@cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, in the order in which they are declared."""
    return {each.name: each for each in entry_points(group=group)}


@cache
def policy_names() -> tuple[str, ...]:
    """Return the names that ``--policy`` knows, ``kv`` first."""
    return ("kv", *sorted(plugins(POLICIES).keys() - {"kv"}))
