"""The log: one line an event, whatever peers and clients wrote into it, and a bounded number of lines."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.runtime.complaints import PEERS_MAX, PERIOD_MS, Complaints, shown_peer
from poolgrid.runtime.logs import (
    LINE_CHARS_MAX,
    LINES_PER_PERIOD,
    PERIOD_S,
    TRACEBACK_MARK,
    BoundedHandler,
    LineFormatter,
    configure,
    one_line,
)

FORGED = "w9\n12:00:00.000 router ERROR the pool is on fire\x1b[2J\x1b]0;owned\x07"


class Log:
    """A logger of its own, its lines, and a clock that stands until moved."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stream = io.StringIO()
        self.handler = BoundedHandler(self.stream, lambda: self.now_s)
        self.handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
        self.logger = logging.Logger("test")
        self.logger.addHandler(self.handler)

    def monotonic_ms(self) -> float:
        return 1000 * self.now_s

    def wall_ms(self) -> int:
        return int(1000 * self.now_s)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


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


def test_a_line_has_a_bounded_length(log: Log) -> None:
    log.logger.warning("%s", "x" * (LINE_CHARS_MAX + 7))
    (line,) = log.lines
    assert line == f"WARNING {'x' * LINE_CHARS_MAX}… (7 more characters)"


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


def test_what_was_left_out_at_the_end_is_said(log: Log) -> None:
    for _ in range(LINES_PER_PERIOD + 1):
        log.logger.error("again")
    log.handler.close()
    assert log.lines[-1] == "ERROR 1 lines like the following one were left out: again"


def test_every_process_writes_so(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure("router")
        logging.getLogger("anybody's").warning("from %s", "a\nb")
        assert capsys.readouterr().err.endswith("router WARNING from a\\nb\n")
    finally:
        root.handlers[:] = before
        root.setLevel(level)


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
