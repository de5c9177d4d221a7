"""Plug-ins: parts of the product that the core does not import and finds by their entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

EVENT_PLANES = "poolgrid.event_planes"
DISCOVERY = "poolgrid.discovery"
POLICIES = "poolgrid.policies"
RETENTION = "poolgrid.retention"


def load_plugin(group: str, name: str) -> Any:
    """Return what an entry point names; raises ``ValueError`` when no such plug-in is installed."""
    for found in entry_points(group=group, name=name):
        try:
            return found.load()
        except ModuleNotFoundError as error:
            raise ValueError(f"loading the plug-in {name!r} of {group}: {error}") from error
    installed = ", ".join(plugin_names(group)) or "none"
    raise ValueError(f"loading the plug-in {name!r} of {group}: it is not installed; installed: {installed}")


@cache
def plugin_names(group: str) -> tuple[str, ...]:
    """Return the names that the entry points of a group have, in order."""
    return tuple(sorted(each.name for each in entry_points(group=group)))


def policy_names() -> tuple[str, ...]:
    """Return the names that ``--policy`` knows, ``kv`` first, which the core has itself."""
    return ("kv", *(name for name in plugin_names(POLICIES) if name != "kv"))
