"""What was recorded of a router's decisions derives them again, bit for bit; what is missing or wrong is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.journal.framing import FILE_HEADER, JournalCorrupt, frame, payload_at, scan
from poolgrid.kernel.journal.stored_records import offset_of
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.wire.events import FOLLOWED_GROUP, BlocksStored, GroupsReported, StreamStateChanged
from poolgrid.kernel.wire.hashing import child_hash, pack_hashes, pack_tokens, unpack_hashes
from poolgrid.kernel.wire.identifiers import StreamState, Tier
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.consolidator.journal.inspection import state_at
from poolgrid.server.router.decision_journal.entries import (
    Checkpoint,
    DecisionMade,
    InputsLost,
    RouterSettingsNoted,
    encoder,
)
from poolgrid.server.router.decision_journal.reader import StoredEntry, decisions_about, stored_entries
from poolgrid.server.router.decision_journal.recorder import BELIEFS_SHARE
from poolgrid.server.router.decision_journal.traffic import read_recording
from tests.consolidator.journal_builder import FakeDisk
from tests.router.fleet_builder import decided, worker_key
from tests.router.recorded_router import BLOCKS_MAX, NAMES, WAITED_MS, RecordedRouter, written

T = TypeVar("T")

POLICIES = ("kv", "approximate", "round-robin", "random", "least-loaded")


def recorded(
    steps: int = 300, change: Callable[[RecordedRouter, int], None] | None = None, **given: object
) -> RecordedRouter:
    """A router after many steps, everything written."""

    async def run() -> RecordedRouter:
        router = RecordedRouter(**given)  # type: ignore[arg-type]
        for name in NAMES:
            router.join(name)
        for number in range(steps):
            router.step()
            if change is not None:
                change(router, number)
            if number % 20 == 0:
                await written(router)
        await router.recorder.stop()
        return router

    return asyncio.run(run())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_decision_is_derived_again_with_crashes_expiries_and_a_sampling_policy(policy: str, seed: int) -> None:
    router = recorded(seed=seed, policy=policy)

    outcome = router.replay()

    assert outcome.difference is None
    assert outcome.identical == router.made > 50
    assert (outcome.not_derivable, outcome.lost_decisions) == (0, 0)


def test_a_workers_stream_that_became_suspect_is_replayed_with_the_predictions_in_its_place() -> None:
    # Most requests report nothing reused, so workers become suspect sooner or later.
    router = recorded(steps=500, seed=5, honesty=0.1, churn=0.05, worker_queue_factor=2)

    outcome = router.replay()

    assert router.projection.trust.verdicts > 0
    assert outcome.difference is None
    assert outcome.identical == router.made


def look_ahead(router: RecordedRouter, number: int) -> None:
    """Half of the workers have engines whose hashes cover the token behind a block; they hold some blocks with one."""
    for worker in [*sorted(router.joined)][::2]:
        router.say(worker, GroupsReported((), following_tokens=1))
        names = [child_hash(pack_tokens([number % 2]), 1000 * (number % 4) + block) for block in range(30)]
        router.say(worker, BlocksStored(None, pack_hashes(names), Tier.DEVICE, FOLLOWED_GROUP))


def test_the_tokens_behind_blocks_are_recorded() -> None:
    router = recorded(steps=200, seed=3, change=look_ahead)

    outcome = router.replay()

    assert outcome.difference is None
    assert outcome.identical == router.made > 30
    assert any(made.request.following for made in entries_of(router.decisions_disk, DecisionMade))


def kept_from_each_segment(router: RecordedRouter) -> list[FakeDisk]:
    """The decision journal as retention leaves it: without its first segment, its first two, and so on."""
    files = router.decisions_disk.files
    names = router.decisions_disk.names()
    assert len(names) > 2
    return [FakeDisk({name: bytes(files[name]) for name in names[kept:]}) for kept in range(1, len(names))]


def entries_of(disk: FakeDisk, kind: type[T]) -> list[T]:
    return [each.entry for each in stored_entries(disk) if isinstance(each.entry, kind)]


def become_stale_and_heal(router: RecordedRouter, number: int) -> None:
    """Now and then a worker's stream is lost, and one is found again."""
    workers = sorted(router.joined)
    if workers and number % 37 == 5:
        lost = StreamStateChanged("worker", StreamState.STALE, f"no answer since {number}")
        router.say(workers[number % len(workers)], lost, source="consolidator")
    if workers and number % 101 == 60:
        router.say(workers[0], StreamStateChanged("worker", StreamState.LIVE), source="consolidator")


