"""What operators, metrics and clients that ask for models see of the pools. Reading changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from poolgrid.global_router.configuration import Configuration
from poolgrid.global_router.core.choice.grid import PoolStanding
from poolgrid.global_router.pools import Pools
from poolgrid.inference.ports import ServedModel
from poolgrid.process.clock import Clock
from poolgrid.wire.answers import EndpointRow
from poolgrid.wire.card import NO_CHAT_SPEC, ChatSpec, Inability, MediaSpec, common
from poolgrid.wire.selection import ModelStatus
from poolgrid.wire.tasks import TASK_ROLES

log = logging.getLogger(__name__)

NOT_THERE = (PoolStanding.DOWN, PoolStanding.LOADING, PoolStanding.CONNECTING, PoolStanding.DRAINING)
"""States of pools that take no request. One whose breaker is open is not among them: requests are what closes it."""


class PoolsView:
    """The pools of the document in force."""

    def __init__(self, pools: Pools, configuration: Configuration, clock: Clock) -> None:
        self._pools = pools
        self._configuration = configuration
        self._clock = clock
        self._created_s = clock.wall_ms() // 1000
        self._contradicting: dict[tuple[str, str], list[tuple[str, str, str]]] = {}

    def models(self) -> list[ServedModel]:
        chats: dict[str, ChatSpec] = {}
        lengths: dict[str, int] = {}
        loras: dict[str, dict[str, None]] = {}
        aliases: dict[str, dict[str, None]] = {}
        media: dict[str, MediaSpec] = {}
        inabilities: dict[str, list[Sequence[Inability]]] = {}
        for pool in self._pools.all():
            for served in pool.status.models if pool.status is not None else ():
                if served.roles and all(each.role in TASK_ROLES.values() for each in served.roles):
                    continue  # tasks are for the router of the pool
                lengths[served.model] = max(lengths.get(served.model, 0), served.max_sequence_length)
                loras.setdefault(served.model, {}).update(dict.fromkeys(served.loras))
                aliases.setdefault(served.model, {}).update(dict.fromkeys(served.aliases))
                inabilities.setdefault(served.model, []).append(served.inabilities)
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
                common(inabilities[name]),
            )
            for name, length in sorted(lengths.items())
        ]

    def _joined(self, chat: ChatSpec, served: ModelStatus, pool: str) -> ChatSpec:
        """Return what pools report of a model's chats: the first that reports it counts, and others are logged once."""
        told = chat.contradictions(served.chat)
        if told and self._contradicting.get((pool, served.model)) != told:
            # Kept for each pool and model that there is, so it stays as small as they are.
            self._contradicting[pool, served.model] = told
            for field, value, other in told:
                log.warning(
                    "pool %s reports of model %r: %s %s; an earlier pool of the document reports %s, which is used",
                    pool,
                    served.model,
                    field,
                    other,
                    value,
                )
        return chat.filled(served.chat)

    def endpoints(self) -> list[EndpointRow]:
        return [
            EndpointRow(
                endpoint=pool.name,
                model=served.model,
                role=role.role.name.lower(),
                workers=role.ready + role.draining + role.unreachable,
                ready=role.ready,
                instances=[],
            )
            for pool in self._pools.all()
            for served in (pool.status.models if pool.status is not None else ())
            for role in served.roles
        ]

    def missing(self) -> str | None:
        """Return ``None`` when every stage has a pool that is up, else what is missing."""
        now_ms = self._clock.monotonic_ms()
        for name, stage in self._configuration.active.document.stages.items():
            pools = [self._pools.get(pool.name) for pool in stage.pools]
            if all(pool is None or pool.overall_state(now_ms) in NOT_THERE for pool in pools):
                return f"no {name} pool is up"
        return None

    def pool_states(self) -> Mapping[str, PoolStanding]:
        now_ms = self._clock.monotonic_ms()
        return {pool.name: pool.overall_state(now_ms) for pool in self._pools.all()}
