"""Log lines for people: one line an event, on standard error, so that standard output stays for answers."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def configure(process_name: str, level: str = "info") -> None:
    """Send the log of this process to standard error, each line naming the process."""
    if level not in LEVELS:
        raise ValueError(f"configuring logs: level is {level!r}, allowed are {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d {process_name} %(levelname)s %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
