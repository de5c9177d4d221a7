"""Which of several registered consolidators a process is connected to."""

from __future__ import annotations

import pytest

from poolgrid.kernel.wire.registration import Registration, encode_registration
from poolgrid.server.discovery.discovery import PATIENCE_MS, DiscoveredConsolidator, Discovery
from poolgrid.server.discovery.registry import Seen
from tests.clock import HandClock


class NoStore:
    """Nothing is looked at: a test says what is there."""


class Follower:
    """A worker that follows the consolidator of the namespace ``blue``."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.names = Discovery(NoStore(), "blue", 10, self.clock)  # type: ignore[arg-type]
        self.moves: list[str] = []
        self.alive: set[str] = set()
        self.is_asked = True
        self.consolidator = DiscoveredConsolidator(
            self.names, ["dyn://blue.consolidator.ingest"], self._moved, self._answers, self.clock
        )

    def _moved(self, where: list[str]) -> None:
        self.moves += where

    def _answers(self) -> bool | None:
        return self.moves[-1] in self.alive if self.is_asked else None

    def sees(self, *entries: tuple[str, str], after_ms: float = 1000.0) -> list[str]:
        """Look; return where it moved since the last look."""
        self.clock.now_ms += after_ms
        before = len(self.moves)
        seen = []
        for life, where in entries:
            made = Registration(
                namespace="blue", component="consolidator", instance="c", life=life * 24, endpoints={"ingest": where},
                lease_ms=600_000,
            )  # fmt: skip
            seen.append(Seen(made.key, encode_registration(made), int(self.clock.now_ms)))
        self.names.registry.look(seen, self.clock.now_ms)
        self.consolidator.look()
        return self.moves[before:]


GOOD, FORGED, NEXT = ("1", "tcp://127.0.0.1:7001"), ("f", "tcp://127.0.0.1:9"), ("2", "tcp://127.0.0.1:7002")


def test_an_entry_does_not_move_who_is_connected_and_the_log_names_both(caplog: pytest.LogCaptureFixture) -> None:
    follower = Follower()
    follower.alive = {GOOD[1], FORGED[1]}
    assert follower.sees(GOOD) == [GOOD[1]]
    for _ in range(30):
        assert follower.sees(GOOD, FORGED) == []
    assert follower.sees(FORGED) == []
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"blue.consolidator.{'1' * 24}" in said.getMessage()
    assert f"blue.consolidator.{'f' * 24}" in said.getMessage()


def test_a_connection_that_is_lost_goes_to_the_later_one_and_back_from_one_that_does_not_answer() -> None:
    follower = Follower()
    follower.alive = {GOOD[1]}
    follower.sees(GOOD)
    follower.sees(GOOD, FORGED)
    follower.alive = set()
    assert follower.sees(GOOD, FORGED) == [FORGED[1]]
    assert follower.sees(GOOD, FORGED) == []
    assert follower.sees(GOOD, FORGED, after_ms=PATIENCE_MS) == [GOOD[1]]
    follower.alive = {GOOD[1]}
    assert follower.sees(GOOD, FORGED, after_ms=PATIENCE_MS) == []


def test_the_next_life_is_followed_when_the_one_before_has_ended() -> None:
    follower = Follower()
    follower.alive = {GOOD[1]}
    follower.sees(GOOD)
    follower.alive = {NEXT[1]}
    assert follower.sees() == []
    assert follower.sees(NEXT) == [NEXT[1]]
    assert follower.sees(GOOD, NEXT) == []
    follower.alive = {GOOD[1]}
    assert follower.sees(GOOD, NEXT) == [GOOD[1]]


def test_every_one_is_tried_until_one_answers() -> None:
    follower = Follower()
    tried = [where for _ in range(6) for where in follower.sees(GOOD, NEXT, FORGED, after_ms=PATIENCE_MS)]
    assert tried == [FORGED[1], NEXT[1], GOOD[1], FORGED[1], NEXT[1], GOOD[1]]


def test_a_worker_that_has_asked_nothing_yet_follows_the_entry() -> None:
    follower = Follower()
    follower.is_asked = False
    assert follower.sees(GOOD) == [GOOD[1]]
    assert follower.sees(GOOD, FORGED, after_ms=10 * PATIENCE_MS) == []
    assert follower.sees(FORGED) == [FORGED[1]]


def test_two_lives_at_one_address_are_one_place(caplog: pytest.LogCaptureFixture) -> None:
    follower = Follower()
    follower.alive = {GOOD[1]}
    follower.sees(GOOD)
    assert follower.sees(GOOD, ("3", GOOD[1])) == []
    follower.alive = set()
    assert follower.sees(GOOD, ("3", GOOD[1]), after_ms=10 * PATIENCE_MS) == []
    assert not [record for record in caplog.records if record.levelno >= 30]
