"""The log: one line an event, whatever peers and clients wrote into it, and a bounded number of lines."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.requests.log_fields import Field, about
from poolgrid.server.process.log_lines import (
    FIELD_CHARS_MAX,
    PEERS_MAX,
    PERIOD_MS,
    TRACEBACK_MARK,
    Complaints,
    JsonFormatter,
    LineFormatter,
    one_line,
    shown_peer,
)
from poolgrid.server.process.logs import (
    EVERY_LINE,
    LINES_PER_PERIOD,
    NAMED_MAX,
    PERIOD_S,
    REPEATS_MAX,
    BoundedHandler,
    configure,
    format_wanted,
    read_levels,
)

FORGED = "w9\n12:00:00.000 router ERROR the pool is on fire\x1b[2J\x1b]0;owned\x07"


DATED = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


class Log:
    """A logger of its own, its lines, and a clock that stands until moved."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stream = io.StringIO()
        self.calls: list[tuple[float, Callable[[], None]]] = []
        self.handler = BoundedHandler(self.stream, lambda: self.now_s, self.call_later)
        self.handler.setFormatter(LineFormatter("p"))
        self.logger = logging.Logger("test")
        self.logger.addHandler(self.handler)

    def call_later(self, after_s: float, call: Callable[[], None]) -> None:
        self.calls.append((self.now_s + after_s, call))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        due = [call for at_s, call in self.calls if at_s <= self.now_s]
        self.calls = [each for each in self.calls if each[0] > self.now_s]
        for call in due:
            call()

    def monotonic_ms(self) -> float:
        return 1000 * self.now_s

    def wall_ms(self) -> int:
        return int(1000 * self.now_s)

    @property
    def lines(self) -> list[str]:
        """What was written, without its times."""
        return [re.sub(rf"^{DATED} p ", "", line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.handler.close()


@given(st.text(max_size=80))
def test_any_text_becomes_one_printable_line_and_printable_text_stays_as_it_is(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert line.splitlines() in ([line], [])
    if text.isprintable():
        assert line == text


def test_an_event_is_one_line_whoever_wrote_what_is_in_it(log: Log) -> None:
    log.logger.warning("worker %s joined", FORGED)
    log.logger.info("%s", "Grüße, 世界 \u202e\u2028\ud800")
    assert log.lines == [
        r"WARNING worker w9\n12:00:00.000 router ERROR the pool is on fire\x1b[2J\x1b]0;owned\x07 joined",
        r"INFO Grüße, 世界 \u202e\u2028\ud800",
    ]


def test_the_lines_of_a_traceback_cannot_pass_for_events(log: Log) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.logger.exception("serving failed", stack_info=True)
    first, *rest = log.lines
    assert first == "ERROR serving failed"
    assert any("the pool is on fire" in line for line in rest)
    assert all(line.startswith(TRACEBACK_MARK) and line.isprintable() for line in rest)


def test_one_place_writes_a_bounded_number_of_lines_and_says_what_it_left_out(log: Log) -> None:
    for number in range(LINES_PER_PERIOD + 5):
        log.logger.warning("frame %d is none", number)
    log.logger.warning("another place is heard")
    assert len(log.lines) == LINES_PER_PERIOD + 1
    assert log.lines[-1] == "WARNING another place is heard"

    log.now_s = PERIOD_S
    log.logger.warning("later")
    assert log.lines[-2:] == [
        f"WARNING 5 lines like the following one were left out: frame {LINES_PER_PERIOD + 4} is none",
        "WARNING later",
    ]


def _repeat(log: Log, words: str, request_id: str = "") -> None:
    log.logger.warning(words, extra=about(request_id=request_id))


def test_what_is_said_again_in_the_same_words_is_counted_and_told_in_time_though_nothing_else_is_logged(
    log: Log,
) -> None:
    for _ in range(5):
        _repeat(log, "the disk is full")
    _repeat(log, "the disk is slow")
    log.pass_time(PERIOD_S / 2)
    _repeat(log, "the disk is full")
    assert log.lines == ["WARNING the disk is full", "WARNING the disk is slow"]

    log.pass_time(PERIOD_S / 2)
    assert log.lines[2:] == ["WARNING 5 more like this: the disk is full"]
    assert not log.calls, "nothing is waited for"

    _repeat(log, "the disk is full")
    assert log.lines[3:] == ["WARNING the disk is full"]


def test_the_same_words_about_another_request_are_no_repetition(log: Log) -> None:
    for request_id in ("a", "b", "a"):
        _repeat(log, "it failed", request_id)
    log.handler.close()
    assert log.lines == [
        "WARNING it failed (request_id=a)",
        "WARNING it failed (request_id=b)",
        "WARNING 1 more like this: it failed (request_id=a)",
    ]


def test_repetitions_that_begin_at_different_times_are_each_told_at_their_own(log: Log) -> None:
    _repeat(log, "one")
    _repeat(log, "one")
    log.pass_time(1)
    _repeat(log, "two")
    _repeat(log, "two")
    log.pass_time(PERIOD_S - 1)
    assert log.lines[2:] == ["WARNING 1 more like this: one"]
    log.pass_time(1)
    assert log.lines[3:] == ["WARNING 1 more like this: two"]


def test_lines_that_are_remembered_are_bounded_in_number_and_none_that_was_counted_is_forgotten(log: Log) -> None:
    _repeat(log, "first")
    _repeat(log, "first")
    for number in range(REPEATS_MAX + 50):
        log.now_s += 0.1  # so that the bound of the place does not hold
        _repeat(log, f"another {number}")
    assert len(log.handler._repeats) == REPEATS_MAX
    assert "WARNING 1 more like this: first" in log.lines


def test_lines_that_were_asked_for_one_by_one_are_all_written(log: Log) -> None:
    for _ in range(3):
        log.logger.info("served", extra=EVERY_LINE)
    assert log.lines == ["INFO served"] * 3


def test_words_and_arguments_that_do_not_fit_are_told_without_the_arguments(log: Log) -> None:
    words = "%d of %s"
    log.logger.warning(words, "a secret")
    log.logger.warning("next")
    told, after = log.lines
    assert re.fullmatch(r"ERROR a log line of test_logs\.py:\d+ could not be written: TypeError", told)
    assert after == "WARNING next"


def test_a_thread_tells_of_repetitions_where_there_is_no_other_clock() -> None:
    stream = io.StringIO()
    told = threading.Event()

    class Noticing(BoundedHandler):
        def _on_time(self) -> None:
            super()._on_time()
            told.set()

    times = iter((0.0, PERIOD_S - 0.01, PERIOD_S))
    handler = Noticing(stream, lambda: next(times))
    handler.setFormatter(LineFormatter("p"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    for _ in range(2):
        logger.warning("again")
    assert told.wait(60)
    assert stream.getvalue().endswith("WARNING 1 more like this: again\n")
    handler.close()


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is as it was afterwards."""
    found = logging.getLogger()
    before, level = found.handlers[:], found.level
    named = ("poolgrid.server.router", "starlette", "httpx", "httpcore")
    levels = {name: logging.getLogger(name).level for name in named}
    yield found
    found.handlers[:] = before
    found.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)


@pytest.mark.usefixtures("root")
def test_every_process_writes_so(capsys: pytest.CaptureFixture[str]) -> None:
    configure("router")
    logging.getLogger("anybody's").warning("from %s", "a\nb")
    assert re.fullmatch(rf"{DATED} router WARNING from a\\nb\n", capsys.readouterr().err)


# -- for machines ----------------------------------------------------------------------------------------------------


def _written(words: str, *arguments: object, fields: dict[str, Field] | None = None, **extra: Any) -> dict[str, Any]:
    """A line as JSON, of a process that says of itself that it is worker w1."""
    stream = io.StringIO()
    handler = BoundedHandler(stream)
    handler.setFormatter(JsonFormatter("w1", {"worker": "w1"} if fields is None else fields))
    logger = logging.Logger("poolgrid.server.workers.service")
    logger.addHandler(handler)
    logger.error(words, *arguments, **extra)
    [line] = stream.getvalue().split("\n")[:-1]
    assert line.splitlines() == [line]
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_for_machines_is_an_object_with_what_it_is_about_as_fields() -> None:
    line = _written("it %s", "failed", extra=about(request_id="r-1", trace_id="ab" * 16, pool="", status=500))
    assert re.fullmatch(DATED, line.pop("time"))
    assert line == {
        "level": "error",
        "process": "w1",
        "logger": "poolgrid.server.workers.service",
        "message": "it failed",
        "worker": "w1",
        "request_id": "r-1",
        "trace_id": "ab" * 16,
        "status": 500,
    }


def test_what_a_line_says_of_itself_wins_over_what_the_process_says_but_never_over_when_and_how_severe_it_was() -> None:
    line = _written("x", fields={"worker": "w1"}, extra=about(worker="w2", level="none"))
    assert line["worker"] == "w2"
    assert line["level"] == "error"


def test_a_traceback_is_a_field_and_its_text_is_escaped() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        line = _written("failed", exc_info=True)
    assert line["message"] == "failed"
    assert line["exception"].splitlines()[0] == "Traceback (most recent call last):"
    assert line["exception"].splitlines()[-1] == r"12:00:00.000 router ERROR the pool is on fire\x1b[2J\x1b]0;owned\x07"


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_becomes_one_object_on_one_line(words: str, field: str) -> None:
    line = _written("%s", words, extra=about(request_id=field))
    assert line["message"] == one_line(words)
    assert line.get("request_id", "") == one_line(field)


def test_the_fields_of_a_line_have_a_bounded_length() -> None:
    line = _written("x", extra=about(model="m" * (FIELD_CHARS_MAX + 1)))
    assert line["model"] == f"{'m' * FIELD_CHARS_MAX}… (1 more characters)"


def test_a_line_for_people_adds_what_it_is_about_unless_the_words_have_it(log: Log) -> None:
    log.logger.error("request %s failed", "r-1", extra=about(request_id="r-1", trace_id="00ff", pool="a b=c"))
    assert log.lines == ["ERROR request r-1 failed (trace_id=00ff pool='a b=c')"]


@pytest.mark.parametrize(
    ("given", "environment", "wanted"),
    [
        (None, {}, "text"),
        (None, {"DYN_LOGGING_JSONL": "1"}, "json"),
        (None, {"DYN_LOGGING_JSONL": "True"}, "json"),
        (None, {"DYN_LOGGING_JSONL": "false"}, "text"),
        ("text", {"DYN_LOGGING_JSONL": "1"}, "text"),
        ("json", {}, "json"),
    ],
)
def test_lines_are_json_when_asked_for_also_by_the_scripts_of_others(
    given: str | None, environment: dict[str, str], wanted: str
) -> None:
    assert format_wanted(given, environment) == wanted


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="--log-format is 'xml', allowed are text and json"):
        format_wanted("xml", {})


# -- levels ----------------------------------------------------------------------------------------------------------


def test_levels_are_of_all_and_of_those_that_are_named() -> None:
    assert read_levels("debug") == ("debug", {})
    assert read_levels("Warning, router=debug,starlette.routing = info") == (
        "warning",
        {"poolgrid.server.router": "debug", "starlette.routing": "info"},
    )
    assert read_levels("poolgrid.server.serving.links=debug,poolgrid=error", "warning") == (
        "warning",
        {"poolgrid.server.serving.links": "debug", "poolgrid": "error"},
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("loud", "level 'loud' is none, allowed are debug, info, warning, error"),
        ("info,debug", "'debug' names no logger"),
        ("router=loud", "level 'loud' is none"),
        ("ruoter=debug", "'ruoter' is no module of poolgrid, and no installed package begins so"),
        ("poolgrid.ruoter=debug", "is no module of poolgrid"),
        ("=debug", "'' is no module"),
        ("", "level '' is none"),
        ("httpx=debug", "httpx would write addresses that clients gave"),
        ("info,router=", "level '' is none"),
    ],
)
def test_a_level_that_does_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        read_levels(text)


def test_loggers_that_are_named_are_bounded_in_number() -> None:
    names = ",".join(f"starlette.x{number}=info" for number in range(NAMED_MAX))
    assert len(read_levels(names).named) == NAMED_MAX
    with pytest.raises(ValueError, match=f"more than {NAMED_MAX} loggers"):
        read_levels(f"{names},router=debug")


def test_a_named_logger_has_its_own_level_and_clients_addresses_are_in_no_log(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("router", "debug,router=error")
    for name in ("poolgrid.server.router.service", "poolgrid.kernel.requests.legs", "httpx", "httpcore.http11"):
        logging.getLogger(name).info("from %s", name)
        logging.getLogger(name).error("error of %s", name)
    said = [line.partition(" router ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "ERROR error of poolgrid.server.router.service",
        "INFO from poolgrid.kernel.requests.legs",
        "ERROR error of poolgrid.kernel.requests.legs",
        "ERROR error of httpx",
        "ERROR error of httpcore.http11",
    ]
    assert root.level == logging.DEBUG


def test_a_peer_is_complained_about_once_a_period_with_the_number_of_the_rest(log: Log) -> None:
    complaints = Complaints(log.logger, log)
    for _ in range(1000):
        complaints.about("peer a", "not MessagePack")
    complaints.about("peer b", "too long")
    log.now_s = PERIOD_MS / 1000
    complaints.about("peer a", "not MessagePack")
    complaints.about("peer b", "too long")
    assert log.lines == [
        "WARNING a message from peer a was dropped: not MessagePack",
        "WARNING a message from peer b was dropped: too long",
        "WARNING a message from peer a was dropped: not MessagePack (and 999 more since the last line about it)",
        "WARNING a message from peer b was dropped: too long",
    ]


def test_peers_that_connect_anew_for_each_frame_are_remembered_in_bounded_number(log: Log) -> None:
    complaints = Complaints(log.logger, log)
    for number in range(10 * PEERS_MAX):
        complaints.about(shown_peer(number.to_bytes(5, "big")), "not MessagePack")
    assert len(complaints._said) == PEERS_MAX
    assert len(log.lines) == LINES_PER_PERIOD
