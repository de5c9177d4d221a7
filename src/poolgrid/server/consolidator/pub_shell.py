"""The publishers that a consolidator follows: results of their followers become turns of the core.

``PubShell`` owns the sockets of one (``poolgrid.server.transport.publisher_sockets``). Two kinds of them:
``EngineShell`` for an engine that is a worker by itself, ``FurtherShell`` for a further source of a worker that joins
by itself.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import zmq

from poolgrid.kernel.consolidation.consolidator import Consolidator, ConsolidatorTurn, MemberJoined, MemberLeft
from poolgrid.kernel.consolidation.further_source import FollowerLimits, FurtherSource
from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.kv_events.follower import AskReplay, Leave, NewLife, PubEffect, PubFollower, SourceState
from poolgrid.kernel.wire.events import EventBatch
from poolgrid.kernel.wire.feed import WORKER_SOURCE
from poolgrid.kernel.wire.identifiers import StreamState, WorkerKey
from poolgrid.server.consolidator.sources_file import FurtherPub, Publisher, PubSource
from poolgrid.server.process.clock import Clock
from poolgrid.server.transport import publisher_sockets
from poolgrid.server.transport.publisher_sockets import PublisherSockets

log = logging.getLogger(__name__)

TakeTurn = Callable[[Callable[[Consolidator, ConsolidatorTurn], None]], None]

WAITING = "waiting"
"""What is shown of a further source whose worker is no member."""


class FollowedSource(publisher_sockets.Followed, Protocol):
    """Follower of a publisher for the pool: its inputs and effects, and what is shown of it."""

    @property
    def counts(self) -> dict[str, int]: ...

    @property
    def health(self) -> tuple[StreamState, str]: ...


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
        followed: FollowedSource,
    ) -> None:
        """``take_turn`` runs a turn of the core, whose state is ``pool``."""
        self.source = source
        self.refused: str | None = None
        """Why the pool does not take this publisher, if so."""
        self._take_turn = take_turn
        self._clock = clock
        self._pool = pool
        self._followed = followed
        self._told = StreamState.SYNCING
        """Latest state of the stream that the pool has."""
        self._sockets = PublisherSockets(self.name, source, context, clock, lease_ms, followed, self._carry_out)

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
        """Return whether the publisher's blocks are known in part only, or not at all."""

    @property
    def key(self) -> WorkerKey:
        return self.source.key

    @property
    def shown_state(self) -> str:
        return self._followed.health[0].name.lower()

    def row(self) -> dict[str, object]:
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
        """Return how many blocks its worker holds by its reports, each tier counted."""
        worker = self._pool.workers.get(self.key)
        return worker.presence.count_of(self.source_name) if worker is not None else 0

    @property
    def counts(self) -> Mapping[str, int]:
        return self._followed.counts

    @abstractmethod
    def start(self) -> None:
        """Begin to follow."""

    def pause(self) -> None:
        """Take nothing in: the journal does not take it."""
        self._sockets.pause()

    def resume(self) -> None:
        self._sockets.resume()

    def close(self) -> None:
        self._sockets.close()

    def _open(self) -> None:
        """Subscribe, or report why that fails: one publisher is no reason for the others' events to stay away."""
        try:
            self._sockets.open()
        except zmq.ZMQError as error:
            self.refused = f"connecting to its endpoint {self.source.endpoint!r} failed: {error}"
            log.error("PUB source %s is not followed: %s", self.name, self.refused)
            self.close()

    @abstractmethod
    def _apply(self, effect: PubEffect, core: Consolidator, turn: ConsolidatorTurn) -> None:
        """Carry out what concerns the pool."""

    def _carry_out(self, effects: Sequence[PubEffect]) -> None:
        def work(core: Consolidator, turn: ConsolidatorTurn) -> None:
            for effect in effects:
                if not isinstance(effect, AskReplay):
                    self._apply(effect, core, turn)
            state, reason = self._followed.health
            core.note_stream(self.key, self.source_name, state, reason, turn)

        if effects or self._followed.health[0] is not self._told:
            self._told = self._followed.health[0]
            self._take_turn(work)


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
        return WORKER_SOURCE

    @property
    def degraded(self) -> bool:
        """Return whether the engine's blocks are known in part only, or not at all."""
        follower = self._follower
        in_part = follower.degraded or bool(follower.unknown)
        return in_part or self.refused is not None or follower.state is SourceState.ABSENT

    def start(self) -> None:
        self._open()

    def _apply(self, effect: PubEffect, core: Consolidator, turn: ConsolidatorTurn) -> None:
        if isinstance(effect, NewLife):
            before = self.refused
            self.refused = core.attach(self.key, effect.epoch, self._card, turn)
            if self.refused is not None and self.refused != before:
                log.error("PUB engine %s is not taken into the pool: %s", self.name, self.refused)
            log.info("PUB engine %s: new epoch, %s", self.name, effect.reason)
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
        return f"{self.key}:{self._source_name}"

    @property
    def source_name(self) -> str:
        return self._source_name

    @property
    def shown_state(self) -> str:
        return super().shown_state if self._further.is_followed else WAITING

    @property
    def degraded(self) -> bool:
        """Return whether a member's blocks at this source are known in part only, or not at all."""
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
        self._sockets.arm()

    def _apply(self, effect: PubEffect, core: Consolidator, turn: ConsolidatorTurn) -> None:
        if isinstance(effect, EventBatch) and not core.take(effect, turn) and self.refused is None:
            limit = core.limits.sources_per_worker_max
            self.refused = f"worker {self.key} has {limit} sources, allowed are at most {limit}"
            log.error("PUB source %s is not taken into the pool: %s", self.name, self.refused)
