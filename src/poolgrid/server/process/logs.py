"""The log of a process: on standard error, so that standard output stays for answers, and in bounded number.

``poolgrid.server.process.log_lines`` defines the form of a line, ``poolgrid.server.process.logs`` which are written.

Rules
    1. A line that one place in the code repeats with the same text within ``PERIOD_S`` is counted and not written; ``N
       more like this`` follows when the period is over. ``REPEATS_MAX`` lines are remembered so, the oldest gives way.
    2. One place in the code writes at most ``LINES_PER_PERIOD`` lines in ``PERIOD_S``, whatever their words. What is
       left out is counted, and the number logged when the period is over.
    3. Lines that an operator has asked for one by one (``EVERY_LINE``) are neither counted nor left out.

How severe a line must be to be written: one level for all, and others for some loggers. Only finding modules is I/O.

``info`` or ``warning,router=debug,dispatch.worker_link=info``: the first is for all, ``NAME=LEVEL`` for a logger and
those below it. A logger of ours is called as its module is, with or without ``poolgrid.`` before it; others
(``httpx``, ``asyncio``) are called as they call themselves.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, NamedTuple, TextIO

from poolgrid.kernel.requests.log_fields import Field
from poolgrid.server.process.log_lines import (
    LINE_CHARS_MAX,
    JsonFormatter,
    LineFormatter,
    add_fields_of_task,
    fields_of,
)

LEVELS = ("debug", "info", "warning", "error")

OURS = "poolgrid"

HOLD_CLIENTS_WORDS = ("httpx", "httpcore")
"""Loggers that write addresses which clients gave (media), with what is secret in them: never below warning."""

NAMED_MAX = 100
"""Loggers that one command line may name; there are some 150 modules of ours."""


class LogLevels(NamedTuple):
    """A command's settings of its log."""

    all: str
    """The level of every logger that is not named, and below no named one."""
    named: dict[str, str]
    """By full name."""


def read_levels(text: str, default: str = "info") -> LogLevels:
    """Return the levels in an option; ``default`` is the level of all where it names none.

    Raises ``ValueError`` with what is wrong.
    """
    of_all, named = default, dict[str, str]()
    for number, part in enumerate(text.split(",")):
        name, equals, level = (each.strip() for each in part.rpartition("="))
        if not equals and number:
            raise _wrong(text, f"{level!r} names no logger: after the first, each is LOGGER=LEVEL")
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


LogFormat = Literal["text", "json"]

DYNAMO_JSON_VARIABLE = "DYN_LOGGING_JSONL"
"""Set to a true value in scripts written for Dynamo: lines are JSON."""

TRUE_WORDS = ("1", "true", "yes", "on")

LINES_PER_PERIOD = 200
"""Of one place in the code: what happens once for each worker of a large pool is still seen whole."""

PERIOD_S = 10.0

REPEATS_MAX = 512
"""Lines that are remembered to be known again; a process has some 150 places that log, most of them silent."""

EVERY_LINE = {"every_line": True}
"""In the ``extra`` of a line: none of its place is left out."""

Site = tuple[str, str, int]
"""File, function and line of a place that logs: as many as there are in the code."""


@dataclass(slots=True)
class _Period:
    """What became of lines that are alike, since ``began_s``."""

    began_s: float
    words: str
    """Text about lines that were left out; the number and the last line are put in."""
    lines: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None

    def leave_out(self, record: logging.LogRecord) -> None:
        self.left_out += 1
        self.last = record


Later = Callable[[float, Callable[[], None]], None]
"""Calls back after some seconds, in any thread."""


