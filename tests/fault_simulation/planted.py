"""Bugs of our own making, to see whether the simulation finds them: the test of the test.

Each replaces one method of a core or shell while it is planted; nothing of this is reachable from the product. Those
that are ``real`` were here before: the simulation found them, they were mended, and are planted again to stay found.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from poolgrid.kernel.consolidation.consolidator import Consolidator, ConsolidatorTurn
from poolgrid.kernel.consolidation.feed_reader import FeedReader
from poolgrid.kernel.consolidation.pool_state import Cursor, SequenceVerdict
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.approximate_index import ApproximateIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.requests.request_machine import RequestMachine
from poolgrid.kernel.wire.ingest import Hello
from poolgrid.plugins.nats.journal import KeptSnapshots, StreamJournal
from poolgrid.plugins.nats.leader import LeaderWatch
from poolgrid.server.consolidator.journal import files
from poolgrid.server.consolidator.journal.files import FileJournal
from poolgrid.server.consolidator.journal_writer import JournalWriter
from poolgrid.server.global_router.router_link import RouterLink
from poolgrid.server.process.clock import AwakeClock
from poolgrid.server.router.fleet_links import FleetLinks
from poolgrid.server.workers.peers import Peers


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug: what it replaces by what, and the profile that should find it."""

    words: str
    profile: str
    owner: Any
    method: str
    broken: Callable[..., Any]
    real: bool = False
    from_seed: int = 0
    """Where to begin: a bug that few runs show is not looked for in all those before."""


def _skip_the_hole(self: FeedReader, now_ms: float) -> list[Any]:
    self.holes += 1
    self.next_offset = max(self.next_offset, self._goal - 1)
    payload = self._kept.pop(self.next_offset, None)
    return [] if payload is None else self._deliver([payload], now_ms)


def _duplicates_are_news(self: Cursor, epoch: int, seq: int) -> SequenceVerdict:
    if epoch != self.epoch:
        return SequenceVerdict.NEW_EPOCH if epoch > self.epoch else SequenceVerdict.OLD_EPOCH
    return SequenceVerdict.NEXT if seq <= self.next_seq else SequenceVerdict.GAP


_hello = Consolidator._hello


def _forget_the_epoch(self: Consolidator, peer: bytes, hello: Hello, turn: Any) -> None:
    worker = next((w for k, w in self.pool.workers.items() if k.worker_id == hello.worker_id), None)
    if worker is not None and hello.epoch > worker.epoch:
        worker.epoch = hello.epoch
        worker.cursors["worker"].begin(hello.epoch)
    _hello(self, peer, hello, turn)


_put = JournalWriter.put


def _answer_at_once(self: JournalWriter, turn: ConsolidatorTurn, payloads: list[bytes]) -> None:
    replies, turn.replies = turn.replies, []
    self._on_stored(ConsolidatorTurn(turn.now, replies=replies), [])
    _put(self, turn, payloads)


def _append_on_the_loop(self: JournalWriter, turn: ConsolidatorTurn, payloads: list[bytes]) -> None:
    try:
        if payloads:
            self._store(payloads, turn.now.wall_ms)
            self._appended = False
    except OSError:
        _put(self, turn, payloads)
    else:
        self._on_stored(turn, payloads)


def _count_all_time(self: AwakeClock) -> float:
    return self._clock.monotonic_ms()


def _is_never_in_use(self: FleetLinks, link: Any) -> bool:
    return False


def _say_nothing(self: Peers, peer_id: bytes, request_id: str) -> None:
    pass


def _never_expire(self: LoadLedger, now_ms: float, held: Iterable[str] = ()) -> None:
    pass


def _keep_the_dead(self: PrefixIndex, worker: Any) -> None:
    pass


_accept = RequestMachine._read


def _accept_any_position(self: RequestMachine, dispatch: Any, delta: Any) -> Any:
    dispatch.position = delta.position
    dispatch.repeated = b""
    return _accept(self, dispatch, delta)


_append = FileJournal.append


def _leave_the_rest_of_a_failed_write(self: FileJournal, payloads: Sequence[bytes], now_ms: int) -> None:
    try:
        _append(self, payloads, now_ms)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            self._needs_repair = False
        raise


def _close_unsynced(self: FileJournal, segment: Any) -> None:
    pass


def _zeros_are_not_nothing(disk: Any, name: str) -> bool:
    return False


_clear = PrefixIndex.clear


def _clear_unseen(self: PrefixIndex, worker: Any) -> None:
    seen = self.slot_changes
    _clear(self, worker)
    self.slot_changes = seen


def _believe_nothing(self: ApproximateIndex, *_: Any) -> None:
    pass


def _keep_every_question(self: RouterLink) -> None:
    pass


def _append_wherever_it_ends(self: StreamJournal, payloads: Sequence[bytes], now_ms: int) -> None:
    facts = self._stream.facts()
    self._writer += "x"  # with a name that nobody expects anything of
    self._end = (facts.last_sequence, self._history.message(facts.last_sequence).message_id)
    messages = self._messages(payloads, now_ms)
    self._stream.append(messages, facts.last_sequence, begins=True)
    self._end = (facts.last_sequence + len(messages), messages[-1].message_id)
    self._next += len(payloads)


def _forget_what_was_sent(self: StreamJournal) -> None:
    facts = self._facts = self._stream.facts()
    self._check_end(facts)
    if facts.last_sequence > self._end[0]:
        last = self._history.message(facts.last_sequence)
        if last.message_id.rpartition(".")[0] != self._writer:
            self._fence("another writer")
        self._end = (last.sequence, last.message_id)
    self._unanswered = False


