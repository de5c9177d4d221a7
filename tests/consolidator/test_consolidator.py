"""The consolidator's core as a dialogue: messages in, records and replies out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.consolidation.consolidator import (
    Consolidator,
    ConsolidatorLimits,
    ConsolidatorTurn,
    MemberJoined,
    MemberLeft,
    Now,
)
from poolgrid.kernel.consolidation.pool_state import FrozenPool, PoolState
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import ChatSpec, MediaSpec, WorkerCard
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksStored,
    CacheCleared,
    EventBatch,
    JournalRecord,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
    StreamStateChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.identifiers import StreamState, Tier, WorkerId, WorkerKey
from poolgrid.kernel.wire.ingest import (
    Acknowledged,
    FromConsolidator,
    Goodbye,
    Heartbeat,
    Hello,
    JoinRefused,
    Resend,
    ToConsolidator,
    Unknown,
    Welcome,
)
from poolgrid.kernel.wire.limits import CHAT_TEMPLATE_CHARS_MAX, POOL_TEMPLATES_CHARS_MAX
from tests.consolidator.pusher import batch, removed
from tests.examples import examples
from tests.router.fleet_builder import make_card, stored

W = WorkerKey(WorkerId("w"))


class Bench:
    """A core, everything it wrote, and a clock that stands until moved."""

    def __init__(self, pool: PoolState | None = None, **limits: int) -> None:
        self.now_ms = 0.0
        self.records: list[JournalRecord] = []
        self.members: list[MemberJoined | MemberLeft] = []
        self.core = Consolidator(pool or PoolState(), "c1", ConsolidatorLimits(**limits), self.now())

    def now(self) -> Now:
        return Now(self.now_ms, 1_000_000 + int(self.now_ms))

    def close(self, turn: ConsolidatorTurn) -> list[FromConsolidator]:
        self.core.finish(turn)
        self.records.extend(turn.records)
        self.members.extend(turn.members)
        return [reply for _, reply in turn.replies]

    def say(self, message: ToConsolidator | EventBatch, peer: bytes = b"p") -> list[FromConsolidator]:
        turn = ConsolidatorTurn(self.now())
        if isinstance(message, EventBatch):
            self.core.batch(peer, message, turn)
        else:
            self.core.receive(peer, message, turn)
        return self.close(turn)

    def expire(self) -> None:
        turn = ConsolidatorTurn(self.now())
        self.core.expire(turn)
        self.close(turn)

    def told(self) -> list[str]:
        return [type(event).__name__ for record in self.records for event in record.events]


def hello(
    worker: str = "w",
    epoch: int = 1,
    next_seq: int = 0,
    oldest_seq: int = 0,
    rank: int = 0,
    with_card: WorkerCard | None = None,
) -> Hello:
    return Hello(worker, rank, epoch, with_card or make_card(), next_seq, oldest_seq)


def folded(records: list[JournalRecord], upto: int | None = None) -> PoolState:
    pool = PoolState()
    for record in records[:upto]:
        pool.apply(codec.journal_record.decode(codec.journal_record.encode(record)))
    return pool


def reload(frozen: FrozenPool) -> PoolState:
    return PoolState.load(frozen.offset, [each.entry for each in frozen.workers], frozen.source_chains())


def same(one: PoolState, other: PoolState) -> None:
    a, b = one.freeze(), other.freeze()
    assert a.offset == b.offset
    assert [worker.entry for worker in a.workers] == [worker.entry for worker in b.workers]
    for left, right in zip(a.workers, b.workers, strict=True):
        assert {(tier, group, source): held for tier, group, source, held in left.held if held} == {
            (tier, group, source): held for tier, group, source, held in right.held if held
        }


def test_a_worker_joins_pushes_and_is_acknowledged_with_the_next_number() -> None:
    bench = Bench()

    assert bench.say(hello()) == [Welcome("w", 0, 1, 0, "c1", 3000)]
    assert bench.say(batch([stored([1, 2])], 0)) == [Acknowledged("w", 0, 1, 1, "c1")]

    assert [record.offset for record in bench.records] == [0, 1]
    assert bench.told() == ["WorkerJoined", "BlocksStored"]
    assert bench.records[1].recorded_ms == 1_000_000


def test_the_readers_of_a_worker_that_joins_with_batches_to_send_are_told_to_wait_for_them() -> None:
    bench = Bench()
    bench.say(hello(next_seq=3))
    [joined] = bench.records
    assert joined.events[1:] == [StreamStateChanged("worker", StreamState.SYNCING, "its first 3 batches are awaited")]

    bench.say(batch([SnapshotBegan()], 0))
    bench.say(batch([stored([1, 2])], 1))
    assert folded(bench.records).workers[W].stream("worker").state is StreamState.SNAPSHOTTING
    bench.say(batch([SnapshotEnded()], 2))
    assert folded(bench.records).workers[W].stream("worker").state is StreamState.LIVE


def test_a_duplicate_changes_nothing_and_is_acknowledged_again() -> None:
    bench = Bench()
    bench.say(hello())
    bench.say(batch([stored([1])], 0))

    assert bench.say(batch([stored([1])], 0)) == [Acknowledged("w", 0, 1, 1, "c1")]
    assert len(bench.records) == 2
    assert bench.core.tally.duplicates == 1


def test_a_gap_is_asked_for_once_and_again_only_after_the_retry_time() -> None:
    bench = Bench(resend_retry_ms=200)
    bench.say(hello())

    assert bench.say(batch([stored([5])], 2)) == [Resend("w", 0, 1, 0)]
    assert bench.say(batch([stored([6])], 3)) == []
    bench.now_ms = 250
    assert bench.say(batch([stored([7])], 4)) == [Resend("w", 0, 1, 0)]
    assert bench.told() == ["WorkerJoined", "StreamStateChanged"]
    assert bench.core.tally.gaps == 1


def test_a_batch_lost_at_the_end_is_noticed_by_the_heartbeat() -> None:
    bench = Bench()
    bench.say(hello())

    assert bench.say(Heartbeat("w", 0, 1, 1)) == [Resend("w", 0, 1, 0), Acknowledged("w", 0, 1, 0, "c1")]


def test_missing_batches_are_replaced_by_a_restated_cache_and_open_requests_are_lost() -> None:
    bench = Bench()
    bench.say(hello())
    bench.say(batch([stored([1, 2]), RequestStarted("r1", 32, 0, 2), RequestStarted("r2", 32, 0, 2)], 0))

    restated: list[AnyEvent] = [SnapshotBegan(), stored([9]), RequestStarted("r2", 32, 0, 2), SnapshotEnded()]
    assert bench.say(batch(restated, 7)) == [Acknowledged("w", 0, 1, 8, "c1")]

    worker = bench.core.pool.workers[W]
    assert worker.presence.counts() == (1, 0, 0)
    assert list(worker.requests) == ["r2"]
    assert RequestFinished("r1", "lost") in [event for record in bench.records for event in record.events]
    assert not worker.restating
    same(folded(bench.records), bench.core.pool)


def test_a_new_epoch_ends_the_old_life_before_the_new_one_begins() -> None:
    bench = Bench()
    bench.say(hello())
    bench.say(batch([stored([1, 2])], 0))

    bench.say(hello(epoch=2))

    assert bench.told()[-2:] == ["WorkerLeft", "WorkerJoined"]
    assert len(bench.core.pool.workers[W].presence) == 0
    assert bench.say(batch([stored([3])], 0, epoch=2)) == [Acknowledged("w", 0, 2, 1, "c1")]


def test_an_older_life_is_refused_whatever_it_says() -> None:
    bench = Bench()
    bench.say(hello(epoch=5))

    for message in (hello(epoch=4), batch([stored([1])], 0, epoch=4), Heartbeat("w", 0, 4, 0)):
        (refused,) = bench.say(message)
        assert isinstance(refused, JoinRefused)
        assert "epoch 4" in refused.reason
    assert bench.told() == ["WorkerJoined"]


def test_a_life_that_counts_backwards_is_a_new_life() -> None:
    bench = Bench()
    bench.say(hello())
    bench.say(batch([stored([1])], 0))

    (welcome,) = bench.say(hello(next_seq=0))

    assert isinstance(welcome, Welcome)
    assert welcome.next_seq == 0
    assert bench.told() == ["WorkerJoined", "BlocksStored", "WorkerLeft", "WorkerJoined"]


def test_a_worker_that_nobody_knows_is_told_to_say_hello() -> None:
    bench = Bench()

    assert bench.say(batch([stored([1])], 0)) == [Unknown("w", 0)]
    assert bench.say(Heartbeat("w", 0, 1, 0)) == [Unknown("w", 0)]
    bench.say(hello(epoch=1))
    assert bench.say(batch([stored([1])], 0, epoch=2)) == [Unknown("w", 0)]


@pytest.mark.parametrize(
    ("changes", "rank", "reason"),
    [
        ({"block_size": 32}, 0, "block_size is 32"),
        ({"block_size": 0}, 0, "integers from 1"),
        ({"hash_spec": "sha256"}, 0, "hash_spec is 'sha256'"),
        ({"dp_size": 2}, 2, "dp_rank is 2"),
        ({"dp_size": 0}, 0, "dp_rank is 0"),
        ({"model": ""}, 0, "model is empty"),
        ({"model": "a\nb"}, 0, "model is 'a\\nb', allowed are printable"),
        ({"loras": ("good", "\x1b[2J")}, 0, "loras[1] is '\\x1b[2J'"),
        ({"request_endpoint": "tcp://http://w9:4001"}, 0, "request_endpoint is 'tcp://http://w9:4001', which has an"),
        ({"request_endpoint": "tcp://w9"}, 0, "which names no port; allowed is tcp://host:port"),
        ({"request_endpoint": "inproc://x"}, 0, "which does not begin with tcp://"),
        ({"chat": ChatSpec("", "a\tb")}, 0, "chat.tool_call_parser is 'a\\tb', allowed are printable"),
        ({"http_endpoint": "http://w9:70000"}, 0, "http_endpoint is 'http://w9:70000', which has the port '70000'"),
    ],
)
def test_a_card_that_does_not_fit_the_pool_is_refused_with_the_reason(
    changes: dict[str, object], rank: int, reason: str
) -> None:
    bench = Bench()
    bench.say(hello("first"))

    (refused,) = bench.say(hello("second", rank=rank, with_card=make_card(**changes)))  # type: ignore[arg-type]

    assert isinstance(refused, JoinRefused)
    assert reason in refused.reason
    assert len(bench.core.pool.workers) == 1


def test_a_worker_whose_name_would_break_a_line_is_refused() -> None:
    bench = Bench()

    (refused,) = bench.say(hello("w\n12:00:00 router ERROR forged"))

    assert isinstance(refused, JoinRefused)
    assert "worker_id is 'w\\n12:00:00 router ERROR forged', allowed are printable characters" in refused.reason


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            {"chat": ChatSpec("qwen3")},
            {"chat": ChatSpec("deepseek_r1")},
            "chat.reasoning_parser is 'deepseek_r1', worker first serves model 'm' with 'qwen3'",
        ),
        (
            {"chat": ChatSpec("", "hermes")},
            {"chat": ChatSpec("", "harmony")},
            "chat.tool_call_parser is 'harmony', worker first serves model 'm' with 'hermes'",
        ),
        (
            {"chat": ChatSpec("", "", "{{ messages }}" * 9)},
            {"chat": ChatSpec("", "", "{{ messages }}" * 8)},
            "(112 characters, xxh3",
        ),
        (
            {"media": MediaSpec(item_bytes_max=7)},
            {"media": MediaSpec(item_bytes_max=8)},
            "media.item_bytes_max is 8, worker first serves model 'm' with 7",
        ),
    ],
)
def test_workers_of_a_model_that_tell_routers_different_things_are_refused_with_both(
    first: dict[str, object], second: dict[str, object], reason: str
) -> None:
    bench = Bench()
    bench.say(hello("first", with_card=make_card(**first)))  # type: ignore[arg-type]

    (refused,) = bench.say(hello("second", with_card=make_card(**second)))  # type: ignore[arg-type]

    assert isinstance(refused, JoinRefused)
    assert reason in refused.reason
    assert "126 characters" in refused.reason or "xxh3" not in refused.reason
    assert len(bench.core.pool.workers) == 1
    (silent,) = bench.say(hello("third"))
    assert isinstance(silent, Welcome), "who says nothing agrees"
    (itself,) = bench.say(hello("first", epoch=9, with_card=make_card(**second)))  # type: ignore[arg-type]
    assert isinstance(itself, Welcome), "a worker may come back with another word"


def test_templates_of_a_pool_fit_into_a_message() -> None:
    bench = Bench()
    longest = ChatSpec(chat_template="x" * CHAT_TEMPLATE_CHARS_MAX)
    fits = POOL_TEMPLATES_CHARS_MAX // CHAT_TEMPLATE_CHARS_MAX
    for number in range(fits):
        bench.say(hello(f"w{number}", with_card=make_card(chat=longest)))

    (refused,) = bench.say(hello("one more", with_card=make_card(chat=longest)))

    assert len(bench.core.pool.workers) == fits
    assert isinstance(refused, JoinRefused)
    assert "give the template to the routers" in refused.reason


def test_the_pool_has_a_bound() -> None:
    bench = Bench(workers_max=1)
    bench.say(hello("a"))

    (refused,) = bench.say(hello("b"))

    assert isinstance(refused, JoinRefused)
    assert "at most 1" in refused.reason
    assert isinstance(bench.say(hello("a", epoch=2))[0], Welcome)  # its own place


def test_silence_for_the_lease_ends_the_membership_and_a_sign_of_life_keeps_it() -> None:
    bench = Bench(lease_ms=1000)
    bench.say(hello("a"))
    bench.say(hello("b"))
    bench.now_ms = 900
    bench.say(Heartbeat("b", 0, 1, 0))
    assert bench.core.next_expiry_ms() == 1000
    bench.now_ms = 1000

    bench.expire()

    assert [key.worker_id for key in bench.core.pool.workers] == ["b"]
    (left,) = bench.records[-1].events
    assert isinstance(left, WorkerLeft)
    assert "lease expired" in left.reason


def test_goodbye_is_acknowledged_and_ends_the_membership() -> None:
    bench = Bench()
    bench.say(hello())

    assert bench.say(Goodbye("w", 0, 1, "drained")) == [Acknowledged("w", 0, 1, 0, "c1")]
    assert bench.records[-1].events == [WorkerLeft("drained")]


def test_a_restarted_consolidator_knows_the_cursor_and_gives_known_workers_one_lease() -> None:
    bench = Bench()
    bench.say(hello())
    bench.say(batch([stored([1])], 0))
    after = Bench(folded(bench.records), lease_ms=1000)

    assert after.say(batch([stored([2], 1)], 1)) == [Acknowledged("w", 0, 1, 2, "c1")]
    after.now_ms = 1000
    after.expire()

    assert after.told() == ["BlocksStored", "WorkerLeft"]
    assert after.records[0].offset == 2


def test_a_worker_may_not_speak_for_the_consolidator() -> None:
    bench = Bench()
    bench.say(hello())

    bench.say(batch([WorkerLeft("no"), WorkerJoined(make_card()), stored([1])], 0))

    assert bench.told() == ["WorkerJoined", "BlocksStored"]
    assert bench.core.tally.ignored_events == 2
    foreign = EventBatch("w", 0, 1, 1, 0, [stored([2])], "consolidator")
    assert isinstance(bench.say(foreign)[0], JoinRefused)


hashes = st.integers(1, 30)
events = st.one_of(
    st.builds(stored, st.lists(hashes, min_size=1, max_size=6), st.none() | hashes, st.sampled_from(list(Tier))),
    st.builds(removed, st.lists(hashes, min_size=1, max_size=6), st.sampled_from(list(Tier))),
    st.just(CacheCleared()),
    st.just(WorkerDraining()),
    st.just(SnapshotBegan()),
    st.just(SnapshotEnded()),
    st.builds(RequestStarted, st.sampled_from("xyz"), st.just(16), st.just(0), st.integers(0, 9)),
    st.builds(PrefillCompleted, st.sampled_from("xyz")),
    st.builds(RequestProgressed, st.sampled_from("xyz"), st.integers(0, 9)),
    st.builds(RequestFinished, st.sampled_from("xyz"), st.just("stop")),
    st.builds(LoadReported, st.integers(0, 3), st.just(0), st.just(0), st.just(0), st.just(0), st.just(9)),
)
Step = tuple[str, str, list[AnyEvent], int]

steps: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), st.sampled_from("ab"), st.lists(events, max_size=5), st.integers(-1, 2)),
        st.tuples(st.just("kvbm"), st.sampled_from("ab"), st.lists(events, max_size=4), st.sampled_from([0, 0, 1])),
        st.tuples(st.just("hello"), st.sampled_from("ab"), st.just([]), st.integers(0, 1)),
        st.tuples(st.just("expire"), st.just("a"), st.just([]), st.integers(0, 4000)),
        st.tuples(st.just("goodbye"), st.sampled_from("ab"), st.just([]), st.just(0)),
    ),
    min_size=5,
    max_size=40,
)


def played(bench: Bench, history: list[Step], after_each: Callable[[], None] = lambda: None) -> None:
    """Have two workers, and a second source of each, do what a history says."""
    epochs = {"a": 1, "b": 1}
    second: dict[str, tuple[int, int]] = {}
    for what, name, some, number in [("hello", "a", [], 0), ("hello", "b", [], 0), *history]:
        worker = bench.core.pool.workers.get(WorkerKey(WorkerId(name)))
        next_seq = worker.cursors["worker"].next_seq if worker else 0
        if what == "batch":
            bench.say(batch(some, max(0, next_seq + number), name, epochs[name]))
        elif what == "kvbm":
            epoch, seq = second.get(name, (1, 0))
            if number and seq:
                epoch, seq = epoch + 1, 0
            turn = ConsolidatorTurn(bench.now())
            taken = bench.core.take(EventBatch(name, 0, epoch, seq, 0, some, "kvbm"), turn)
            bench.close(turn)
            second[name] = (epoch, seq + 1) if taken else (epoch + 1, 0)
        elif what == "hello":
            epochs[name] += number
            bench.say(hello(name, epochs[name], next_seq))
        elif what == "goodbye":
            bench.say(Goodbye(name, 0, epochs[name], "done"))
        else:
            bench.now_ms += number
            bench.expire()
        after_each()


@settings(max_examples=examples(40))
@given(steps, st.integers(0, 100))
def test_a_snapshot_and_what_follows_is_everything_from_the_start(history: list[Step], cut_percent: int) -> None:
    bench = Bench()
    played(bench, history)

    records = bench.records
    assert [record.offset for record in records] == list(range(len(records)))
    whole = folded(records)
    same(whole, bench.core.pool)
    n = len(records) * cut_percent // 100
    resumed = reload(folded(records, n).freeze())
    for record in records[n:]:
        resumed.apply(record)
    same(resumed, whole)


def test_a_large_snapshot_in_one_batch_stays_within_the_record_limit() -> None:
    bench = Bench()
    bench.say(hello())
    bench.say(batch([stored(list(range(2, 40, 2)))], 0))
    big: list[AnyEvent] = [stored(list(range(1, 40)), None) for _ in range(9000)]

    bench.say(batch(big, 1))

    assert len(bench.records[-1].events) <= 65_536
    assert isinstance(bench.records[-1].events[0], BlocksStored)
    same(folded(bench.records), bench.core.pool)


def state_of(bench: Bench) -> StreamState:
    """Return the stream's state, which the fold of the records must know too."""
    state = bench.core.pool.workers[W].stream("worker").state
    assert folded(bench.records).workers[W].stream("worker").state is state
    return state