MIDWAY: dict[str, dict[str, Any]] = {
    "trusted workers": {"seed": 3, "policy": "field"},
    "a policy that counts": {"seed": 3, "policy": "round-robin"},
    "a policy that learns": {"seed": 3},
    "approximate mode": {"seed": 3, "policy": "approximate", "approximate_ttl_ms": 2000},
    "late starts": {"seed": 3, "starts_late": True},
    "stale workers": {"seed": 3, "change": become_stale_and_heal},
    "suspect workers": {"seed": 5, "honesty": 0.1, "churn": 0.05},
}


@pytest.mark.parametrize("name", MIDWAY)
def test_a_replay_can_begin_at_any_segment(name: str) -> None:
    router = recorded(steps=900, segment_bytes=60_000, **MIDWAY[name])
    identical = 0
    for decisions in kept_from_each_segment(router):
        outcome = router.replay(decisions=decisions)

        assert outcome.difference is None
        assert outcome.identical == len(entries_of(decisions, DecisionMade))
        assert outcome.not_derivable == 0
        identical += outcome.identical
    assert identical > 100


@pytest.mark.parametrize("name", ["approximate mode", "suspect workers"])
def test_a_checkpoint_says_what_the_router_believed_by_its_own_choices(name: str) -> None:
    router = recorded(steps=900, segment_bytes=60_000, **MIDWAY[name])
    last = entries_of(router.decisions_disk, Checkpoint)[-1]
    projection = router.projection
    believed = projection.predictions

    assert last.beliefs is not None
    assert not last.complete, "a reader that knows no beliefs must not begin here"
    if name != "approximate mode":
        assert [worker_id for worker_id, _, _ in last.beliefs.untrusted]
    # Said once each, so it is never more than what is held.
    hashes = [(each.worker, one) for each in last.beliefs.blocks for one in unpack_hashes(each.path)]
    assert len(hashes) == len(set(hashes)) > 0
    assert sum(believed.index.held_blocks(worker_key(name)) for name in NAMES) > 0


SMALL = 16_000
"""Bytes of a segment that has no room for all beliefs."""


def test_a_checkpoint_that_had_no_room_for_all_beliefs_is_replayed_exactly_once_they_have_expired() -> None:
    router = recorded(steps=900, seed=3, policy="approximate", approximate_ttl_ms=3000, segment_bytes=SMALL)
    cut = 0
    for decisions in kept_from_each_segment(router):
        first = entries_of(decisions, Checkpoint)[0]
        made = entries_of(decisions, DecisionMade)
        assert first.beliefs is not None
        blocks = sum(len(each.path) for each in first.beliefs.blocks) // 8
        assert blocks <= SMALL // BELIEFS_SHARE // 8
        settled = [each for each in made if each.now_ms >= first.beliefs.exact_from_ms]

        outcome = router.replay(decisions=decisions)

        assert outcome.difference is None
        assert outcome.identical + outcome.not_derivable == len(made)
        assert outcome.identical >= len(settled)
        assert outcome.not_derivable == 0 or "lacks the oldest" in str(outcome.causes)
        cut += outcome.not_derivable
    assert cut > 0


def test_what_is_left_of_an_index_over_its_budget_is_not_guessed_at() -> None:
    given = {**MIDWAY["approximate mode"], "seed": 6, "index_budget_bytes": 40 * 128}
    router = recorded(steps=900, segment_bytes=60_000, **given)
    assert router.projection.index.counters.evicted_blocks > 0
    assert router.replay().identical == router.made
    for decisions in kept_from_each_segment(router):
        outcome = router.replay(decisions=decisions)

        assert outcome.difference is None
        assert outcome.identical + outcome.not_derivable == len(entries_of(decisions, DecisionMade))


def test_checkpoints_never_take_more_than_half_of_a_journal() -> None:
    router = recorded(steps=400, segment_bytes=200, **MIDWAY["suspect workers"])
    disk = router.decisions_disk
    heads = [each.size for each in stored_entries(disk) if isinstance(each.entry, Checkpoint | RouterSettingsNoted)]

    assert len(disk.names()) > 5
    assert max(heads) > 200
    last = disk.size(disk.names()[-1])
    assert sum(heads) <= (sum(map(disk.size, disk.names())) - last) / 2 + last