def _in_a_thread(after_s: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(after_s, call)
    timer.name = "log"
    timer.daemon = True
    timer.start()


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes events by the rules above."""

    def __init__(
        self, stream: TextIO, monotonic_s: Callable[[], float] = time.monotonic, later: Later = _in_a_thread
    ) -> None:
        """``later`` is asked for a call when something was left out: nothing else may be logged until then."""
        super().__init__(stream)
        self._monotonic_s = monotonic_s
        self._later = later
        self._sites: dict[Site, _Period] = {}
        self._repeats: OrderedDict[tuple[Site, str], _Period] = OrderedDict()
        self._pending: list[_Period] = []
        """Those of which something was left out; nearly always none."""
        self._is_timed = False
        """Whether a call was asked for and has not come."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write an event, or count it."""
        if getattr(record, "every_line", False):
            super().emit(record)
            return
        now_s = self._monotonic_s()
        if self._pending:
            self._say_what_was_left_out(now_s - PERIOD_S)
        site = (record.pathname, record.funcName or "", record.lineno)
        try:
            same = (site, f"{record.getMessage()[:LINE_CHARS_MAX]} {fields_of(record) or ''}")
        except Exception:
            self.handleError(record)  # words and arguments that do not fit
            return
        repeated = self._repeats.get(same)
        if repeated is not None and now_s - repeated.began_s < PERIOD_S:
            self._leave_out(repeated, record, now_s)
            return
        period = self._sites.get(site)
        if period is None or now_s - period.began_s >= PERIOD_S:
            period = self._sites[site] = _Period(now_s, "%d lines like the following one were left out: %s")
        period.lines += 1
        if period.lines > LINES_PER_PERIOD:
            self._leave_out(period, record, now_s)
            return
        super().emit(record)
        self._repeats[same] = _Period(now_s, "%d more like this: %s")
        self._repeats.move_to_end(same)
        if len(self._repeats) > REPEATS_MAX:
            self._repeats.popitem(last=False)  # what it left out is still logged, at its time

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Say that a line could not be written, without what was to be in it."""
        error = type(sys.exc_info()[1]).__name__
        words = "a log line of %s could not be written: %s"
        said = logging.LogRecord(
            record.name,
            logging.ERROR,
            record.pathname,
            record.lineno,
            words,
            (f"{record.filename}:{record.lineno}", error),
            None,
        )
        try:
            self.stream.write(self.format(said) + self.terminator)
            self.flush()
        except (OSError, ValueError):
            pass  # there is nowhere to log it

    def close(self) -> None:
        """End; what was left out so far is logged."""
        self._say_what_was_left_out(float("inf"))
        super().close()

    def _leave_out(self, period: _Period, record: logging.LogRecord, now_s: float) -> None:
        if not period.left_out:
            self._pending.append(period)
            self._ask_for_a_call(now_s)
        period.leave_out(record)

    def _ask_for_a_call(self, now_s: float) -> None:
        if self._pending and not self._is_timed:
            self._is_timed = True
            began_s = min(period.began_s for period in self._pending)
            self._later(max(0.0, began_s + PERIOD_S - now_s), self._on_time)

    def _on_time(self) -> None:
        self.acquire()
        try:
            self._is_timed = False
            now_s = self._monotonic_s()
            self._say_what_was_left_out(now_s - PERIOD_S)
            self._ask_for_a_call(now_s)
        finally:
            self.release()

    def _say_what_was_left_out(self, began_before_s: float) -> None:
        due = [period for period in self._pending if period.began_s <= began_before_s]
        if due:
            self._pending = [period for period in self._pending if period.began_s > began_before_s]
        for period in due:
            last = period.last
            assert last is not None, "something was left out"
            words = (period.left_out, last.getMessage())
            said = logging.LogRecord(
                last.name, last.levelno, last.pathname, last.lineno, period.words, words, None, last.funcName
            )
            said.__dict__["fields"] = fields_of(last)
            period.left_out = 0
            super().emit(said)


def configure(
    process_name: str,
    level: str = "info",
    log_format: LogFormat = "text",
    fields: Mapping[str, Field] | None = None,
    default: str = "info",
) -> None:
    """Send the log of this process to standard error, each line naming the process.

    ``level`` is what ``poolgrid.server.process.logs`` reads, ``default`` that of all where it names none. ``fields``
    are of every line in JSON. Raises ``ValueError`` for a level that is none.
    """
    levels = read_levels(level, default)
    handler = BoundedHandler(sys.stderr)
    handler.addFilter(add_fields_of_task)
    of_process = {} if fields is None else fields
    handler.setFormatter(
        JsonFormatter(process_name, of_process) if log_format == "json" else LineFormatter(process_name)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(levels.all.upper())
    for name, of_it in {**dict.fromkeys(HOLD_CLIENTS_WORDS, "warning"), **levels.named}.items():
        logging.getLogger(name).setLevel(of_it.upper())


def format_wanted(given: str | None, environment: Mapping[str, str]) -> LogFormat:
    """Return how lines are to be written: by the option, else as scripts for Dynamo set it, else for people.

    Raises ``ValueError`` for what is neither.
    """
    if given is None:
        wants_json = environment.get(DYNAMO_JSON_VARIABLE, "").strip().lower() in TRUE_WORDS
        return "json" if wants_json else "text"
    if given == "text":
        return "text"
    if given == "json":
        return "json"
    raise ValueError(f"configuring logs: --log-format is {given!r}, allowed are text and json; nothing was started")
