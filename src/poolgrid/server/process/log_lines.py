"""How an event is written: one line for people, or one JSON object for machines.

Rules
    1. An event is one line, whatever is in its text. Much of that text is not ours (names that clients and workers
       chose, headers, addresses, errors of libraries about them): everything that is not printable is escaped, so that
       no text adds a line, moves a terminal's cursor or hides what follows. For people, lines of
       tracebacks are set apart; in JSON a traceback is a field.
    2. A line has at most ``LINE_CHARS_MAX`` characters of the event's own words, a field at most ``FIELD_CHARS_MAX``.
    3. Times are UTC, with the date and milliseconds.
    4. What an event is about (request, trace, worker, pool) is given as fields (``about``). In JSON each is one. For
       people those are added that the words do not have already.

Complaints about what peers send: one line in the log per peer and period, with the number of those left out.

A peer decides how often it sends what cannot be read, and on a plane without CURVE any process is a peer. A line for
each would fill a disk, and hide what matters.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType

import msgspec

from poolgrid.kernel.requests.log_fields import Field
from poolgrid.server.process.clock import Clock

LINE_CHARS_MAX = 8192
"""Of one event's own words: twice the longest reason that the wire carries."""

FIELD_CHARS_MAX = 1024
"""Of one field: four times the longest identifier."""

TRACEBACK_MARK = "  | "
"""Before each line of a traceback: a client's text in an exception cannot pass for an event."""

TRACEBACK_LINES_MAX = 200
"""Of a traceback in JSON, the last ones: where it failed is at the end."""

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

fields_of_task: ContextVar[Mapping[str, Field]] = ContextVar("fields_of_task", default={})  # noqa: B039 - never changed
"""What the lines of a task, and of all that it starts, are about: which worker, where a process has several."""

SECOND = "%Y-%m-%dT%H:%M:%S"


def add_fields_of_task(record: logging.LogRecord) -> bool:
    """Add to a line what its task is about; a filter of handlers."""
    of_task = fields_of_task.get()
    if of_task:
        record.__dict__["fields"] = {**of_task, **fields_of(record)}
    return True


def fields_of(record: logging.LogRecord) -> Mapping[str, Field]:
    """Return what a line is about."""
    found: Mapping[str, Field] = getattr(record, "fields", {})
    return found


def one_line(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    """Return text with everything escaped that is not printable: control characters, line ends, what turns writing."""
    if len(text) > chars_max:
        text = f"{text[:chars_max]}… ({len(text) - chars_max} more characters)"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def written_time(record: logging.LogRecord) -> str:
    """Return when an event happened."""
    whole_s, ms = divmod(int(record.created * 1000), 1000)
    return f"{time.strftime(SECOND, time.gmtime(whole_s))}.{ms:03d}Z"


class LineFormatter(logging.Formatter):
    """Writes events for people: ``2026-11-22T15:04:05.678Z router INFO words (request_id=…)``."""

    def __init__(self, process_name: str) -> None:
        super().__init__(f"%(asctime)s {process_name} %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return written_time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        words = one_line(record.message)
        more = " ".join(
            f"{name}={_one_word(value)}" for name, value in fields_of(record).items() if not _has_word(words, value)
        )
        record.message = f"{words} ({more})" if more else words
        return super().formatMessage(record)

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802
        return _set_apart(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _set_apart(super().formatStack(stack_info))


def _set_apart(text: str) -> str:
    return "\n".join(TRACEBACK_MARK + one_line(line) for line in text.split("\n"))


def _has_word(words: str, value: Field) -> bool:
    return re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", words) is not None


def _one_word(value: Field) -> str:
    text = one_line(str(value), FIELD_CHARS_MAX)
    return repr(text) if any(each in text for each in " \"'=()") else text


class JsonFormatter(logging.Formatter):
    """Writes events for machines: ``time``, ``level``, ``process``, ``logger``, ``message``, fields, ``exception``."""

    def __init__(self, process_name: str, fields: Mapping[str, Field]) -> None:
        """``fields`` are of every line of this process; a line's own win over them."""
        super().__init__()
        self._process_name = process_name
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Field] = {
            "time": written_time(record),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": one_line(record.getMessage()),
        }
        for name, value in {**self._fields, **fields_of(record)}.items():
            line.setdefault(name, one_line(value, FIELD_CHARS_MAX) if isinstance(value, str) else value)
        trouble = [self.formatException(record.exc_info)] if record.exc_info else []
        trouble += [record.stack_info] if record.stack_info else []
        if trouble:
            lines = "\n".join(trouble).split("\n")[-TRACEBACK_LINES_MAX:]
            line["exception"] = "\n".join(map(one_line, lines))
        return msgspec.json.encode(line).decode()


PERIOD_MS = 10_000.0
"""Between two complaints about one peer: often enough to see that it continues."""

PEERS_MAX = 256
"""Peers that are remembered. One that connects again for each frame pushes others out; the log's own limit then
holds."""


@dataclass(slots=True)
class _Said:
    at_ms: float
    left_out: int = 0


class Complaints:
    """Log lines of one receiver about its peers."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._said: OrderedDict[str, _Said] = OrderedDict()

    def about(self, peer: str, what: object) -> None:
        """Log that a message of ``peer`` was dropped and why, unless it was logged a moment ago."""
        self.note(peer, "a message from %s was dropped: %s%s", peer, what)

    def note(self, about: str, line: str, *what: object, level: int = logging.WARNING) -> None:
        """Log a line about something, unless there was one about it a moment ago.

        The line's last ``%s`` is for how many were left out since.
        """
        now_ms = self._clock.monotonic_ms()
        said = self._said.get(about)
        if said is not None and now_ms - said.at_ms < PERIOD_MS:
            said.left_out += 1
            return
        more = f" (and {said.left_out} more since the last line about it)" if said is not None and said.left_out else ""
        self._said[about] = _Said(now_ms)
        self._said.move_to_end(about)
        if len(self._said) > PEERS_MAX:
            self._said.popitem(last=False)
        self._log.log(level, line, *what, more)


def shown_peer(identity: bytes) -> str:
    """Return how a peer's routing id, which it may have chosen itself, is written in the log."""
    return f"peer {identity[:16].hex()}"