def changed_checkpoint(disk: FakeDisk, change: Callable[[Checkpoint], Checkpoint]) -> FakeDisk:
    """A copy whose first checkpoint was changed, with its checksums."""
    copy = disk.copy()
    name = copy.names()[0]
    data = bytes(copy.files[name])
    first = offset_of(name)
    positions, _, _ = scan(data, FILE_HEADER.size, first)
    payloads = [payload_at(data, position) for position in positions]
    (at,) = [at for at, payload in enumerate(payloads) if b"Checkpoint" in payload[:20]]
    payloads[at] = encoder.encode(change(msgspec.msgpack.decode(payloads[at], type=Checkpoint)))
    entries = [frame(payload, number) for number, payload in enumerate(payloads, first)]
    copy.files[name] = bytearray(data[: FILE_HEADER.size] + b"".join(entries))
    return copy


def without_beliefs(checkpoint: Checkpoint) -> Checkpoint:
    return msgspec.structs.replace(checkpoint, beliefs=None)


def with_others_beliefs(checkpoint: Checkpoint) -> Checkpoint:
    beliefs = checkpoint.beliefs
    assert beliefs is not None
    return msgspec.structs.replace(
        checkpoint, beliefs=msgspec.structs.replace(beliefs, workers=beliefs.workers[1:] + beliefs.workers[:1])
    )


def with_nothing_believed(checkpoint: Checkpoint) -> Checkpoint:
    beliefs = checkpoint.beliefs
    assert beliefs is not None
    return msgspec.structs.replace(checkpoint, beliefs=msgspec.structs.replace(beliefs, blocks=[]))


def with_everyone_trusted(checkpoint: Checkpoint) -> Checkpoint:
    beliefs = checkpoint.beliefs
    assert beliefs is not None
    return msgspec.structs.replace(checkpoint, beliefs=msgspec.structs.replace(beliefs, untrusted=[]))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("approximate mode", with_others_beliefs),
        ("stale workers", with_nothing_believed),
        ("suspect workers", with_everyone_trusted),
    ],
)
def test_tampered_beliefs_are_found(name: str, change: Callable[[Checkpoint], Checkpoint]) -> None:
    router = recorded(steps=900, segment_bytes=60_000, **MIDWAY[name])
    kept = kept_from_each_segment(router)

    def matters(checkpoint: Checkpoint) -> bool:
        """Of trusted workers, too, choices are kept until they expire; nothing goes by them."""
        return checkpoint.beliefs is not None and (bool(checkpoint.beliefs.untrusted) or name == "approximate mode")

    believing = next(each for each in kept if matters(entries_of(each, Checkpoint)[0]))
    decisions = changed_checkpoint(believing, change)

    assert router.replay(decisions=decisions).difference is not None


def test_beliefs_that_do_not_fit_together_are_damage_and_located() -> None:
    router = recorded(steps=900, segment_bytes=60_000, **MIDWAY["approximate mode"])

    def torn(checkpoint: Checkpoint) -> Checkpoint:
        assert checkpoint.beliefs is not None
        return msgspec.structs.replace(checkpoint, beliefs=msgspec.structs.replace(checkpoint.beliefs, workers=[]))

    decisions = changed_checkpoint(kept_from_each_segment(router)[0], torn)

    with pytest.raises(JournalCorrupt, match="beliefs about worker 0 of 0"):
        router.replay(decisions=decisions)


def test_a_router_that_begins_again_is_followed_into_its_next_life() -> None:
    async def run() -> RecordedRouter:
        router = RecordedRouter(seed=4)
        for name in NAMES:
            router.join(name)
        for _ in range(3):
            for _ in range(100):
                router.step()
            await router.recorder.stop()
            router.begin()
        await router.recorder.stop()
        return router

    router = asyncio.run(run())
    outcome = router.replay()

    assert outcome.difference is None
    assert outcome.identical == router.made


