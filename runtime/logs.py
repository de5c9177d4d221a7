"""Log lines for people: one line an event, on standard error, so that standard output stays for answers.

Rules
    1. An event is one line, whatever is in its text. Much of that text is not ours (names that clients and workers
       chose, headers, addresses, errors of libraries about them): everything that is not printable is escaped, so that
       nobody writes a line that we did not, moves a terminal's cursor or hides what follows. Lines of tracebacks are
       set apart.
    2. A line has at most ``LINE_CHARS_MAX`` characters.
    3. One place in the code writes at most ``LINES_PER_PERIOD`` lines in ``PERIOD_S``. What is left out is counted, and
       the number said when the period is over. Lines that an operator has asked for one by one (``EVERY_LINE``) are
       not counted.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

LINE_CHARS_MAX = 8192
"""Of one event's own words: twice the longest reason that the wire carries."""

LINES_PER_PERIOD = 200
"""Of one place in the code: what happens once for each worker of a large pool is still seen whole."""

PERIOD_S = 10.0

EVERY_LINE = {"every_line": True}
"""Given as ``extra`` of a line: none of its place is left out."""

TRACEBACK_MARK = "  | "
"""Before each line of a traceback: what an exception says of a client's text cannot pass for an event."""

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def one_line(text: str) -> str:
    """Return text with everything escaped that is not printable: control characters, line ends, what turns writing."""
    if len(text) > LINE_CHARS_MAX:
        text = f"{text[:LINE_CHARS_MAX]}… ({len(text) - LINE_CHARS_MAX} more characters)"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class LineFormatter(logging.Formatter):
    """Writes events by the first two rules."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Return the line of an event."""
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802
        """Return a traceback, set apart."""
        return _set_apart(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        """Return a stack, set apart."""
        return _set_apart(super().formatStack(stack_info))


def _set_apart(text: str) -> str:
    return "\n".join(TRACEBACK_MARK + one_line(line) for line in text.split("\n"))


Site = tuple[str, str, int]
"""File, function and line of a place that logs: as many as there are in the code."""


@dataclass(slots=True)
class _Period:
    began_s: float
    lines: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes events by the third rule."""

    def __init__(self, stream: TextIO, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._monotonic_s = monotonic_s
        self._periods: dict[Site, _Period] = {}
        self._leaving_out: dict[Site, _Period] = {}
        """Those of which something was left out; nearly always none."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write an event, or count it."""
        if getattr(record, "every_line", False):
            super().emit(record)
            return
        now_s = self._monotonic_s()
        if self._leaving_out:
            self._say_what_was_left_out(now_s - PERIOD_S)
        site = (record.pathname, record.funcName or "", record.lineno)
        period = self._periods.get(site)
        if period is None or now_s - period.began_s >= PERIOD_S:
            period = self._periods[site] = _Period(now_s)
        period.lines += 1
        if period.lines <= LINES_PER_PERIOD:
            super().emit(record)
        else:
            period.left_out += 1
            period.last = record
            self._leaving_out[site] = period

    def close(self) -> None:
        """End; what was left out until now is said."""
        self._say_what_was_left_out(float("inf"))
        super().close()

    def _say_what_was_left_out(self, began_before_s: float) -> None:
        for site, period in list(self._leaving_out.items()):
            if period.began_s <= began_before_s and period.last is not None:
                del self._leaving_out[site]
                last = period.last
                said = logging.LogRecord(
                    last.name,
                    last.levelno,
                    last.pathname,
                    last.lineno,
                    "%d lines like the following one were left out: %s",
                    (period.left_out, last.getMessage()),
                    None,
                )
                super().emit(said)


def configure(process_name: str, level: str = "info") -> None:
    """Send the log of this process to standard error, each line naming the process."""
    if level not in LEVELS:
        raise ValueError(f"configuring logs: level is {level!r}, allowed are {', '.join(LEVELS)}")
    handler = BoundedHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"%(asctime)s.%(msecs)03d {process_name} %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
