"""A worker that pushes and a publisher about the same worker, merged: the core alone, in any order of things."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from poolgrid.kernel.consolidation.consolidator import ConsolidatorTurn, MemberJoined
from poolgrid.kernel.consolidation.further_source import FollowerLimits, FurtherSource
from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.kv_events.follower import END_OF_REPLAY, REPLAY_ATTEMPTS_MAX, AskReplay
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventBatch,
    JournalRecord,
    SnapshotBegan,
    SnapshotEnded,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.hashing import block_hashes, pack_tokens, sequence_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import StreamState, Tier
from poolgrid.kernel.wire.ingest import Goodbye, Heartbeat
from tests.consolidator.pub_engine import BLOCK, Cache, frame_of
from tests.consolidator.pusher import batch, removed
from tests.consolidator.test_consolidator import Bench, W, folded, hello, same
from tests.router.fleet_builder import make_card, stored

LEASE_MS = 1000
NAME = "kvbm"
CARD = make_card(block_size=BLOCK)


def names(tokens: list[int]) -> list[int]:
    """Return the blocks of a prompt, as worker and publisher both call them."""
    return list(sequence_hashes(block_hashes(pack_tokens(tokens), BLOCK)))


def prompt(number: int, blocks: int = 2) -> list[int]:
    return [number * 100 + position for position in range(BLOCK * blocks)]


class Block:
    """A publisher with a replay buffer: the frames of one life, and what it holds."""

    def __init__(self, salt: int, keep: int = 1000) -> None:
        self.cache = Cache("vllm", salt)
        self.frames: list[bytes] = []
        self.keep = keep
        self.salt = salt

    def say(self, *events: object) -> int:
        """Return the number of the frame."""
        # No two lives send the same bytes, as their clocks never say the same.
        self.frames.append(frame_of([*events, ["Life", self.salt, len(self.frames)]]))
        return len(self.frames) - 1


class Scene:
    """Core, further source and publisher, joined as the shell joins them."""

    def __init__(self, outlives: bool = False, has_replay: bool = True, pool: PoolState | None = None) -> None:
        self.bench = Bench(pool, lease_ms=LEASE_MS)
        self.outlives = outlives
        self.further = FurtherSource(W, NAME, FollowerLimits(100_000, has_replay, 100, LEASE_MS), outlives)
        self.block = Block(1)
        self.up = True
        """Whether the publisher can be reached."""
        self.connected = False
        self.view: dict[Tier, set[int]] | None = None
        """What a reader believes of the worker."""
        self._read = 0
        if pool is not None:
            worker = pool.workers.get(W)
            if worker is not None:
                self.view = {tier: set(self.held_by_any(tier)) for tier in Tier}
                self.further.recovered(worker, self.bench.now_ms)
                self.reach()

    # The worker

    def hear(self, message: object) -> None:
        self.bench.say(message)  # type: ignore[arg-type]
        self.members()

    def join(self, epoch: int = 1, next_seq: int = 0) -> None:
        self.hear(hello(epoch=epoch, next_seq=next_seq, with_card=CARD))

    def push(self, *events: AnyEvent, epoch: int = 1) -> None:
        seq = self.bench.core.pool.workers[W].cursors["worker"].next_seq
        self.hear(batch(list(events), seq, epoch=epoch))

    def members(self) -> None:
        for member in self.bench.members:
            if isinstance(member, MemberJoined):
                self.further.joined(member, self.bench.now_ms)
                self.reach()
            else:
                self.further.left(member)
                self.connected = False
        self.bench.members.clear()
        self.note()

    # The publisher

    def reach(self) -> None:
        if self.up and self.further.is_followed and not self.connected:
            self.connected = True
            self.carry_out(self.further.connected(self.bench.now_ms, self.wall_ms))

    def lose_connection(self) -> None:
        if self.connected:
            self.connected = False
            self.carry_out(self.further.disconnected(self.bench.now_ms))

    def say(self, *events: object, lost: bool = False) -> None:
        seq = self.block.say(*events)
        if self.connected and not lost:
            self.carry_out(self.further.live(seq, self.block.frames[seq], self.bench.now_ms, self.wall_ms))

    def restart(self) -> None:
        """Another life of the publisher at the same address, met before it says a word."""
        self.lose_connection()
        self.block = Block(self.block.salt + 1, self.block.keep)
        self.up = True
        self.reach()

    def store(self, number: int, tier: Tier = Tier.HOST, lost: bool = False) -> None:
        # An engine computes nothing that it holds: such a store would be a report of reuse.
        self.say(*self.block.cache.store_missing(prompt(number), tier), lost=lost)

    # Time

    def wait(self, ms: float) -> None:
        until_ms = self.bench.now_ms + ms
        while (due_ms := self.further.due_ms()) is not None and due_ms <= until_ms:
            self.bench.now_ms = max(self.bench.now_ms, due_ms)
            self.carry_out(self.further.tick(self.bench.now_ms, self.wall_ms))
        self.bench.now_ms = until_ms

    @property
    def wall_ms(self) -> int:
        return 1_000_000 + int(self.bench.now_ms)

    # Effects

    def carry_out(self, effects: list[EventBatch | AskReplay]) -> None:
        asked: AskReplay | None = None
        turn: ConsolidatorTurn = ConsolidatorTurn(self.bench.now())
        for effect in effects:
            if isinstance(effect, AskReplay):
                asked = effect
            else:
                assert self.bench.core.take(effect, turn)
        self.bench.core.note_stream(W, NAME, *self.further.health, turn)
        self.bench.close(turn)
        self.note()
        if asked is not None:
            self.answer(asked.from_seq)

    def answer(self, from_seq: int) -> None:
        first = max(from_seq, len(self.block.frames) - self.block.keep)
        for seq, payload in list(enumerate(self.block.frames))[first:]:
            effects = self.further.replayed(seq, payload, self.bench.now_ms, self.wall_ms)
            if any(isinstance(effect, AskReplay) for effect in effects):
                self.carry_out(effects)
                return
            self.carry_out(effects)
        self.carry_out(self.further.replayed(END_OF_REPLAY, b"", self.bench.now_ms, self.wall_ms))

    def note(self) -> None:
        """Read the new records as a router does, and hold it against what the core knows."""
        for record in self.bench.records[self._read :]:
            self.follow(record)
        self._read = len(self.bench.records)
        if W in self.bench.core.pool.workers:
            assert self.view == {tier: set(self.held_by_any(tier)) for tier in Tier}

    def follow(self, record: JournalRecord) -> None:
        for told in record.events:
            if isinstance(told, WorkerJoined):
                self.view = {tier: set() for tier in Tier}
            elif isinstance(told, WorkerLeft):
                self.view = None
            elif isinstance(told, BlocksStored):
                assert self.view is not None
                self.view[told.tier] |= set(unpack_hashes(told.sequence_hashes))
            elif isinstance(told, BlocksRemoved):
                assert self.view is not None
                gone = set(unpack_hashes(told.sequence_hashes))
                assert gone <= self.view[told.tier], "what is removed was there"
                self.view[told.tier] -= gone
            elif isinstance(told, (CacheCleared, SnapshotBegan)):
                self.view = {tier: set() for tier in Tier}

    def held_by_any(self, tier: Tier) -> set[int]:
        presence = self.bench.core.pool.workers[W].presence
        return {block for at, _, _, held in presence.freeze() if at is tier for block in held}

    def held(self, tier: Tier = Tier.HOST) -> set[int]:
        """Return what routers believe the worker holds."""
        return self.view[tier] if self.view is not None else set()

    def state(self) -> StreamState:
        return self.bench.core.pool.workers[W].stream(NAME).state

    def own_state(self) -> StreamState:
        return self.bench.core.pool.workers[W].stream("worker").state


def joined(*numbers: int, outlives: bool = False, has_replay: bool = True) -> Scene:
    scene = Scene(outlives, has_replay)
    scene.join()
    for number in numbers:
        scene.store(number)
    return scene


def everything(*numbers: int) -> set[int]:
    return {block for number in numbers for block in names(prompt(number))}


# Merging


def test_a_block_is_told_once_and_held_while_any_source_says_so() -> None:
    scene = joined()
    scene.push(stored(names(prompt(1)), None, Tier.HOST))
    scene.store(1)
    scene.store(2)
    assert scene.held() == everything(1, 2)

    scene.push(removed(names(prompt(1)), Tier.HOST))
    assert scene.held() == everything(1, 2), "the publisher still has it"
    scene.say(scene.block.cache.remove(4, Tier.HOST))

    assert scene.held() == set()
    told = [type(one).__name__ for record in scene.bench.records for one in record.events]
    assert told.count("BlocksStored") == 2
    assert told.count("BlocksRemoved") == 1


def test_a_worker_that_restates_its_cache_leaves_what_the_other_source_said() -> None:
    scene = joined()
    scene.push(stored(names(prompt(1))))
    scene.push(stored(names(prompt(2))))
    scene.store(3)
    scene.store(1, Tier.DEVICE)

    scene.push(SnapshotBegan())
    assert scene.own_state() is StreamState.SNAPSHOTTING
    assert (scene.held(Tier.DEVICE), scene.held()) == (everything(1), everything(3))
    scene.push(stored(names(prompt(2))), SnapshotEnded())

    assert scene.own_state() is StreamState.LIVE
    assert (scene.held(Tier.DEVICE), scene.held()) == (everything(1, 2), everything(3))
    same(folded(scene.bench.records), scene.bench.core.pool)


def test_a_worker_that_restates_in_one_batch_beside_another_source_is_live_behind_it() -> None:
    scene = joined(3)

    scene.push(SnapshotBegan(), stored(names(prompt(2))), SnapshotEnded())

    assert scene.own_state() is StreamState.LIVE
    assert scene.held() == everything(3)


def test_a_cleared_cache_of_either_source_takes_only_its_own() -> None:
    scene = joined()
    scene.push(stored(names(prompt(1))), stored(names(prompt(2)), None, Tier.HOST))
    scene.store(2)
    scene.store(3)

    scene.push(CacheCleared())
    assert (scene.held(Tier.DEVICE), scene.held()) == (set(), everything(2, 3))
    scene.push(stored(names(prompt(1))))
    scene.say(scene.block.cache.clear())

    assert (scene.held(Tier.DEVICE), scene.held()) == (everything(1), set())


def test_a_large_batch_is_taken_from_a_worker_with_several_sources() -> None:
    scene = joined(1)
    many: list[AnyEvent] = [stored([10_000 + number], None, Tier.HOST) for number in range(9_000)]

    scene.push(*many, removed([10_000], Tier.HOST))

    assert len(scene.held()) == 9_000 - 1 + len(everything(1))
    assert len(scene.bench.records[-1].events) <= 65_536
    same(folded(scene.bench.records), scene.bench.core.pool)


def test_a_batch_of_a_further_source_acknowledges_nothing_and_is_not_the_workers_lag() -> None:
    scene = joined()
    turn = ConsolidatorTurn(scene.bench.now())
    scene.bench.core.batch(b"p", batch([stored([1])], 0), turn)
    assert scene.bench.core.take(EventBatch(*W, 5, 0, 0, [stored([2])], "other"), turn)
    lag_ms = scene.bench.core.lags_ms()[W]
    replies = scene.bench.close(turn)

    assert [type(reply).__name__ for reply in replies] == ["Acknowledged"]
    assert lag_ms == scene.wall_ms - 1000, "of the batch that the worker pushed"


# The publisher's loss and return


def test_a_publisher_that_is_gone_for_the_lease_takes_exactly_what_only_it_said() -> None:
    scene = joined()
    scene.push(stored(names(prompt(1)), None, Tier.HOST))
    scene.store(1)
    scene.store(2)

    scene.lose_connection()
    assert scene.state() is StreamState.STALE
    scene.wait(LEASE_MS - 1)
    assert scene.held() == everything(1, 2)
    scene.wait(1)

    assert scene.state() is StreamState.ABSENT
    assert scene.held() == everything(1)
    assert scene.own_state() is StreamState.LIVE
    same(folded(scene.bench.records), scene.bench.core.pool)


def test_a_publisher_that_comes_back_brings_back_what_it_holds() -> None:
    scene = joined(1)
    scene.lose_connection()
    scene.wait(LEASE_MS)
    scene.store(2)  # said while nobody listened

    scene.reach()

    assert scene.state() is StreamState.LIVE
    assert scene.held() == everything(1, 2)


@pytest.mark.parametrize("away_ms", [10, 5 * LEASE_MS])
def test_a_publisher_that_restarts_brings_what_it_holds_now_and_nothing_from_before(away_ms: int) -> None:
    scene = joined()
    for number in range(4):
        scene.store(number)
    scene.lose_connection()
    scene.wait(away_ms)
    scene.block = Block(2)
    scene.store(9)  # restored from its disk, before anybody listens

    scene.reach()

    assert scene.held() == everything(9)
    assert scene.state() is StreamState.LIVE


def test_a_hole_that_cannot_be_filled_drops_what_the_publisher_said_and_nothing_else() -> None:
    scene = Scene()
    scene.block.keep = 1
    scene.join()
    scene.push(stored(names(prompt(1))))
    scene.store(2)
    for number in (3, 4, 5):
        scene.store(number, lost=True)
    scene.store(6)

    assert scene.held() == everything(6)
    assert scene.held(Tier.DEVICE) == everything(1)
    assert scene.state() is StreamState.STALE
    assert scene.own_state() is StreamState.LIVE
    scene.say(scene.block.cache.clear(), scene.block.cache.store(prompt(7), Tier.HOST))
    assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(7))


def test_a_publisher_that_is_never_reached_is_absent_after_the_lease() -> None:
    scene = Scene()
    scene.up = False
    scene.join()
    scene.push(stored(names(prompt(1))))
    assert scene.further.health[0] is StreamState.SYNCING

    scene.wait(LEASE_MS)

    assert scene.state() is StreamState.ABSENT
    assert scene.held(Tier.DEVICE) == everything(1)
    scene.up = True
    scene.store(2)
    scene.reach()
    assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(2))


# Lives of the worker


def test_nothing_is_taken_in_before_the_worker_joins_and_all_of_it_when_it_does() -> None:
    scene = Scene()
    scene.store(1)
    assert scene.bench.records == []

    scene.join()

    assert scene.held() == everything(1)


def test_what_a_lost_life_was_said_to_hold_does_not_survive_into_the_next() -> None:
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))

    scene.join(epoch=2)

    assert scene.held() == set()
    assert scene.state() is StreamState.FORMER
    scene.store(2)
    scene.lose_connection()
    scene.wait(3 * LEASE_MS)
    scene.reach()
    assert scene.held() == set(), "the same life of the publisher, also after it was away"
    assert scene.state() is StreamState.FORMER


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_former_publisher_counts_again_when_it_restarts(has_replay: bool) -> None:
    scene = joined(1, 2, has_replay=has_replay)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.join(epoch=2)

    scene.restart()
    scene.store(3)

    assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(3))


def test_a_former_publisher_counts_again_behind_a_cleared_cache() -> None:
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.join(epoch=2)
    cache = scene.block.cache

    scene.say(cache.store(prompt(2), Tier.HOST), cache.clear(), cache.store(prompt(3), Tier.HOST))

    assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(3))
    scene.store(4)
    assert scene.held() == everything(3, 4)


def test_a_cache_that_was_cleared_before_the_last_word_of_a_lost_life_proves_nothing() -> None:
    """Found by the model: nobody heard it being cleared, and what was stored behind it was of the old life too."""
    scene = joined(1)
    scene.lose_connection()
    cache = scene.block.cache
    scene.say(cache.clear(), cache.store(prompt(2), Tier.HOST))
    scene.hear(Heartbeat("w", 0, 1, 0))

    scene.join(epoch=2)

    assert (scene.state(), scene.held()) == (StreamState.FORMER, set())
    scene.say(cache.clear(), cache.store(prompt(3), Tier.HOST))
    assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(3))


@pytest.mark.parametrize("worker", ["is dead", "lives on"])
def test_a_cache_cleared_as_the_worker_dies_is_another_life_of_the_publisher(worker: str) -> None:
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.wait(10)
    scene.say(scene.block.cache.clear())
    scene.store(2)
    scene.wait(10)
    if worker == "lives on":
        scene.hear(Heartbeat("w", 0, 1, 0))

    scene.join(epoch=2)

    if worker == "is dead":
        assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(2))
    else:
        assert (scene.state(), scene.held()) == (StreamState.FORMER, set())


def test_a_cache_cleared_after_the_lost_worker_left_counts_from_there() -> None:
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.wait(LEASE_MS)
    scene.bench.expire()
    scene.members()
    scene.say(scene.block.cache.clear())
    scene.store(2)

    scene.join(epoch=2)

    assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(2))


def test_a_publisher_in_the_workers_process_that_restarts_with_it_is_heard_from_its_beginning() -> None:
    """The new process publishes before it greets, and the pool still has the old life of the worker."""
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.lose_connection()
    scene.wait(100)
    scene.restart()
    scene.store(2)

    scene.wait(50)
    scene.join(epoch=2)

    assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(2))


def test_a_publisher_that_outlives_its_worker_brings_its_blocks_to_the_next_life() -> None:
    scene = joined(outlives=True)
    scene.push(stored(names(prompt(8))))
    scene.store(1)
    scene.hear(Heartbeat("w", 0, 1, 1))
    scene.hear(Goodbye("w", 0, 1, "done"))
    assert W not in scene.bench.core.pool.workers
    scene.store(2)

    scene.join(epoch=2)

    assert (scene.state(), scene.held(), scene.held(Tier.DEVICE)) == (StreamState.LIVE, everything(1, 2), set())


def test_a_worker_that_comes_back_under_the_same_epoch_finds_its_publisher_again() -> None:
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.wait(LEASE_MS)
    scene.bench.expire()
    scene.members()
    assert scene.view is None

    scene.join()

    assert (scene.state(), scene.held()) == (StreamState.LIVE, everything(1))


@pytest.mark.parametrize("how", ["its sequence goes back", "it says goodbye first"])
def test_another_life_under_the_same_epoch_is_another_life(how: str) -> None:
    scene = joined(1)
    scene.push(stored(names(prompt(5))))
    if how == "it says goodbye first":
        scene.hear(Goodbye("w", 0, 1, "done"))

    scene.join(next_seq=0)

    assert (scene.state(), scene.held()) == (StreamState.FORMER, set())


def test_a_former_publisher_stays_former_over_a_lapse_of_the_lease() -> None:
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.join(epoch=2)
    scene.wait(LEASE_MS)
    scene.bench.expire()
    scene.members()

    scene.join(epoch=2)

    assert (scene.state(), scene.held()) == (StreamState.FORMER, set())


# Restarts of the consolidator


def test_a_restarted_consolidator_reads_the_publisher_anew() -> None:
    scene = joined()
    scene.push(stored(names(prompt(1)), None, Tier.HOST))
    scene.store(2)

    after = Scene(pool=folded(scene.bench.records))
    assert after.held() == everything(1), "a publisher that holds nothing any more"
    after.block = scene.block
    after.restart()
    after.store(3)

    assert after.held() == everything(1, 3)


def test_what_the_journal_knows_of_a_publisher_that_never_comes_back_goes_with_the_lease() -> None:
    scene = joined()
    scene.push(stored(names(prompt(1)), None, Tier.HOST))
    scene.store(2)
    after = Scene.__new__(Scene)
    after.bench = Bench(folded(scene.bench.records), lease_ms=LEASE_MS)
    after.further = FurtherSource(W, NAME, FollowerLimits(1000, True, 100, LEASE_MS), False)
    after.view = {tier: set(after.held_by_any(tier)) for tier in Tier}
    after._read = 0
    after.further.recovered(after.bench.core.pool.workers[W], 0)
    assert after.held() == everything(1, 2)

    after.wait(LEASE_MS)

    assert (after.state(), after.held()) == (StreamState.ABSENT, everything(1))


def test_a_former_publisher_is_former_to_a_restarted_consolidator_too() -> None:
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.join(epoch=2)
    after = Scene.__new__(Scene)
    Scene.__init__(after)
    after.block = scene.block
    after.bench = Bench(folded(scene.bench.records), lease_ms=LEASE_MS)
    after.view = {tier: set() for tier in Tier}
    after.further.recovered(after.bench.core.pool.workers[W], 0)

    after.reach()

    assert (after.state(), after.held()) == (StreamState.FORMER, set())
    after.restart()
    after.store(3)
    assert (after.state(), after.held()) == (StreamState.LIVE, everything(3))


def test_a_source_that_is_not_listed_any_more_takes_its_blocks_along() -> None:
    scene = joined()
    scene.push(stored(names(prompt(1)), None, Tier.HOST))
    scene.store(2)
    after = Bench(folded(scene.bench.records))
    turn = ConsolidatorTurn(after.now())

    after.core.drop_unlisted({W: ["another"]}, turn)
    after.close(turn)

    worker = after.core.pool.workers[W]
    assert {block for *_, held in worker.presence.freeze() for block in held} == everything(1)
    assert worker.stream(NAME).state is StreamState.ABSENT
    again = ConsolidatorTurn(after.now())
    after.core.drop_unlisted({}, again)
    assert again.records == []


def test_silence_of_the_replay_socket_of_a_former_publisher_changes_nothing() -> None:
    scene = joined(1)
    scene.hear(Heartbeat("w", 0, 1, 0))
    scene.up = False
    scene.join(epoch=2)
    scene.connected = True
    scene.further.connected(scene.bench.now_ms, scene.wall_ms)  # and the question is never answered
    for _ in range(REPLAY_ATTEMPTS_MAX):
        due_ms = scene.further.due_ms()
        assert due_ms is not None
        scene.bench.now_ms = due_ms
        assert not [one for one in scene.further.tick(due_ms, scene.wall_ms) if isinstance(one, EventBatch)]
    scene.store(2)
    assert (scene.state(), scene.held()) == (StreamState.FORMER, set())


# Any history, against plain sets

Step = tuple[str, int, Tier]
steps = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("push", "push", "drop", "clear own", "restate", "say", "say", "say lost", "unsay", "clear", "cut"),
                *("reach", "restart", "lapse", "new life", "heartbeat", "wait"),
            )
        ),
        st.integers(0, 6),
        st.sampled_from(list(Tier)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.booleans())
def test_routers_believe_what_the_worker_pushed_and_what_the_publisher_said_of_this_life(
    history: list[Step], outlives: bool
) -> None:
    """Sets stand for worker and publisher; the publisher's counts unless it belongs to a life that ended."""
    scene = Scene(outlives)
    epoch = 1
    own: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    lingering: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    """What the publisher had said when its connection broke, until the lease is over."""
    cut_ms = 0.0
    former = False
    cleared_away = False
    """Whether its cache was cleared while it was away, and the worker a member."""
    scene.join()
    for what, number, tier in history:
        blocks = names(prompt(number))
        if what == "push":
            scene.push(stored(blocks, None, tier), epoch=epoch)
            own[tier] |= set(blocks)
        elif what == "drop":
            scene.push(removed(blocks, tier), epoch=epoch)
            own[tier] -= set(blocks)
        elif what == "clear own":
            scene.push(CacheCleared(), epoch=epoch)
            own = {one: set() for one in Tier}
        elif what == "restate":
            chains: list[AnyEvent] = [stored([block], None, one) for one, held in own.items() for block in sorted(held)]
            scene.push(SnapshotBegan(), *chains, SnapshotEnded(), epoch=epoch)
        elif what == "say":
            scene.store(number, tier)
        elif what == "say lost":
            scene.store(number, tier, lost=True)
            scene.say()  # the next frame shows that one is missing
        elif what == "unsay":
            scene.say(scene.block.cache.remove(number, tier))
        elif what == "clear":
            former = former and not scene.connected
            cleared_away = not scene.connected
            scene.say(scene.block.cache.clear())
        elif what == "cut":
            if scene.connected:
                said = {one: set() if former else held for one, held in scene.block.cache.held().items()}
                lingering, cut_ms = said, scene.bench.now_ms
            scene.lose_connection()
        elif what == "reach":
            former = former and not cleared_away
            cleared_away = False
            scene.reach()
        elif what == "restart":
            former = cleared_away = False
            scene.restart()
        elif what in ("lapse", "new life"):
            scene.hear(Heartbeat("w", 0, epoch, 0))
            if what == "lapse":
                scene.wait(LEASE_MS)
                scene.bench.expire()
                scene.members()
            else:
                epoch += 1
                heard = scene.further._follower is not None and scene.further._follower.position != (0, None)
                former = not outlives and (former or heard)
            own = {one: set() for one in Tier}
            lingering = {one: set() for one in Tier}
            cleared_away = False
            scene.join(epoch)
        elif what == "heartbeat":
            scene.hear(Heartbeat("w", 0, epoch, 0))
        else:
            scene.wait(400)
            if scene.bench.now_ms - cut_ms >= LEASE_MS:
                lingering = {one: set() for one in Tier}
        said = {one: set() if former else held for one, held in scene.block.cache.held().items()}
        counted = said if scene.connected else lingering
        assert scene.view == {one: own[one] | counted[one] for one in Tier}, what
        assert scene.own_state() is not StreamState.STALE
        event(f"{what}, {'former' if former else 'counted'}, {'connected' if scene.connected else 'away'}")
    assert [record.offset for record in scene.bench.records] == list(range(len(scene.bench.records)))
    same(folded(scene.bench.records), scene.bench.core.pool)