def tampered(disk: FakeDisk, change: Callable[[DecisionMade], DecisionMade]) -> tuple[FakeDisk, int]:
    """A copy in which one choice in the middle was changed, with its checksums."""
    copy = disk.copy()
    (name,) = copy.names()
    data = bytes(copy.files[name])
    positions, _, _ = scan(data, FILE_HEADER.size, 0)
    payloads = [payload_at(data, position) for position in positions]
    made = {
        at: msgspec.msgpack.decode(payload, type=DecisionMade)
        for at, payload in enumerate(payloads)
        if b"DecisionMade" in payload[:20]
    }
    choices = [at for at, decision in made.items() if decision.rows > 1]
    at = choices[len(choices) // 2]
    payloads[at] = encoder.encode(change(made[at]))
    entries = [frame(payload, number) for number, payload in enumerate(payloads)]
    copy.files[name] = bytearray(data[: FILE_HEADER.size] + b"".join(entries))
    return copy, at


CHANGES: dict[str, Callable[[DecisionMade], DecisionMade]] = {
    "another worker": lambda made: msgspec.structs.replace(made, row=(made.row + 1) % made.rows),
    "another reason": lambda made: msgspec.structs.replace(made, reason="because"),
    "another prompt length": lambda made: msgspec.structs.replace(
        made, request=msgspec.structs.replace(made.request, isl=made.request.isl + 77)
    ),
    "another offset": lambda made: msgspec.structs.replace(made, offset=1),
    "another prompt": lambda made: msgspec.structs.replace(made, path=b""),
    "one more filtered out": lambda made: msgspec.structs.replace(made, filtered=[*made.filtered, (0, "busy")]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tampered_decision_is_found_and_both_sides_are_shown(name: str) -> None:
    router = recorded(seed=6)
    decisions, at = tampered(router.decisions_disk, CHANGES[name])

    difference = router.replay(decisions=decisions).difference

    assert difference is not None
    # A tampered input may show in this decision or, through the books, in one after it.
    assert difference.number >= at
    assert difference.recorded != difference.derived


def test_records_of_another_stream_are_not_taken_for_those_that_the_router_saw() -> None:
    router = recorded(seed=7)
    other = recorded(seed=8)

    difference = router.replay(pool=other.pool_disk).difference

    assert difference is not None
    assert "the stream" in difference.what


def test_inputs_beyond_the_limit_are_dropped_counted_and_said_and_the_rest_is_derived() -> None:
    async def run() -> RecordedRouter:
        router = RecordedRouter(seed=9, queue_limit=100)
        for name in NAMES:
            router.join(name)
        for number in range(900):
            router.step()  # nothing is written meanwhile, except every 300 steps
            if number % 300 == 299:
                await written(router)
        await router.recorder.stop()
        return router

    router = asyncio.run(run())
    outcome = router.replay()

    assert outcome.difference is None
    assert outcome.lost_decisions == router.recorder.counters.lost_decisions > 0
    assert outcome.identical + outcome.not_derivable + outcome.lost_decisions == router.made
    lost = [each.entry for each in stored_entries(router.decisions_disk) if isinstance(each.entry, InputsLost)]
    assert "more than 100 inputs waited" in lost[0].reason


def test_a_full_disk_stops_the_record_and_not_the_router_and_the_record_goes_on_from_a_checkpoint() -> None:
    async def run() -> RecordedRouter:
        router = RecordedRouter(seed=10)
        for name in NAMES:
            router.join(name)
        for number in range(600):
            router.step()
            if number == 200:
                await written(router)
                router.decisions_disk.room = 500
            if number in (250, 300):
                await written(router, lambda: bool(router.recorder.failing))
            if number == 400:
                router.decisions_disk.room = None
                await written(router, lambda: not router.recorder.failing)
        await router.recorder.stop()
        return router

    router = asyncio.run(run())
    outcome = router.replay()

    assert router.recorder.counters.failed_writes > 0
    assert outcome.difference is None
    assert 0 < outcome.lost_decisions < router.made
    assert outcome.identical + outcome.not_derivable + outcome.lost_decisions == router.made
    assert outcome.identical > 100


def test_decisions_before_the_pools_journal_begins_are_counted_and_the_rest_is_derived() -> None:
    router = recorded(steps=800, seed=11, segment_bytes=30_000)
    journal = FileJournal(router.pool_disk, JournalSettings(segment_bytes=4000, retention_bytes=0, retention_ms=0))
    middle = FileJournal(router.pool_disk).recover(BLOCKS_MAX)
    assert middle.offset > 100
    journal.write_snapshot(state_at(router.pool_disk, middle.offset // 2, BLOCKS_MAX).freeze())
    assert journal.retain(10**15) > 0

    outcome = router.replay()

    assert outcome.difference is None
    assert outcome.not_derivable > 0
    assert "no longer holds" in str(outcome.causes)
    assert outcome.identical > 0
    assert outcome.identical + outcome.not_derivable == router.made


def test_a_request_is_explained_from_the_journal_with_what_was_really_reused() -> None:
    router = recorded(seed=12, steps=50, change=lambda router, number: router.recorder.realised("request-7", 0, 48))

    (found,) = decisions_about(router.decisions_disk, "request-7")

    explained = found.decision.explanation()
    assert explained.request_id == "request-7"
    assert explained.realised_cached_tokens == 48
    assert {row.worker for row in explained.rows} | set(explained.filtered) <= set(NAMES)
    assert found.settings is not None
    assert found.settings.settings["policy"] == "kv"
    assert decisions_about(router.decisions_disk, "nobody") == []
    (by_body,) = decisions_about(router.decisions_disk, "chatcmpl-request-7")
    assert by_body.decision.explanation() == explained


def test_traffic_came_when_it_began_to_wait_not_when_it_had_its_worker() -> None:
    router = recorded(seed=4)

    recording = read_recording(router.pool_disk, [router.decisions_disk], BLOCKS_MAX)

    decided = {
        entry.request.request_id: entry
        for stored in reversed(list(stored_entries(router.decisions_disk)))
        if isinstance(entry := stored.entry, DecisionMade)
    }
    waited = {each.request_id: decided[each.request_id].time_ms - each.time_ms for each in recording.requests}
    assert set(waited.values()) == {0, round(WAITED_MS), round(2 * WAITED_MS)}
    assert all(decided[request_id].queued_ms == waited[request_id] for request_id in waited)
    assert [each.time_ms for each in recording.requests] == sorted(each.time_ms for each in recording.requests)


def test_a_prediction_is_explained_from_the_journal_with_what_came_of_it() -> None:
    router = recorded(
        seed=12,
        steps=50,
        policy="kv",
        change=lambda router, number: router.recorder.first_token("request-7", 0, 123.5),
    )

    (found,) = decisions_about(router.decisions_disk, "request-7")

    explained = found.decision.explanation()
    assert explained.expected_ttft_ms is not None
    assert explained.expected_ttft_ms > 0.0
    assert explained.realised_ttft_ms == 123.5
    assert "pace" in explained.rows[0].terms


def test_a_byte_flipped_anywhere_is_located_and_everything_before_it_is_read() -> None:
    router = recorded(seed=13, steps=60, segment_bytes=6000)
    names = router.decisions_disk.names()
    assert len(names) > 1
    entries = [(each.number, each.entry) for each in stored_entries(router.decisions_disk)]
    for name in names:
        size = router.decisions_disk.size(name)
        for position in (*range(24), *range(24, size, 97), size - 1):
            disk = router.decisions_disk.copy()
            disk.files[name][position] ^= 0x20
            read: list[StoredEntry] = []

            with pytest.raises(JournalCorrupt) as caught:
                read.extend(stored_entries(disk))

            assert caught.value.file == name
            assert caught.value.position <= position
            assert caught.value.offset == len(read)
            assert [(each.number, each.entry) for each in read] == entries[: len(read)]
            assert "only the decisions in it are lost" in caught.value.remedy


def test_entries_of_a_later_version_are_skipped_and_counted() -> None:
    router = recorded(seed=14, steps=60)
    (name,) = router.decisions_disk.names()
    count = len(list(stored_entries(router.decisions_disk)))
    unknown = msgspec.msgpack.encode(["WeatherNoted", 3, "rain"])
    router.decisions_disk.files[name] += frame(unknown, count)

    outcome = router.replay()

    assert outcome.difference is None
    assert outcome.remarks.unknown == {"WeatherNoted": 1}
    assert outcome.identical == router.made


def test_a_dry_run_leaves_a_counting_policy_where_it_was() -> None:
    async def run() -> list[str]:
        router = RecordedRouter(policy="round-robin")
        for name in NAMES:
            router.join(name)
        await router.recorder.stop()
        request = RoutingRequest("r", "m", 32, 16, 2)
        return [
            str(decided(router.selector.select(WorkerWanted(request, [1, 2], 0.0, 0), dry_run=dry)).worker)
            for dry in (True, True, False, True, False)
        ]

    assert asyncio.run(run()) == ["a", "a", "a", "b", "b"]
