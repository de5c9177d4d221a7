"""The fetches of a decode worker: every one ends, with its KV or with a reason, and its source is told once."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from poolgrid.kernel.wire.requests import KvOffered, RefusalKind
from poolgrid.kernel.worker_protocol.kv_fetches import Ask, Effect, Failed, KvFetches, KvWanted, Offered, ReleaseSource
from poolgrid.kernel.worker_protocol.refusal import RefusedError

TIMEOUT_MS = 200.0
KEPT_MS = 1000.0


def wanted(transfer_id: str = "t", endpoint: str = "tcp://p", kept_ms: float = KEPT_MS) -> KvWanted:
    return KvWanted(endpoint, transfer_id, kept_ms)


def test_a_fetch_asks_hands_on_the_answer_and_tells_the_source_at_the_end() -> None:
    fetches = KvFetches(TIMEOUT_MS, 8)
    offer = KvOffered("t", True)

    assert fetches.begin("r", wanted(), 0.0) == [Ask("tcp://p", "t")]
    assert fetches.receive("tcp://p", offer, 5.0) == [Offered("r", offer)]
    assert fetches.end("r") == [ReleaseSource("tcp://p", "t")]
    assert fetches.end("r") == []
    assert (len(fetches), fetches.next_moment_ms()) == (0, None)


def test_a_source_that_does_not_answer_fails_the_fetch_in_time() -> None:
    fetches = KvFetches(TIMEOUT_MS, 8)
    fetches.begin("r", wanted(), 10.0)

    assert fetches.next_moment_ms() == 10.0 + TIMEOUT_MS
    assert fetches.tick(10.0 + TIMEOUT_MS - 1) == []
    released, failed = fetches.tick(10.0 + TIMEOUT_MS)

    assert released == ReleaseSource("tcp://p", "t")
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.cause) == ("r", "timeout")
    assert "tcp://p did not answer for transfer 't' within 200 ms" in failed.reason
    assert fetches.receive("tcp://p", KvOffered("t", True), 500.0) == []


def test_a_source_that_keeps_nothing_fails_the_fetch_at_once() -> None:
    fetches = KvFetches(TIMEOUT_MS, 8)
    fetches.begin("r", wanted(), 0.0)

    released, failed = fetches.receive("tcp://p", KvOffered("t", False), 1.0)

    assert released == ReleaseSource("tcp://p", "t")
    assert isinstance(failed, Failed)
    assert failed.cause == "unknown"
    assert len(fetches) == 0


def test_an_answered_fetch_is_renewed_before_the_source_forgets_and_fails_when_the_source_dies() -> None:
    fetches = KvFetches(TIMEOUT_MS, 8)
    fetches.begin("r", wanted(), 0.0)
    fetches.receive("tcp://p", KvOffered("t", True), 0.0)

    assert fetches.next_moment_ms() == KEPT_MS / 4
    assert fetches.tick(250.0) == [Ask("tcp://p", "t")]
    assert fetches.receive("tcp://p", KvOffered("t", True), 260.0) == []
    assert fetches.tick(510.0) == [Ask("tcp://p", "t")]
    _, failed = fetches.tick(510.0 + TIMEOUT_MS)

    assert isinstance(failed, Failed)
    assert failed.cause == "timeout"


def test_fetches_are_bounded_and_a_transfer_is_fetched_once() -> None:
    fetches = KvFetches(TIMEOUT_MS, 2)
    fetches.begin("r", wanted("t"), 0.0)

    with pytest.raises(RefusedError, match="'t' is already being fetched, for request 'r'") as twice:
        fetches.begin("s", wanted("t"), 0.0)
    assert twice.value.kind is None
    fetches.begin("s", wanted("u"), 0.0)
    with pytest.raises(RefusedError, match="2 requests have their KV fetched, allowed are at most 2") as full:
        fetches.begin("x", wanted("v"), 0.0)
    assert full.value.kind is RefusalKind.BUSY
    assert len(fetches) == 2


class Fetching(RuleBasedStateMachine):
    """Any order of happenings: one release per fetch, and no fetch waits longer than it may."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fetches = KvFetches(TIMEOUT_MS, 4)
        self.live: set[str] = set()
        self.begun: dict[str, int] = {}
        self.released: dict[str, int] = {}
        self.offered: set[str] = set()

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReleaseSource):
                self.released[effect.transfer_id] = self.released.get(effect.transfer_id, 0) + 1
                self.live.discard(effect.transfer_id)
                self.offered.discard(effect.transfer_id)
            elif isinstance(effect, Failed):
                assert effect.request_id not in self.live
            elif isinstance(effect, Offered):
                assert effect.request_id not in self.offered, "handed on twice"
                self.offered.add(effect.request_id)

    @rule(name=st.sampled_from("abcdef"))
    def begin(self, name: str) -> None:
        try:
            effects = self.fetches.begin(name, wanted(name, kept_ms=100.0), self.now)
        except RefusedError:
            assert name in self.live or len(self.live) == 4
            return
        assert name not in self.live
        self.live.add(name)
        self.begun[name] = self.begun.get(name, 0) + 1
        self.apply(effects)

    @rule(name=st.sampled_from("abcdef"), known=st.booleans())
    def answer(self, name: str, known: bool) -> None:
        self.apply(self.fetches.receive("tcp://p", KvOffered(name, known), self.now))

    @rule(name=st.sampled_from("abcdef"))
    def end(self, name: str) -> None:
        self.apply(self.fetches.end(name))
        assert name not in self.live

    @rule(passed=st.sampled_from([1.0, 24.0, 100.0, 199.0, 200.0, 500.0]))
    def wait(self, passed: float) -> None:
        until = self.now + passed
        while (moment := self.fetches.next_moment_ms()) is not None and moment <= until:
            self.now = max(self.now, moment)
            self.apply(self.fetches.tick(self.now))
        self.now = until

    @invariant()
    def every_fetch_is_live_or_released_once(self) -> None:
        assert len(self.fetches) == len(self.live)
        for name, count in self.begun.items():
            assert self.released.get(name, 0) == count - (name in self.live)

    @invariant()
    def something_is_due_while_anything_is_live(self) -> None:
        moment = self.fetches.next_moment_ms()
        assert (moment is not None) == bool(self.live)
        if moment is not None:
            assert moment <= self.now + TIMEOUT_MS

    def teardown(self) -> None:
        # Nobody answers any more.
        self.wait(2 * TIMEOUT_MS)
        assert not self.live


TestFetching = Fetching.TestCase
