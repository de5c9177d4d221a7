"""Plug-ins: parts of the product that nothing imports. Entry points name them, and their folders may be absent."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoints, entry_points
from importlib.util import find_spec
from typing import Any, cast

EVENT_PLANES = "poolgrid.event_planes"
DISCOVERY = "poolgrid.discovery"
POLICIES = "poolgrid.policies"
COMMANDS = "poolgrid.commands"
ENDPOINTS = "poolgrid.endpoints"
PARSERS = "poolgrid.parsers"
PARTS = "poolgrid.parts"
"""What processes and commands take in where it is installed, by the name of the part."""


@cache
def _all_entry_points() -> EntryPoints:
    return cast(EntryPoints, entry_points())  # before Python 3.12 another class, with the same ``select``


def installed_plugins(group: str) -> EntryPoints:
    """Return the entry points of a group. The files of all distributions are read once in a process: 10 ms of CPU."""
    return _all_entry_points().select(group=group)


def load_plugin(group: str, name: str) -> Any:
    """Return what an entry point names; raises ``ValueError`` when no such plug-in is installed."""
    for found in installed_plugins(group).select(name=name):
        try:
            return found.load()
        except ModuleNotFoundError as error:
            raise ValueError(f"loading the plug-in {name!r} of {group}: {error}") from error
    installed = ", ".join(plugin_names(group)) or "none"
    raise ValueError(f"loading the plug-in {name!r} of {group}: it is not installed; installed: {installed}")


def has_plugin(group: str, name: str) -> bool:
    """Return whether a plug-in is installed and its folder is there; nothing of it is run."""
    return any(is_installed(each.module) for each in installed_plugins(group).select(name=name))


def is_installed(module: str) -> bool:
    """Return whether a module is there; nothing of it is run but the packages that it is in."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def load_part(name: str, what: str) -> Any:
    """Return a part; raises ``OptionError`` that begins with ``what`` (an option and its value) when it is absent."""
    try:
        return load_plugin(PARTS, name)
    except ValueError as error:
        from poolgrid.server.process.settings import OptionError  # here: the command line does without pydantic

        raise OptionError(f"{what}: {error}") from error


@cache
def plugin_names(group: str) -> tuple[str, ...]:
    """Return the names that the entry points of a group have, in order."""
    return tuple(sorted({each.name for each in installed_plugins(group)}))


def check_policy_name(name: str) -> None:
    """Raise ``ValueError`` for a policy that no entry point names; ``module:Class`` is for its import to judge."""
    if ":" not in name and name not in policy_names():
        raise ValueError(f"--policy {name}: unknown, allowed are {', '.join(policy_names())}, or module:Class")


def policy_names() -> tuple[str, ...]:
    """Return the names that ``--policy`` knows, ``kv`` first, which the core has itself."""
    return ("kv", *(name for name in plugin_names(POLICIES) if name != "kv"))
