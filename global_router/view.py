"""What others are shown of a global router: operators, metrics, clients that ask for models. Asking changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from poolgrid.global_router.books import FlightBooks
from poolgrid.global_router.configuration import Configuration
from poolgrid.global_router.core.choice.fallback import PoolStanding
from poolgrid.global_router.pools import Pools
from poolgrid.global_router.waiting_room import WaitingRoom
from poolgrid.inference.ports import ServedModel
from poolgrid.process.clock import Clock
from poolgrid.wire.answers import EndpointRow
from poolgrid.wire.card import NO_CHAT_SPEC, ChatSpec, MediaSpec
from poolgrid.wire.selection import ModelStatus

log = logging.getLogger(__name__)

NOT_THERE = (PoolStanding.DOWN, PoolStanding.LOADING, PoolStanding.CONNECTING, PoolStanding.DRAINING)
"""States of pools that take no request. One whose breaker is open is not among them: requests are what closes it."""


class Shown(Protocol):
    """What a view reads of its global router."""

    configuration: Configuration
    pools: Pools
    books: FlightBooks
    waiting_room: WaitingRoom


class GlobalRouterView:
    """Implements ``poolgrid.global_router.metrics.Viewed``."""

    def __init__(self, service: Shown, clock: Clock) -> None:
        self._service = service
        self._clock = clock
        self._created_s = clock.wall_ms() // 1000
        self._contradicting: dict[tuple[str, str], list[tuple[str, str, str]]] = {}

    def models(self) -> list[ServedModel]:
        """Return the models that some pool serves now."""
        chats: dict[str, ChatSpec] = {}
        lengths: dict[str, int] = {}
        loras: dict[str, dict[str, None]] = {}
        aliases: dict[str, dict[str, None]] = {}
        media: dict[str, MediaSpec] = {}
        for pool in self._service.pools.all():
            for served in pool.status.models if pool.status is not None else ():
                lengths[served.model] = max(lengths.get(served.model, 0), served.max_sequence_length)
                loras.setdefault(served.model, {}).update(dict.fromkeys(served.loras))
                aliases.setdefault(served.model, {}).update(dict.fromkeys(served.aliases))
                if served.media.kinds:
                    media.setdefault(served.model, served.media)
                if served.chat != NO_CHAT_SPEC:
                    chats[served.model] = self._joined(chats.get(served.model, NO_CHAT_SPEC), served, pool.name)
        return [
            ServedModel(
                name,
                self._created_s,
                length,
                tuple(sorted(loras[name])),
                media.get(name, MediaSpec()),
                chats.get(name, NO_CHAT_SPEC),
                tuple(sorted(aliases[name])),
            )
            for name, length in sorted(lengths.items())
        ]

    def _joined(self, chat: ChatSpec, served: ModelStatus, pool: str) -> ChatSpec:
        """Return what pools say of a model's chats: the first that says it counts, and others are reported once."""
        told = chat.contradictions(served.chat)
        if told and self._contradicting.get((pool, served.model)) != told:
            # Kept for each pool and model that there is, so it stays as small as they are.
            self._contradicting[pool, served.model] = told
            for field, value, other in told:
                log.warning(
                    "pool %s says of model %r: %s %s; an earlier pool of the document says %s, which is used",
                    pool,
                    served.model,
                    field,
                    other,
                    value,
                )
        return chat.filled(served.chat)

    def endpoints(self) -> list[EndpointRow]:
        """Return who serves which model in which role, by pool: an endpoint here is a pool."""
        return [
            EndpointRow(
                endpoint=pool.name,
                model=served.model,
                role=role.role.name.lower(),
                workers=role.ready + role.draining + role.unreachable,
                ready=role.ready,
                instances=[],
            )
            for pool in self._service.pools.all()
            for served in (pool.status.models if pool.status is not None else ())
            for role in served.roles
        ]

    def missing(self) -> str | None:
        """Return ``None`` when every stage has a pool that is up, else what is missing."""
        now_ms = self._clock.monotonic_ms()
        for name, stage in self._service.configuration.active.document.stages.items():
            pools = [self._service.pools.get(pool.name) for pool in stage.pools]
            if all(pool is None or pool.overall_state(now_ms) in NOT_THERE for pool in pools):
                return f"no {name} pool is up"
        return None

    def pool_states(self) -> Mapping[str, PoolStanding]:
        """Return the state of every pool."""
        now_ms = self._clock.monotonic_ms()
        return {pool.name: pool.overall_state(now_ms) for pool in self._service.pools.all()}

    def in_flight(self) -> Mapping[str, int]:
        """Return the dispatches under way by pool."""
        counts = {pool.name: 0 for pool in self._service.pools.all()}
        for flight in list(self._service.books.flights.values()):
            for leg in list(flight.legs.values()):
                counts[leg.pool.name] = counts.get(leg.pool.name, 0) + 1
        return counts

    def counts(self) -> tuple[int, int]:
        """Return requests that have begun, and requests that wait for a pool with room."""
        waiting = len(self._service.waiting_room)
        return len(self._service.books.flights) - waiting, waiting

    @property
    def queued_prompt_tokens(self) -> int:
        return self._service.waiting_room.prompt_tokens

    @property
    def queue_fill(self) -> float:
        """Return how full the queue is, from 0 to 1."""
        return self._service.waiting_room.view().fill

    @property
    def backlog_s(self) -> float:
        return self._service.waiting_room.backlog_s()

    def revision(self) -> int:
        return self._service.configuration.active.revision
