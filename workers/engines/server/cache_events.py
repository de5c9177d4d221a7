"""The cache events of all ranks of an engine server: none, followed over ZMQ, or drained over HTTP.

Rules of draining, where a server hands events out to whoever asks first:

1. Reading takes events away, so nobody else may read them: what another reader has taken is a hole in the numbers,
   after which claims are learnt again (``workers.core.event_translation``).
2. A server that has events is asked again at once, one that has none after ``IDLE_PAUSE_S``.
3. While a server cannot be asked nothing is known to have changed. One that comes back begins its numbers anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from poolgrid.kv_events.cache_events import AnyEngineEvent, StoredBlock
from poolgrid.kv_events.translation import RootSeed
from poolgrid.process.clock import Clock
from poolgrid.process.tasks import supervised
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.events import AnyEvent, BlocksStored
from poolgrid.wire.hashing import BASE_SEED, hash_seed
from poolgrid.wire.identifiers import Tier
from poolgrid.workers.core.event_translation import EventTranslator
from poolgrid.workers.engines.server.core.server_facts import EventSource
from poolgrid.workers.engines.server.rank_events import RankEvents
from poolgrid.workers.engines.server.server_client import ServerClient, ServerError

log = logging.getLogger(__name__)


IDLE_PAUSE_S = 0.05
"""Time between two questions to a server that has said nothing: events as late cost a choice now and then."""

FAILED_PAUSE_S = 1.0
"""Time between two questions to a server that does not answer."""

DRAIN_TIMEOUT_S = 30.0
"""How long an answer may take: some servers wait for an event for seconds before they say that there is none."""


class CacheEvents:
    """What follows the cache of every rank; this one follows nothing."""

    def cached_blocks(self, dp_rank: int) -> int:
        return 0

    def restate(self, dp_rank: int) -> list[BlocksStored]:
        return []

    def is_current(self) -> bool:
        return True

    def describe(self) -> dict[str, object]:
        return {}

    def open(self, tell: Callable[[int, list[AnyEvent]], None]) -> None:
        """Begin to follow."""

    def close(self) -> None:
        """Stop following."""


class FollowedEvents(CacheEvents):
    """Follows one publisher for each rank, in their order."""

    def __init__(
        self,
        sources: Sequence[EventSource],
        block_size: int,
        context: zmq.Context[Any],
        clock: Clock,
        root_seed: RootSeed | None = None,
    ) -> None:
        self._root_seed = root_seed
        self._sources = sources
        self._block_size = block_size
        self._context = context
        self._clock = clock
        self._ranks: list[RankEvents] = []

    def cached_blocks(self, dp_rank: int) -> int:
        return self.blocks_on(dp_rank, Tier.DEVICE)

    def blocks_on(self, dp_rank: int, tier: Tier) -> int:
        return self._ranks[dp_rank].told.count_on(tier) if self._ranks else 0

    def restate(self, dp_rank: int) -> list[BlocksStored]:
        return self._ranks[dp_rank].told.restate() if self._ranks else []

    def is_current(self) -> bool:
        return all(each.is_current for each in self._ranks)

    def describe(self) -> dict[str, object]:
        return {"events": [each.describe() for each in self._ranks]}

    def open(self, tell: Callable[[int, list[AnyEvent]], None]) -> None:
        """Begin to follow; raises ``ValueError`` for an endpoint that is none."""
        for dp_rank, source in enumerate(self._sources):
            rank = RankEvents(dp_rank, source, self._block_size, self._context, self._clock, tell, self._root_seed)
            self._ranks.append(rank)
            rank.open()

    def close(self) -> None:
        for each in self._ranks:
            each.close()


def _seed_of(block: StoredBlock) -> int:
    """Return the seed of a chain: servers that say anything of salts say it of each block."""
    return hash_seed("", block.cache_salt) if block.cache_salt else BASE_SEED


ParseEvent = Callable[[Any], AnyEngineEvent]


class DrainedEvents(CacheEvents):
    """The events of a server with one rank."""

    def __init__(self, client: ServerClient, path: str, parse: ParseEvent, block_size: int) -> None:
        """``parse`` reads one event in the server's words; raises ``DecodeError``."""
        self._client = client
        self._path = path
        self._parse = parse
        self._translator = EventTranslator(block_size, root_seed=_seed_of)
        self._reading: asyncio.Task[None] | None = None
        self._method = "POST"
        self._failed = ""
        self._undecodable = 0
        self._began = False

    def cached_blocks(self, dp_rank: int) -> int:
        return self._translator.blocks_on(Tier.DEVICE)

    def restate(self, dp_rank: int) -> list[BlocksStored]:
        return self._translator.restate()

    def is_current(self) -> bool:
        return self._began and not self._failed

    def describe(self) -> dict[str, object]:
        """Return how reading goes."""
        counts = self._translator.counts
        return {
            "events": [
                {
                    "dp_rank": 0,
                    "state": self._failed or ("incomplete" if self._translator.is_incomplete else "exact"),
                    "blocks": self.cached_blocks(0),
                    "lost_events": counts.lost_events,
                    "gaps": counts.gaps,
                    "undecodable": self._undecodable,
                }
            ]
        }

    def open(self, tell: Callable[[int, list[AnyEvent]], None]) -> None:
        self._reading = supervised(lambda: self._read(tell), "drain of cache events")

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, tell: Callable[[int, list[AnyEvent]], None]) -> None:
        while True:
            try:
                items = await self._drain()
            except (ServerError, DecodeError) as error:
                if str(error) != self._failed:
                    self._failed = str(error)
                    log.warning("cache events cannot be read: %s", error)
                await asyncio.sleep(FAILED_PAUSE_S)
                continue
            self._failed, self._began = "", True
            events: list[AnyEngineEvent] = []
            wrong: DecodeError | None = None
            for item in items:
                try:
                    events.append(self._parse(item))
                except DecodeError as error:
                    self._undecodable += 1
                    wrong = error
            if wrong is not None:
                log.warning("%s; the hole that it leaves clears what is claimed", wrong)
            told = list(self._translator.translate(events).events) if events else []
            if told:
                tell(0, [*told])
            await asyncio.sleep(0 if items else IDLE_PAUSE_S)

    async def _drain(self) -> list[Any]:
        """Ask once; which method it takes depends on its version."""
        try:
            body = await self._client.ask(self._path, self._method, timeout_s=DRAIN_TIMEOUT_S)
        except ServerError as error:
            if error.status != 405:
                raise
            self._method = "GET" if self._method == "POST" else "POST"
            body = await self._client.ask(self._path, self._method, timeout_s=DRAIN_TIMEOUT_S)
        try:
            return msgspec.json.decode(body, type=list[Any])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DecodeError("drained cache events", str(error)) from None
