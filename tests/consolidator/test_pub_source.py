"""The follower of a PUB engine as a dialogue, without sockets."""

from __future__ import annotations

import pytest

from poolgrid.kernel.kv_events.follower import (
    END_OF_REPLAY,
    REPLAY_ATTEMPTS_MAX,
    REST_TIMEOUT_MS,
    AskReplay,
    NewLife,
    PubEffect,
    PubFollower,
)
from poolgrid.kernel.wire.events import EventBatch
from poolgrid.kernel.wire.identifiers import StreamState, WorkerId, WorkerKey
from tests.consolidator.pub_engine import BLOCK, Cache, frame_of


def follower(has_replay: bool = True) -> PubFollower:
    return PubFollower(WorkerKey(WorkerId("e")), BLOCK, 1000, has_replay, replay_timeout_ms=100, lease_ms=1000)


def frames(count: int, salt: int = 0) -> list[bytes]:
    cache = Cache("vllm", salt)
    return [frame_of([cache.store([salt * 1000 + 10 * n + i for i in range(4)])]) for n in range(count)]


def kinds(effects: list[PubEffect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def live(source: PubFollower, seq: int, payload: bytes, now_ms: float = 0) -> list[PubEffect]:
    return source.live(seq, payload, now_ms, 1000)


def met(sent: list[bytes], has_replay: bool = True) -> PubFollower:
    source = follower(has_replay)
    source.connected(0, 1000)
    source.replayed(END_OF_REPLAY, b"", 0, 0)
    for seq, payload in enumerate(sent):
        live(source, seq, payload)
    return source


def test_a_hole_is_replayed_from_one_frame_before_it() -> None:
    sent = frames(6)
    source = met(sent[:2])

    assert live(source, 4, sent[4]) == [AskReplay(1)]
    assert live(source, 5, sent[5]) == []
    effects = [effect for seq in (1, 2, 3, 4) for effect in source.replayed(seq, sent[seq], 0, 0)]
    effects += source.replayed(END_OF_REPLAY, b"", 0, 0)

    assert [effect.seq for effect in effects if isinstance(effect, EventBatch)] == [2, 3, 4, 5]
    assert kinds(effects) == ["EventBatch"] * 4


def test_a_replay_that_begins_too_late_is_a_loss_and_the_source_is_degraded() -> None:
    sent = frames(8)
    source = met(sent[:2])
    live(source, 7, sent[7])

    effects = source.replayed(5, sent[5], 0, 2000) + source.replayed(6, sent[6], 0, 2000)
    effects += source.replayed(END_OF_REPLAY, b"", 0, 2000)

    assert kinds(effects) == ["NewLife", "EventBatch", "EventBatch", "EventBatch"]
    assert source.degraded
    assert source.counts["source_losses"] == 1


def test_an_engine_without_a_replay_socket_loses_at_once() -> None:
    sent = frames(5)
    source = met(sent[:2], has_replay=False)

    effects = live(source, 4, sent[4])

    assert kinds(effects) == ["NewLife", "EventBatch"]
    assert source.degraded
    cache = Cache("vllm")
    live(source, 5, frame_of([cache.clear()]))
    assert not source.degraded


def test_silence_of_the_replay_socket_is_a_loss_within_its_stated_time() -> None:
    sent = frames(5)
    source = met(sent[:2])
    live(source, 4, sent[4])

    effects: list[PubEffect] = []
    now_ms: float | None = None
    for _ in range(REPLAY_ATTEMPTS_MAX):
        now_ms = source.due_ms()
        assert now_ms is not None
        effects += source.tick(now_ms, 2000)

    assert now_ms == 100 * REPLAY_ATTEMPTS_MAX
    assert kinds(effects) == ["AskReplay"] * (REPLAY_ATTEMPTS_MAX - 1) + ["NewLife", "EventBatch"]
    assert source.degraded


def test_a_sequence_that_goes_backwards_is_a_new_life_that_begins_clean() -> None:
    source = met(frames(5))

    effects = live(source, 0, frames(1, salt=1)[0])

    assert kinds(effects) == ["NewLife", "EventBatch"]
    assert isinstance(effects[1], EventBatch)
    assert effects[1].seq == 0
    assert not source.degraded


def test_a_restart_behind_a_hole_is_found_by_the_frame_before_it() -> None:
    old, new = frames(3), frames(8, salt=1)
    source = met(old)

    assert live(source, 7, new[7]) == [AskReplay(2)]
    effects = source.replayed(2, new[2], 0, 2000)
    assert kinds(effects) == ["NewLife", "AskReplay"]
    assert effects[1] == AskReplay(0)
    effects = [effect for seq in range(7) for effect in source.replayed(seq, new[seq], 0, 0)]
    effects += source.replayed(END_OF_REPLAY, b"", 0, 0)
    assert kinds(effects) == ["EventBatch"] * 8
    assert not source.degraded


def test_a_frame_that_does_not_decode_is_a_loss() -> None:
    source = met(frames(2))

    assert kinds(live(source, 2, b"garbage")) == ["NewLife"]
    assert source.degraded
    assert kinds(live(source, 3, frames(4)[3])) == ["EventBatch"]


@pytest.mark.parametrize("wall_ms", [0, 999])
def test_epochs_grow_even_when_the_clock_jumps_back(wall_ms: int) -> None:
    source = met(frames(2))

    (life, _) = source.live(0, frames(1)[0], 0, wall_ms)

    assert life == NewLife(1001, "sequence went back from 1 to 0")


def test_frames_that_an_answer_leaves_out_are_asked_for_again_as_long_as_each_answer_has_more() -> None:
    """A publisher's socket drops what it cannot send fast enough."""
    sent = frames(29)
    source = follower()
    effects = source.connected(0, 1000)
    answers = 0
    while (asked := [effect for effect in effects if isinstance(effect, AskReplay)]) and answers < 20:
        answers += 1
        effects = [effect for effect in effects if not isinstance(effect, AskReplay)]
        first = asked[-1].from_seq
        kept = [seq for seq in range(first, 29) if seq < first + 5 or seq > first + 8 or seq == 28]
        for seq in kept:
            effects += source.replayed(seq, sent[seq], 0, 1000)
            if isinstance(effects[-1], AskReplay):
                break
        else:
            effects += source.replayed(END_OF_REPLAY, b"", 0, 1000)

    assert source.position[0] == 29
    assert source.health == (StreamState.LIVE, "")
    assert source.counts["source_losses"] == 0


def test_an_answer_that_never_has_the_next_frame_is_a_loss_in_the_end() -> None:
    sent = frames(8)
    source = met(sent[:2])
    live(source, 7, sent[7])

    effects: list[PubEffect] = []
    for _ in range(REPLAY_ATTEMPTS_MAX):
        effects += source.replayed(1, sent[1], 0, 2000) + source.replayed(5, sent[5], 0, 2000)

    assert kinds(effects) == ["AskReplay"] * (REPLAY_ATTEMPTS_MAX - 1) + ["NewLife", "EventBatch"]
    assert source.degraded


@pytest.mark.parametrize("has_replay", [True, False])
def test_an_engine_whose_buffer_begins_late_is_followed_and_trusted_from_there_and_what_is_unknown_is_named(
    has_replay: bool,
) -> None:
    sent = frames(10)
    source = follower(has_replay)
    source.connected(0, 1000)

    if has_replay:
        effects = [effect for seq in range(6, 10) for effect in source.replayed(seq, sent[seq], 0, 1000)]
        effects += source.replayed(END_OF_REPLAY, b"", 0, 1000)
    else:
        effects = [effect for seq in range(6, 10) for effect in live(source, seq, sent[seq])]

    assert kinds(effects) == ["EventBatch"] * 4
    state, reason = source.health
    assert state is StreamState.LIVE
    assert "stored before frame 6" in reason
    assert source.counts["source_losses"] == 0
    live(source, 10, frame_of([Cache("vllm").clear()]))
    assert source.health == (StreamState.LIVE, "")


def test_a_replay_is_over_once_it_reaches_the_live_frames_though_its_end_is_lost() -> None:
    sent = frames(6)
    source = follower()
    source.connected(0, 1000)
    live(source, 4, sent[4])

    effects = [effect for seq in range(4) for effect in source.replayed(seq, sent[seq], 0, 1000)]

    assert [effect.seq for effect in effects if isinstance(effect, EventBatch)] == [0, 1, 2, 3, 4]
    assert source.health == (StreamState.LIVE, "")
    assert kinds(live(source, 5, sent[5])) == ["EventBatch"]


def test_an_answer_that_stops_is_asked_for_again_soon_and_a_silent_publisher_is_given_its_time() -> None:
    sent = frames(6)
    source = PubFollower(WorkerKey(WorkerId("e")), BLOCK, 1000, True, replay_timeout_ms=5_000, lease_ms=30_000)
    source.connected(0, 1000)
    assert source.due_ms() == 5_000
    source.replayed(0, sent[0], 100, 1000)
    source.replayed(1, sent[1], 100, 1000)

    assert source.due_ms() == 100 + REST_TIMEOUT_MS
    assert source.tick(600, 1000) == [AskReplay(1)]
    assert source.due_ms() == 5_600
