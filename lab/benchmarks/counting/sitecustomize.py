"""Counts the calls of a router's main thread: Python imports this by itself where ``PYTHONPATH`` has the directory.

SIGUSR1 begins and SIGUSR2 ends it, at which the file that ``CALLS_INTO`` names is written. For
``lab.benchmarks.calls`` it has calls by what was called, of Python's functions and of C's. With ``CALLS_IN_ORDER``, for
``lab.benchmarks.request_path``, it has every call of a function of poolgrid's, one after the other, and where bytes
left for a client.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from types import FrameType
from typing import Any

python_calls: Counter[str] = Counter()
c_calls: Counter[str] = Counter()
in_order: list[tuple[str, str]] = []
"""Module and function; empty: bytes left for a client."""

GUARD = "poolgrid.server.http.guard"
WRITES = ("write", "_write_head")
"""Methods of a client's connection there: they write, or hold a head back for what follows."""


def note(frame: FrameType, event: str, argument: Any) -> None:
    """Count a call; what ``sys.setprofile`` tells besides is left out."""
    if event == "call":
        code = frame.f_code
        python_calls[f"{os.path.basename(code.co_filename)} {code.co_qualname}"] += 1
    elif event == "c_call":
        c_calls[f"{argument.__module__ or ''} {argument.__qualname__}".strip()] += 1


def note_in_order(frame: FrameType, event: str, argument: Any) -> None:
    """Note a call of a function of poolgrid's, or that bytes left for a client."""
    module = frame.f_globals.get("__name__", "")
    if event == "call" and module.startswith("poolgrid."):
        in_order.append((module, frame.f_code.co_qualname))
    elif event == "return" and module == GUARD and frame.f_code.co_name in WRITES and not frame.f_locals["self"]._head:
        in_order.append(("", ""))


def begin(number: int, frame: FrameType | None) -> None:
    """Count from here on; an empty file says so."""
    python_calls.clear()
    c_calls.clear()
    in_order.clear()
    with open(f"{os.environ['CALLS_INTO']}.begun", "w"):
        pass
    sys.setprofile(note_in_order if "CALLS_IN_ORDER" in os.environ else note)


def end(number: int, frame: FrameType | None) -> None:
    """Count no more, and say what was counted: the file is there when it is whole."""
    sys.setprofile(None)
    place = os.environ["CALLS_INTO"]
    with open(f"{place}.part", "w") as file:
        json.dump({"python": python_calls, "c": c_calls, "in_order": in_order}, file)
    os.replace(f"{place}.part", place)


if "CALLS_INTO" in os.environ and " -m poolgrid router " in " ".join(sys.orig_argv):
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
