"""A router's core in front of a pool that is told what to do, recorded on disks in memory, with a clock of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.index.following_tokens import FollowingTokens
from poolgrid.kernel.routing.inputs import (
    Booked,
    Expired,
    RecordsArrived,
    Released,
    Renewed,
    SnapshotArrived,
    TurnOffered,
    WorkerWanted,
)
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    JournalRecord,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.hashing import pack_hashes, pack_tokens
from poolgrid.kernel.wire.identifiers import WorkerKey
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.process.settings import with_constants
from poolgrid.server.router.choosing import CROWDED
from poolgrid.server.router.decision_journal.opening import DECIDING_SETTINGS, policy_of
from poolgrid.server.router.decision_journal.recorder import (
    QUEUE_LIMIT,
    DecisionRecorder,
    DecisionSegments,
    settings_noted,
)
from poolgrid.server.router.decision_journal.replay import DecisionReplay, ReplayOutcome
from poolgrid.server.router.policy_loading import make_state
from poolgrid.server.router.settings import RouterSettings
from tests.clock import HandClock
from tests.consolidator.journal_builder import FakeDisk
from tests.router.fleet_builder import BLOCK_SIZE, make_card, stored, worker_key

BLOCKS_MAX = 1_000_000
WAITED_MS = 40.0
"""What every third request had waited for its worker, and twice as long another third."""

NAMES = ("a", "b", "c", "d")


class RecordedRouter:
    """Projection, selector and recorder, driven by a seeded hand."""

    def __init__(
        self,
        seed: int = 0,
        segment_bytes: int = 1 << 20,
        queue_limit: int = QUEUE_LIMIT,
        honesty: float = 0.9,
        churn: float = 1.0,
        scale: int = 1,
        starts_late: bool = False,
        kv_blocks: int = 0,
        **given: object,
    ) -> None:
        """``scale``: how much longer than usual prompts are, and everything takes; then half of them come only once.

        ``starts_late``: a worker says that a request began after the router has released it.
        """
        self.settings = with_constants(RouterSettings, {"reservation_ttl_ms": 500, **given})
        self.clock = HandClock()
        self.pool_disk = FakeDisk()
        self.decisions_disk = FakeDisk()
        self.lives = 0
        self.journal = FileJournal(self.pool_disk, JournalSettings(segment_bytes=4000))
        self.chance = random.Random(seed)
        self.simulated_speedup = 0.0
        """What the cards of workers that join say of their engines."""
        self.joined: dict[WorkerKey, int] = {}
        self.open: list[tuple[WorkerKey, str]] = []
        self.requests = 0
        self.made = 0
        self.admissions = {True: 0, False: 0}
        """Turns of sessions that were admitted, and that had to wait; here they are gone."""
        self._seq = 0
        self._epoch = 0
        self._segment_bytes = segment_bytes
        self._queue_limit = queue_limit
        self._honesty = honesty
        """Share of the requests that reuse what the index says."""
        self._scale = scale
        self._conversations, self._kv_blocks = (4, 1000) if scale == 1 else (24, 4000)
        self._kv_blocks = kv_blocks or self._kv_blocks
        self._starts_late = starts_late
        self._churn = churn
        """How often workers come and go, as a share of the usual."""
        self.begin()

    def begin(self) -> None:
        """Begin a life of the router."""
        settings = self.settings
        values = {name: getattr(settings, name) for name in DECIDING_SETTINGS}
        noted = settings_noted("r", "test", values)
        self.state = make_state(settings, policy_of(noted))
        self.selector = self.state.selector
        self.projection = self.selector.projection
        self.recorder = DecisionRecorder(
            DecisionSegments(self.decisions_disk, 1 << 30, 10**12),
            self.state,
            noted,
            self.clock,
            self._segment_bytes,
            self._queue_limit,
        )
        self.state.log = self.recorder
        self.recorder.start()
        pool = self.journal.recover(BLOCKS_MAX)
        frozen = pool.freeze()
        load = self.projection.begin_load(frozen.offset, frozen.states(), frozen.visible_chains())
        while load.step(1000):
            pass
        self.state.apply(SnapshotArrived(load, self.clock.monotonic_ms()))

    # -- what happens ----------------------------------------------------------------------------------------------

    def say(self, worker: WorkerKey, *events: AnyEvent, source: str = "worker") -> None:
        """Let a worker's batch become a record that the router applies."""
        offset = self.journal.next_offset
        self._seq += 1
        record = JournalRecord(
            offset,
            worker.worker_id,
            worker.dp_rank,
            self.joined.get(worker, self._epoch),
            self._seq,
            self.clock.wall_ms(),
            self.clock.wall_ms(),
            list(events),
            source,
        )
        self.journal.append([codec.journal_record.encode(record)], self.clock.wall_ms())
        self.state.apply(RecordsArrived([record], self.clock.monotonic_ms()))

    def join(self, name: str) -> None:
        """Begin a life of a worker."""
        self._epoch += 1
        worker = worker_key(name)
        self.joined[worker] = self._epoch
        self.open = [each for each in self.open if each[0] != worker]
        card = msgspec.structs.replace(
            make_card(max_batch_size=4, max_sequence_length=4096 * self._scale, total_kv_blocks=self._kv_blocks),
            simulated_speedup=self.simulated_speedup,
        )
        self.say(worker, WorkerJoined(card), source="consolidator")

    def crash(self, name: str) -> None:
        """End a worker's life without a word of its own."""
        worker = worker_key(name)
        if self.joined.pop(worker, None) is not None:
            self.open = [each for each in self.open if each[0] != worker]
            self.say(worker, WorkerLeft("lease"), source="consolidator")

    def request(self) -> None:
        """Route a request, and book it unless its connection is full."""
        chance = self.chance
        conversation = chance.randrange(self._conversations)
        blocks = self._scale * chance.randrange(1, 30)
        self.requests += 1
        if self._scale > 1 and self.requests % 2:
            conversation = 10 * self.requests
        path = [1000 * self._scale * conversation + block for block in range(blocks)]
        if self.requests % 7 == 3:  # its client has rewritten the history
            path = [10**6 * self.requests + block for block in range(blocks)]
        request_id = f"request-{self.requests}"
        session = f"session-{conversation}" if self.requests % 5 else ""
        parent = "session-0" if conversation == 1 else ""
        following = None
        if self.state.projection.index.groups.following_tokens:
            following = FollowingTokens(1, pack_tokens([chance.randrange(2) for _ in path]))
        routing = RoutingRequest(
            request_id, "m", len(path) * BLOCK_SIZE + 3, BLOCK_SIZE, len(path) + 1,
            priority=self.requests % 2, session=session, tenant=7, parent=parent, following=following,
        )  # fmt: skip
        down = {worker_key(chance.choice(NAMES)): "unreachable"} if chance.random() < 0.2 else {}
        now_ms = self.clock.monotonic_ms()
        behind = {worker_key(NAMES[self.requests % len(NAMES)]): 3} if self.requests % 3 == 0 else {}
        queued_ms = WAITED_MS * (self.requests % 3)
        if session:
            is_behind = self.requests % 4 == 0
            offered = TurnOffered(
                routing, path, now_ms, self.clock.wall_ms(), waited_ms=queued_ms, is_behind=is_behind
            )  # fmt: skip
            admission = self.state.apply(offered)
            self.admissions[admission.admitted] += 1
            if not admission.admitted:
                return
            down |= dict.fromkeys(admission.crowded, CROWDED)
        wanted = WorkerWanted(routing, path, now_ms, self.clock.wall_ms(), down, behind=behind, queued_ms=queued_ms)
        if chance.random() < 0.2 and not isinstance(self.state.preview(wanted), Decision):  # somebody only asks
            return
        decision = self.state.apply(wanted)
        if not isinstance(decision, Decision):
            return
        self.made += 1
        if chance.random() < 0.95:
            self.state.apply(Booked(decision, path, request_id, now_ms, chance.choice((0.0, 100.0))))
            self.open.append((decision.worker, request_id))
            if chance.random() < 0.7:
                cached = decision.overlap_blocks * BLOCK_SIZE if chance.random() < self._honesty else 0
                self.say(decision.worker, RequestStarted(request_id, routing.isl, cached, routing.blocks))
                self.say(decision.worker, stored(path), PrefillCompleted(request_id))

    def step(self) -> None:
        """Let something happen."""
        chance = self.chance
        self.clock.now_ms += self._scale * chance.choice((0.0, 0.25, 3.0, 60.0))
        draw = chance.random()
        if draw < 0.5:
            self.request()
        elif draw < 0.65 and self.open:
            worker, request_id = self.open.pop(chance.randrange(len(self.open)))
            if chance.random() < 0.5 and worker in self.joined:
                self.say(worker, RequestFinished(request_id, "stop"))
            self.state.apply(Released(worker, request_id))
            if self._starts_late and (
                chance.random() < 0.3 or (worker, request_id) in self.projection.ledger.late_starts
            ):
                self.say(worker, RequestStarted(request_id, 100, 0, 7))
            self.recorder.ended(request_id, 10 + len(request_id))
        elif draw < 0.75 and self.open:
            worker, request_id = chance.choice(self.open)
            self.state.apply(Renewed(worker, request_id, self.clock.monotonic_ms()))
            if worker in self.joined:
                self.say(worker, RequestProgressed(request_id, chance.randrange(40)))
        elif draw < 0.85:
            held = {request_id for _, request_id in self.open if chance.random() < 0.5}
            self.state.apply(Expired(self.clock.monotonic_ms(), held))
        elif draw < 0.9 and self.joined:
            worker = chance.choice(sorted(self.joined))
            self.say(worker, BlocksRemoved(pack_hashes([1000 * chance.randrange(4) + chance.randrange(20)])))
        elif chance.random() > self._churn:
            self.request()
        elif draw < 0.92:
            self.crash(chance.choice(NAMES))
        elif draw < 0.93 and self.joined:
            self.say(chance.choice(sorted(self.joined)), WorkerDraining())
        else:
            self.join(chance.choice(NAMES))

    # -- what comes of it ------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> Path:
        """Write both journals to a real directory, as a router with a data_dir would have; return it."""
        below = directory / "decisions" / "router"
        below.mkdir(parents=True)
        for target, disk in ((directory, self.pool_disk), (below, self.decisions_disk)):
            for name, data in disk.files.items():
                (target / name).write_bytes(data)
        return directory

    def replay(self, pool: FakeDisk | None = None, decisions: FakeDisk | None = None) -> ReplayOutcome:
        """Replay what was recorded."""
        return DecisionReplay(pool or self.pool_disk, decisions or self.decisions_disk, policy_of, BLOCKS_MAX).run()


async def written(router: RecordedRouter, until: Callable[[], bool] | None = None) -> None:
    """Wait until nothing waits to be written (and something else holds)."""
    while router.recorder.pending or router.recorder._writing or not (until is None or until()):
        router.recorder.flush()
        await asyncio.sleep(0)