def _any_snapshot_will_do(self: KeptSnapshots) -> Any:
    return self._kept[-1] if self._kept else None


def _make_no_room(self: StreamJournal, blocks_per_worker_max: int, now_ms: int) -> int:
    return 0


_note = LeaderWatch._note


def _note_the_first(self: LeaderWatch, leader: Any) -> None:
    if self.leader is None or not self.leader.ingest:
        _note(self, leader)


PLANTED: dict[str, Planted] = {
    "a-replay-is-skipped": Planted(
        "a reader that finds a hole continues behind it", "lossy-network", FeedReader, "_close_hole", _skip_the_hole
    ),
    "a-batch-is-applied-twice": Planted(
        "a batch that was taken in before is taken in again",
        "lossy-network",
        Cursor,
        "judge_batch",
        _duplicates_are_news,
    ),
    "an-epoch-is-forgotten": Planted(
        "a new life of a worker continues where the old one was",
        "crashes",
        Consolidator,
        "_hello",
        _forget_the_epoch,
        from_seed=10,
    ),
    "acknowledged-before-stored": Planted(
        "batches are acknowledged before the journal has taken them",
        "disk",
        JournalWriter,
        "put",
        _answer_at_once,
    ),
    "a-late-timer-judges": Planted(
        "the time in which a process itself stood still counts against others",
        "pauses",
        AwakeClock,
        "monotonic_ms",
        _count_all_time,
        True,
        from_seed=100,
    ),
    "a-slow-write-blocks-the-loop": Planted(
        "the journal is written on the event loop", "pauses", JournalWriter, "put", _append_on_the_loop, True
    ),
    "an-expired-lease-cuts-streams": Planted(
        "a worker that is silent towards the consolidator has its streams cut, although they flow",
        "pauses",
        FleetLinks,
        "_is_in_use",
        _is_never_in_use,
        True,
        from_seed=17,
    ),
    "a-silent-router-is-not-told": Planted(
        "a worker that gave up the requests of a router which stood still does not tell it",
        "pauses",
        Peers,
        "_remember_abandoned",
        _say_nothing,
        True,
        from_seed=90,
    ),
    "a-failed-write-is-not-cut-back": Planted(
        "what a failed append left behind stays in the journal",
        "disk",
        FileJournal,
        "append",
        _leave_the_rest_of_a_failed_write,
    ),
    "a-reservation-never-expires": Planted(
        "predictions that no worker confirms count for ever", "pools", LoadLedger, "expire", _never_expire
    ),
    "a-dead-worker-keeps-its-blocks": Planted(
        "the index does not forget a worker that left", "crashes", PrefixIndex, "drop", _keep_the_dead
    ),
    "any-position-is-accepted": Planted(
        "a decode leg's repeated first token is given to the client twice",
        "disaggregated",
        RequestMachine,
        "_read",
        _accept_any_position,
    ),
    "a-segment-closes-unsynced": Planted(
        "the next segment begins before the last one is durable",
        "disk",
        FileJournal,
        "_close_segment",
        _close_unsynced,
        True,
        from_seed=40,
    ),
    "zeros-are-corruption": Planted(
        "a segment of which nothing was durable stops the journal from opening",
        "disk",
        files,
        "is_all_zeros",
        _zeros_are_not_nothing,
        True,
    ),
    "questions-pile-up": Planted(
        "questions to a pool that were given up are kept for ever",
        "pools",
        RouterLink,
        "_forget_given_up",
        _keep_every_question,
        True,
    ),
    "a-cleared-worker-is-not-looked-at-anew": Planted(
        "decisions go on looking at the bit that a worker had before its cache was restated",
        "lossy-network",
        PrefixIndex,
        "clear",
        _clear_unseen,
        True,
        from_seed=400,
    ),
    "a-checkpoint-without-beliefs": Planted(
        "a replay that begins at a checkpoint knows nothing of the router's own choices for stale workers",
        "lossy-network",
        ApproximateIndex,
        "restore_beliefs",
        _believe_nothing,
    ),
    "acknowledged-before-stored-in-a-stream": Planted(
        "batches are acknowledged before the stream has acknowledged them",
        "streams",
        JournalWriter,
        "put",
        _answer_at_once,
    ),
    "an-overtaken-writer-goes-on": Planted(
        "a writer stores its records wherever the stream ends",
        "streams",
        StreamJournal,
        "_append",
        _append_wherever_it_ends,
    ),
    "what-was-not-answered-is-sent-again": Planted(
        "a writer sends what was not answered again, without looking whether it is stored",
        "streams",
        StreamJournal,
        "_settle",
        _forget_what_was_sent,
    ),
    "a-snapshot-that-may-be-lost-is-relied-on": Planted(
        "messages are removed behind a snapshot that servers lose when their power fails",
        "streams",
        KeptSnapshots,
        "durable",
        _any_snapshot_will_do,
        True,
        from_seed=48,
    ),
    "a-full-stream-stays-full": Planted(
        "a stream that has no room for records is left to itself",
        "streams",
        StreamJournal,
        "make_room",
        _make_no_room,
    ),
    "a-worker-stays-with-who-was-active": Planted(
        "a worker does not notice that another consolidator is active",
        "streams",
        LeaderWatch,
        "_note",
        _note_the_first,
    ),
}


@contextmanager
def planted(name: str) -> Iterator[Planted]:
    """Have a bug for a while."""
    bug = PLANTED[name]
    right = getattr(bug.owner, bug.method)
    setattr(bug.owner, bug.method, bug.broken)
    try:
        yield bug
    finally:
        setattr(bug.owner, bug.method, right)
