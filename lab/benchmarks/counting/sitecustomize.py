"""Counts the calls of a router's main thread: Python imports this by itself where ``PYTHONPATH`` has the directory.

``lab.benchmarks.calls`` begins the count with SIGUSR1 and ends it with SIGUSR2, at which the file that
``COUNT_CALLS_INTO`` names is written: calls by what was called, of Python's functions and of C's.
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


def note(frame: FrameType, event: str, argument: Any) -> None:
    """Count a call; what ``sys.setprofile`` tells besides is left out."""
    if event == "call":
        code = frame.f_code
        python_calls[f"{os.path.basename(code.co_filename)} {code.co_qualname}"] += 1
    elif event == "c_call":
        c_calls[f"{argument.__module__ or ''} {argument.__qualname__}".strip()] += 1


def begin(number: int, frame: FrameType | None) -> None:
    """Count from here on."""
    sys.setprofile(note)


def end(number: int, frame: FrameType | None) -> None:
    """Count no more, and say what was counted: the file is there when it is whole."""
    sys.setprofile(None)
    place = os.environ["COUNT_CALLS_INTO"]
    with open(f"{place}.part", "w") as file:
        json.dump({"python": python_calls, "c": c_calls}, file)
    os.replace(f"{place}.part", place)


if "COUNT_CALLS_INTO" in os.environ and sys.orig_argv[1:4] == ["-m", "poolgrid", "router"]:
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