def test_a_gap_that_nobody_fills_makes_the_stream_stale_in_the_stated_time_and_its_filling_heals_it() -> None:
    bench = Bench(stale_after_ms=2000, lease_ms=10_000)
    bench.say(hello())
    bench.say(batch([stored([3])], 2))
    assert bench.core.next_expiry_ms() == 2000
    bench.now_ms = 1999
    bench.expire()
    assert state_of(bench) is StreamState.REPLAYING
    bench.now_ms = 2000
    bench.expire()
    assert state_of(bench) is StreamState.STALE
    assert "batches from 0 are missing" in bench.core.pool.workers[W].stream("worker").reason
    assert bench.core.next_expiry_ms() == 10_000, "the lease is next; staleness is told once"

    for seq in range(3):
        bench.say(batch([stored([seq + 1])], seq))
    assert state_of(bench) is StreamState.LIVE


def test_a_stale_worker_that_restates_its_cache_is_live_again() -> None:
    bench = Bench(stale_after_ms=2000, lease_ms=10_000)
    bench.say(hello())
    bench.say(batch([stored([3])], 2))
    bench.now_ms = 2000
    bench.expire()
    bench.say(batch([SnapshotBegan(), stored([1])], 5))
    assert state_of(bench) is StreamState.SNAPSHOTTING
    bench.say(batch([SnapshotEnded()], 6))
    assert state_of(bench) is StreamState.LIVE


def test_a_heartbeat_shows_a_batch_lost_at_the_end_and_later_that_nothing_is_missing() -> None:
    bench = Bench()
    bench.say(hello())
    bench.say(Heartbeat("w", 0, 1, 1))
    assert state_of(bench) is StreamState.REPLAYING
    bench.say(batch([stored([1])], 0))
    assert state_of(bench) is StreamState.LIVE


def test_no_source_may_write_of_its_own_health() -> None:
    bench = Bench()
    bench.say(hello())
    bench.say(batch([StreamStateChanged("worker", StreamState.STALE)], 0))
    assert state_of(bench) is StreamState.LIVE
    assert bench.core.tally.ignored_events == 1
