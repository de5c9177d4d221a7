"""A router whose calls are counted, from outside of it (``benchmarks/counting``)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.benchmarks.http_load import family

HOOK = Path(__file__).parent / "counting"

PATIENCE_S = 30.0
"""For a count to begin, and to be written, which takes a moment."""


class CallCounter:
    """Begins and ends the count of one process, which was started with ``environment``."""

    def __init__(self, pid: int, into: Path) -> None:
        """Count the router among a process and those that it started; raises ``RuntimeError`` without one."""
        self._into = into
        self._pid = next((each for each in family(pid) if _is_router(each)), 0)
        if not self._pid:
            raise RuntimeError(f"process {pid} is no router and has started none")

    @contextmanager
    def counting(self) -> Iterator[dict[str, Any]]:
        """Count during the block; what is yielded has the counts after it. Raises ``RuntimeError``."""
        found: dict[str, Any] = {}
        os.kill(self._pid, signal.SIGUSR1)
        _await(self._into.with_name(f"{self._into.name}.begun"))
        yield found
        os.kill(self._pid, signal.SIGUSR2)
        found |= json.loads(_await(self._into))


def environment(into: Path, *, in_order: bool = False) -> dict[str, str]:
    """Return the variables by which a router can be counted."""
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "CALLS_INTO": str(into),
        "PYTHONPATH": os.pathsep.join(paths),
        **({"CALLS_IN_ORDER": "1"} if in_order else {}),
    }


def _is_router(pid: int) -> bool:
    return b"\0-m\0poolgrid\0router\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _await(path: Path) -> str:
    """Return the text of a file that another process writes, and remove it."""
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > until:
            raise RuntimeError(f"the router wrote no {path.name} in {PATIENCE_S:.0f} s")
        time.sleep(0.02)  # noqa: TID251 - a process that is told by a signal announces nothing
    text = path.read_text()
    path.unlink()
    return text
