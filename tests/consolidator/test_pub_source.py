"""The follower of a PUB engine as a dialogue, without sockets."""

from __future__ import annotations

import pytest

from poolgrid.kv_events.follower import (
    END_OF_REPLAY,
    REPLAY_ATTEMPTS_MAX,
    AskReplay,
    NewLife,
    PubEffect,
    PubFollower,
)
from poolgrid.wire.events import EventBatch
from poolgrid.wire.identifiers import WorkerId, WorkerKey
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
