"""The sockets of one publisher: a subscription, its monitor, and a DEALER for replays.

``PubShell`` holds the sockets and hands what comes to whoever follows the publisher. Two kinds of them: ``EngineShell``
for an engine that is a worker by itself, ``FurtherShell`` for a further source of a worker that joins by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolgrid.router.consolidator.core.consolidator import Consolidator, MemberJoined, MemberLeft, Turn
from poolgrid.router.consolidator.core.further_source import FollowerLimits, FurtherSource
from poolgrid.router.consolidator.core.pool_state import PoolState
from poolgrid.router.consolidator.core.pub_source import AskReplay, Leave, NewLife, PubEffect, PubFollower, SourceState
from poolgrid.router.consolidator.sources_file import FurtherPub, Publisher, PubSource
from poolgrid.runtime.clock import Clock
from poolgrid.runtime.planes import leave_plain
from poolgrid.runtime.zmq_socket import BatchSocket
from poolgrid.wire.events import EventBatch
from poolgrid.wire.identifiers import StreamState, WorkerKey
from poolgrid.wire.limits import FRAME_BYTES_MAX
from poolgrid.wire.streams import WORKER_SOURCE

log = logging.getLogger(__name__)

TakeTurn = Callable[[Callable[[Consolidator, Turn], None]], None]

seq_frame = struct.Struct(">Q")
"""The frame in which a PUB engine numbers its messages, u64 big-endian (vLLM's `ZmqEventPublisher`)."""

SUBSCRIPTION_QUEUE_MAX = 20_000
"""Frames that ZMQ keeps while we are busy; beyond it they are lost, which the follower sees as a hole."""

_monitors = itertools.count()
"""Numbers the sockets that tell of connections: their addresses are names in this process."""

WAITING = "waiting"
"""What is shown of a further source whose worker is no member."""


class Followed(Protocol):
    """Who follows a publisher: inputs in order, effects out."""

    @property
    def counts(self) -> dict[str, int]:
        """Return the counters of the source."""
        ...

    @property
    def health(self) -> tuple[StreamState, str]:
        """Return how far the stream can be trusted, and why."""
        ...

    def connected(self, now_ms: float, wall_ms: int) -> Sequence[PubEffect]:
        """The subscription reached the publisher (again)."""
        ...

    def disconnected(self, now_ms: float) -> Sequence[PubEffect]:
        """The connection is gone."""
        ...

    def live(self, seq: int, payload: bytes, now_ms: float, wall_ms: int) -> Sequence[PubEffect]:
        """A frame of the subscription."""
        ...

    def replayed(self, seq: int, payload: bytes, now_ms: float, wall_ms: int) -> Sequence[PubEffect]:
        """A frame of the replay socket."""
        ...

    def tick(self, now_ms: float, wall_ms: int) -> Sequence[PubEffect]:
        """Time has passed."""
        ...

    def due_ms(self) -> float | None:
        """Return when ``tick`` has something to do."""
        ...

    def count_undecodable(self) -> None:
        """Count a message that is none."""
        ...


class PubShell(ABC):
    """Carries a follower's inputs and effects; owned by the consolidator service."""

    def __init__(
        self,
        source: Publisher,
        context: zmq.Context[Any],
        take_turn: TakeTurn,
        clock: Clock,
        pool: PoolState,
        lease_ms: int,
        followed: Followed,
    ) -> None:
        """``take_turn`` runs a turn of the core, whose state is ``pool``."""
        self.source = source
        self.refused: str | None = None
        """Why the pool does not take this publisher, if so."""
        self._context = context
        self._take_turn = take_turn
        self._clock = clock
        self._pool = pool
        self._lease_ms = lease_ms
        self._followed = followed
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._told = StreamState.SYNCING
        """What the pool was last told of the stream."""
        self._subscription: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_inbox: BatchSocket | None = None
        self._inboxes: list[BatchSocket] = []
        """Of the subscription and its monitor."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name by which the source goes in metrics and logs."""

    @property
    @abstractmethod
    def source_name(self) -> str:
        """Return its name among the sources of its worker."""

    @property
    @abstractmethod
    def degraded(self) -> bool:
        """Say whether the publisher's blocks are known in part only, or not at all."""

    @property
    def key(self) -> WorkerKey:
        """Return the worker rank that it speaks about."""
        return self.source.key

    @property
    def shown_state(self) -> str:
        """Return the state of the stream in a word."""
        return self._followed.health[0].name.lower()

    def row(self) -> dict[str, object]:
        """Return the source as ``/health`` shows it."""
        return {
            "worker_id": self.key.worker_id,
            "dp_rank": self.key.dp_rank,
            "source": self.source_name,
            "endpoint": self.source.endpoint,
            "state": self.shown_state,
            "reason": self.refused or self._followed.health[1],
            "blocks": self.blocks,
        }

    @property
    def blocks(self) -> int:
        """Return how many blocks it says its worker holds, each tier counted."""
        worker = self._pool.workers.get(self.key)
        return worker.presence.count_of(self.source_name) if worker is not None else 0

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the counters of the source."""
        return self._followed.counts

    @abstractmethod
    def start(self) -> None:
        """Begin to follow."""

    def pause(self) -> None:
        """Take nothing in: the journal does not take it."""
        self._paused = True
        for inbox in (*self._inboxes, self._replay_inbox):
            if inbox is not None:
                inbox.pause()

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        for inbox in (*self._inboxes, self._replay_inbox):
            if inbox is not None:
                inbox.resume()
        self._arm()

    def close(self) -> None:
        """Close the sockets."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for inbox in self._inboxes:
            inbox.stop()
        self._inboxes = []
        if self._subscription is not None:
            self._subscription.monitor(None, 0)
            if self._monitor is not None:
                self._monitor.close()  # not before: see ``_monitored``
            self._subscription.close()
            self._subscription = self._monitor = None
        self._close_replay()

    def _close_replay(self) -> None:
        if self._replay_inbox is not None:
            self._replay_inbox.stop()
            self._replay_inbox = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _open(self) -> None:
        """Subscribe, or say why that fails: one publisher is no reason for the others' events to stay away."""
        try:
            self._subscribe()
        except zmq.ZMQError as error:
            self.refused = f"connecting to its endpoint {self.source.endpoint!r} failed: {error}"
            log.error("PUB source %s is not followed: %s", self.name, self.refused)
            self.close()

    def _subscribe(self) -> None:
        """Subscribe. A publisher that says nothing for the lease, not even its socket, has lost its connection."""
        subscription: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._subscription = subscription
        leave_plain(subscription)  # engines publish without CURVE
        subscription.setsockopt(zmq.LINGER, 0)
        subscription.setsockopt(zmq.RCVHWM, SUBSCRIPTION_QUEUE_MAX)
        subscription.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        subscription.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
        subscription.setsockopt(zmq.RECONNECT_IVL, 50)
        subscription.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # ZMQ's own sign of life: one whose machine vanished, or that stands still, never ends its connection.
        subscription.setsockopt(zmq.HEARTBEAT_IVL, max(1, self._lease_ms // 3))
        subscription.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._lease_ms)
        self._monitor = self._monitored(subscription)
        self._inboxes = [BatchSocket(self._monitor, self._on_monitor), BatchSocket(subscription, self._on_live)]
        for inbox in self._inboxes:
            if self._paused:
                inbox.pause()
            inbox.start()
        subscription.connect(self.source.endpoint)

    def _monitored(self, subscription: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Return a socket that tells of the subscription's connection.

        ZMQ's thread waits when it cannot tell: with the subscription's lock, so that whoever closes it waits for ever.
        The queue has no bound therefore (two events a connection), and the socket outlives the monitoring.
        """
        address = f"inproc://pub-monitor-{next(_monitors)}"
        subscription.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(address)
        return monitor

    # Inputs

    def _on_monitor(self, messages: list[list[bytes]]) -> None:
        effects: list[PubEffect] = []
        for frames in messages:
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                log.info("PUB source %s: connected to %s", self.name, self.source.endpoint)
                effects += self._followed.connected(self._clock.monotonic_ms(), self._clock.wall_ms())
            elif event == zmq.EVENT_DISCONNECTED:
                log.warning("PUB source %s: connection lost", self.name)
                effects += self._followed.disconnected(self._clock.monotonic_ms())
        self._carry_out(effects)

    def _on_live(self, messages: list[list[bytes]]) -> None:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        effects: list[PubEffect] = []
        for frames in messages:
            if len(frames) < 2 or len(frames[-2]) != 8:
                self._followed.count_undecodable()
                continue
            effects += self._followed.live(seq_frame.unpack(frames[-2])[0], frames[-1], now_ms, wall_ms)
        self._carry_out(effects)

    def _on_replay(self, messages: list[list[bytes]]) -> None:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        effects: list[PubEffect] = []
        for frames in messages:
            if len(frames) < 2 or len(frames[-2]) != 8:
                self._followed.count_undecodable()
                continue
            effects += self._followed.replayed(seq_frame.unpack(frames[-2])[0], frames[-1], now_ms, wall_ms)
            if any(isinstance(effect, AskReplay) for effect in effects):
                break  # the rest answers a question that no longer stands
        self._carry_out(effects)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._paused:
            self._carry_out(self._followed.tick(self._clock.monotonic_ms(), self._clock.wall_ms()))

    # Effects

    @abstractmethod
    def _apply(self, effect: PubEffect, core: Consolidator, turn: Turn) -> None:
        """Carry out what concerns the pool."""

    def _carry_out(self, effects: Sequence[PubEffect]) -> None:
        asked: AskReplay | None = None

        def work(core: Consolidator, turn: Turn) -> None:
            nonlocal asked
            for effect in effects:
                if isinstance(effect, AskReplay):
                    asked = effect
                else:
                    self._apply(effect, core, turn)
            state, reason = self._followed.health
            core.note_stream(self.key, self.source_name, state, reason, turn)

        if effects or self._followed.health[0] is not self._told:
            self._told = self._followed.health[0]
            self._take_turn(work)
        if asked is not None:
            self._ask(asked)
        self._arm()

    def _ask(self, ask: AskReplay) -> None:
        # A socket of its own for each request: what still comes on the old one answers a question of the past.
        self._close_replay()
        self._replay = self._context.socket(zmq.DEALER)
        leave_plain(self._replay)
        self._replay.setsockopt(zmq.LINGER, 0)
        self._replay.setsockopt(zmq.RCVHWM, 0)  # the engine's own buffer is the bound; dropping would be a hole
        self._replay.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        try:
            self._replay.connect(self.source.replay_endpoint)
            self._replay.send_multipart([b"", seq_frame.pack(ask.from_seq)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Like an answer that does not come: asked again when it is due, and a loss in the end.
            log.error("PUB source %s: asking %s for a replay failed: %s", self.name, self.source.replay_endpoint, error)
            self._close_replay()
            return
        self._replay_inbox = BatchSocket(self._replay, self._on_replay)
        if self._paused:
            self._replay_inbox.pause()
        self._replay_inbox.start()
        log.info("PUB source %s: asked for a replay from frame %d", self.name, ask.from_seq)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self._followed.due_ms()
        if due_ms is not None and not self._paused:
            wait_ms = max(1.0, due_ms - self._clock.monotonic_ms())
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._on_timer)


class EngineShell(PubShell):
    """An engine that publishes itself, and is a worker of the pool while its connection stands."""

    def __init__(
        self,
        source: PubSource,
        context: zmq.Context[Any],
        take_turn: TakeTurn,
        clock: Clock,
        pool: PoolState,
        lease_ms: int,
        blocks_max: int,
    ) -> None:
        """``blocks_max`` are the most blocks that are taken in."""
        known = pool.workers.get(source.key)
        self._card = source.card
        self._follower = PubFollower(
            source.key,
            source.card.block_size,
            blocks_max,
            bool(source.replay_endpoint),
            source.replay_timeout_ms,
            lease_ms,
            known.epoch if known is not None else 0,
        )
        super().__init__(source, context, take_turn, clock, pool, lease_ms, self._follower)

    @property
    def name(self) -> str:
        """Return the name of the worker rank, by which the source goes."""
        return str(self.key)

    @property
    def source_name(self) -> str:
        """Return the name of a worker's own stream."""
        return WORKER_SOURCE

    @property
    def degraded(self) -> bool:
        """Say whether the engine's blocks are known in part only, or not at all."""
        return self._follower.degraded or self.refused is not None or self._follower.state is SourceState.ABSENT

    def start(self) -> None:
        """Connect and begin to receive."""
        self._open()

    def _apply(self, effect: PubEffect, core: Consolidator, turn: Turn) -> None:
        if isinstance(effect, NewLife):
            before = self.refused
            self.refused = core.attach(self.key, effect.epoch, self._card, turn)
            if self.refused is not None and self.refused != before:
                log.error("PUB engine %s is not taken into the pool: %s", self.name, self.refused)
            log.info("PUB engine %s: new life, %s", self.name, effect.reason)
        elif isinstance(effect, Leave):
            core.detach(self.key, effect.reason, turn)
        elif isinstance(effect, EventBatch) and self.refused is None:
            core.take(effect, turn)


class FurtherShell(PubShell):
    """A further source of a worker that joins by itself: followed while that worker is a member."""

    def __init__(
        self,
        source: FurtherPub,
        context: zmq.Context[Any],
        take_turn: TakeTurn,
        clock: Clock,
        pool: PoolState,
        lease_ms: int,
        blocks_max: int,
    ) -> None:
        """``blocks_max`` are the most blocks that are taken in."""
        self._source_name = source.source
        limits = FollowerLimits(blocks_max, bool(source.replay_endpoint), source.replay_timeout_ms, lease_ms)
        self._further = FurtherSource(source.key, source.source, limits, source.outlives_worker)
        super().__init__(source, context, take_turn, clock, pool, lease_ms, self._further)

    @property
    def name(self) -> str:
        """Return the names of the worker rank and of the source."""
        return f"{self.key}:{self._source_name}"

    @property
    def source_name(self) -> str:
        """Return its name among the sources of its worker."""
        return self._source_name

    @property
    def shown_state(self) -> str:
        """Return the state of the stream in a word."""
        return super().shown_state if self._further.is_followed else WAITING

    @property
    def degraded(self) -> bool:
        """Say whether a member's blocks at this source are known in part only, or not at all."""
        if self.refused is not None:
            return True
        lacking = (StreamState.STALE, StreamState.ABSENT, StreamState.FORMER)
        return self._further.is_followed and self._further.health[0] in lacking

    def start(self) -> None:
        """Follow the source of a worker that the journal knows; others are waited for."""
        worker = self._pool.workers.get(self.key)
        if worker is not None:
            self._further.recovered(worker, self._clock.monotonic_ms())
            self._follow(worker.stream(self._source_name).state)

    def member(self, member: MemberJoined | MemberLeft) -> None:
        """The worker came or went."""
        if isinstance(member, MemberJoined):
            self._further.joined(member, self._clock.monotonic_ms())
            self._follow(StreamState.SYNCING)
        else:
            self._further.left(member)
            self.close()

    def _follow(self, told: StreamState) -> None:
        self._told = told
        self.refused = None
        self._open()
        self._carry_out([])

    def _apply(self, effect: PubEffect, core: Consolidator, turn: Turn) -> None:
        if isinstance(effect, EventBatch) and not core.take(effect, turn) and self.refused is None:
            limit = core.limits.sources_per_worker_max
            self.refused = f"worker {self.key} has {limit} sources, allowed are at most {limit}"
            log.error("PUB source %s is not taken into the pool: %s", self.name, self.refused)
