"""How severe a line must be to be written: one level for all, and others for some loggers. Only finding modules is I/O.

``info`` or ``warning,router=debug,dispatch.worker_link=info``: the first is for all, ``NAME=LEVEL`` for a logger and
those below it. A logger of ours is called as its module is, with or without ``poolgrid.`` before it; others
(``httpx``, ``asyncio``) are called as they call themselves.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

LEVELS = ("debug", "info", "warning", "error")

OURS = "poolgrid"

HOLD_CLIENTS_WORDS = ("httpx", "httpcore")
"""Loggers that write addresses which clients gave (media), with what is secret in them: never below warning."""

NAMED_MAX = 100
"""Loggers that one command line may name; there are some 150 modules of ours."""


class LogLevels(NamedTuple):
    """What a command was told of its log."""

    all: str
    """The level of every logger that is not named, and below no named one."""
    named: dict[str, str]
    """By full name."""


def read_levels(text: str, default: str = "info") -> LogLevels:
    """Return what an option says; ``default`` is the level of all where it names none.

    Raises ``ValueError`` with what is wrong.
    """
    of_all, named = default, dict[str, str]()
    for number, part in enumerate(text.split(",")):
        name, equals, level = (each.strip() for each in part.rpartition("="))
        if not equals and number:
            raise _wrong(text, f"{level!r} says not whose level it is: after the first, each is LOGGER=LEVEL")
        if level.lower() not in LEVELS:
            raise _wrong(text, f"level {level!r} is none, allowed are {', '.join(LEVELS)}")
        if not equals:
            of_all = level.lower()
        elif len(named) == NAMED_MAX:
            raise _wrong(text, f"it names more than {NAMED_MAX} loggers")
        elif name.partition(".")[0] in HOLD_CLIENTS_WORDS and level.lower() in ("debug", "info"):
            raise _wrong(text, f"{name} would write addresses that clients gave: warning and error are allowed for it")
        else:
            named[_full_name(name, text)] = level.lower()
    return LogLevels(of_all, named)


def _full_name(name: str, text: str) -> str:
    """Return what a logger calls itself that people may have called by its module's short name."""
    first = name.partition(".")[0]
    if first == OURS and _is_there(name):
        return name
    if first != OURS and _is_there(f"{OURS}.{name}"):
        return f"{OURS}.{name}"
    if first != OURS and _is_there(first):
        return name
    raise _wrong(text, f"{name!r} is no module of {OURS}, and no installed package begins so")


def _is_there(module: str) -> bool:
    try:
        return bool(module) and find_spec(module) is not None
    except (ImportError, ValueError):
        return False  # its parent is none, or no package


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(f"configuring logs: --log-level is {text!r}: {why}; nothing was started")
