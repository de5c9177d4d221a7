"""The cache events of all ranks of an engine server: none, followed over ZMQ, or drained over HTTP.

Rules of draining, where a server hands events out to the first reader:

1. Reading takes events away, so there may be no other reader: events that another one took are a hole in the numbers,
   after which claims are learnt again (``workers.core.event_translation``).
2. A server that has events is asked again at once, one that has none after ``IDLE_PAUSE_S``.
3. While a server cannot be asked nothing is known to have changed. One that comes back restarts its numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from poolgrid.kernel.kv_events.cache_events import AnyEngineEvent
from poolgrid.kernel.kv_events.follower import Leave, NewLife, PubEffect, PubFollower, SourceState
from poolgrid.kernel.kv_events.translation import RootSeed
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import AnyEvent, CacheCleared, EventBatch
from poolgrid.kernel.wire.identifiers import StreamState, Tier, WorkerId, WorkerKey
from poolgrid.kernel.worker_protocol.cache_facts import ReportedBlocks, RestatedEvent
from poolgrid.kernel.worker_protocol.event_translation import EventTranslator
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.process.tasks import supervised
from poolgrid.server.transport.publisher_sockets import PublisherSockets
from poolgrid.server.workers.engines.root_seeds import RootSeeds
from poolgrid.server.workers.engines.server.core.server_facts import EventSource
from poolgrid.server.workers.engines.server.server_client import EVENTS_BYTES_MAX, ServerClient, ServerError

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_MS = 5_000
"""How long a replay may be silent before it is asked for again. Publishers look for questions between two steps, and a
step with a long prompt takes seconds."""

LEASE_MS = 30_000
"""How long the connection may be gone before what was claimed is taken back: a server that restarts is distinguished by
what it replays, so this is for one that has gone for good."""

CONNECT_WAIT_S = 2.0
"""How long a worker that starts waits for the connection to a publisher: one on the same network takes milliseconds.
One that cannot be reached must not keep a server out of the pool that serves requests."""

REPLAY_WAIT_S = 60.0
"""How long it waits for the first replay: the whole buffer of a publisher (10,000 frames by default) is read in
seconds, and a server that computes a long prompt looks for questions late."""

WHOLE_SHARE = 0.9
"""Share of a rank's blocks from which on the known ones are taken for all: each request leaves a block that is not full
and has no hash, so the others never fill a rank."""

BLOCKS_MAX = 4_194_304
"""Most blocks that are followed of a rank, some 500 MB: more than any cache on one device has."""


class RankEvents:
    """Follows the publisher of one rank as a consolidator does (``poolgrid.kernel.kv_events.follower``); keeps its
    blocks.

    The publisher's epochs and numbers end here. A new life of it, a loss that no replay repairs, and a connection that
    is gone for the lease are reported as ``CacheCleared``. ``told`` holds exactly what was reported.

    A buffer that does not reach back to the publisher's beginning leaves older blocks unknown. The log reports that,
    and that it is over: when the cache was cleared, another life began, or the known blocks fill the rank.
    """

    def __init__(
        self,
        dp_rank: int,
        source: EventSource,
        block_size: int,
        context: zmq.Context[Any],
        clock: Clock,
        tell: Callable[[int, list[AnyEvent]], None],
        root_seed: RootSeed | None = None,
        total_blocks: int = 0,
        tell_fault: Callable[[], None] = lambda: None,
        drafts: bool = False,
    ) -> None:
        """``dp_rank`` is the worker's number of the rank; the publisher may have another for it.

        ``total_blocks`` is how many blocks the rank has; 0 = that is not known. ``tell_fault`` is called when ``fault``
        has changed. ``drafts`` tells whether the server is known to draft tokens.
        """
        self._dp_rank = dp_rank
        self._clock = clock
        self._total_blocks = total_blocks
        self._source = source
        self._tell = tell
        self.told = ReportedBlocks()
        key = WorkerKey(WorkerId("engine server"), source.dp_rank)
        has_replay = bool(source.replay_endpoint)
        self._follower = PubFollower(
            key,
            block_size,
            BLOCKS_MAX,
            has_replay,
            REPLAY_TIMEOUT_MS,
            LEASE_MS,
            root_seed=root_seed,
            holds_unclaimed=True,
            drafts=drafts,
        )
        self._state = self._follower.state
        """As it was noted last."""
        self._sockets = PublisherSockets(
            f"of rank {source.dp_rank}", source, context, clock, LEASE_MS, self._follower, self._on_effects
        )
        self._tell_fault = tell_fault
        self.fault = ""
        """In what the events do not fit the rank; empty = they fit."""
        self._unreached = ""
        """That its publisher was never reached; empty = it was, or that is not known yet."""
        self._connected = asyncio.Event()
        self._current = asyncio.Event()
        """Set once the first replay is applied."""
        self._asked_ms: float | None = None
        """When the replay that is read began."""
        self._behind_until_ms = 0.0
        self._doubt = ""
        """Why the claims cannot be trusted, or are not all, as the log has it; empty = they are."""

    @property
    def is_current(self) -> bool:
        return self._follower.state is SourceState.LIVE

    @property
    def is_behind(self) -> bool:
        """Return whether what is reported now may stand behind a replay: while one is read, and then for as long as it
        took, because readers of the reports need no less."""
        return self._asked_ms is not None or self._clock.monotonic_ms() < self._behind_until_ms

    @property
    def health(self) -> tuple[StreamState, str]:
        """Return how far the claims can be trusted, and why; with what is probably wrong where it was never reached."""
        state, reason = self._follower.health
        if self._follower.state is SourceState.ABSENT and self._source.doubt:
            return state, f"{reason}; {self._source.doubt}"
        if self._follower.state is SourceState.LIVE and self._is_whole:
            return StreamState.LIVE, self.fault
        return state, reason

    @property
    def _is_whole(self) -> bool:
        total_blocks = self._total_blocks
        return bool(total_blocks) and self.told.count_on(Tier.DEVICE) >= WHOLE_SHARE * total_blocks

    @property
    def counts(self) -> dict[str, int]:
        return self._follower.counts

    def describe(self) -> dict[str, object]:
        """Return the state for people and probes, as JSON values."""
        state, reason = self.health
        return {
            "dp_rank": self._dp_rank,
            "endpoint": self._source.endpoint,
            "replay_endpoint": self._source.replay_endpoint,
            "state": state.name.lower(),
            "reason": reason,
            "blocks": sum(self.told.count_on(tier) for tier in Tier),
            **self.counts,
        }

    def open(self) -> None:
        """Begin to follow; raises ``ValueError`` where the endpoint is none."""
        try:
            self._sockets.open()
        except zmq.ZMQError as error:
            self._sockets.close()
            raise ValueError(f"following cache events at {self._source.endpoint!r} failed: {error}") from None

    async def until_current(self) -> None:
        """Wait until the first replay is applied; not for long where the publisher cannot be reached."""
        for event, wait_s in ((self._connected, CONNECT_WAIT_S), (self._current, REPLAY_WAIT_S)):
            try:
                async with asyncio.timeout(wait_s):
                    await event.wait()
            except TimeoutError:
                log.warning(
                    "joining the pool without what rank %d holds: after %.0f s %s",
                    self._source.dp_rank,
                    wait_s,
                    self.health[1],
                )
                if event is self._connected:
                    doubt = f" ({self._source.doubt})" if self._source.doubt else ""
                    self._unreached = f"nothing answers at its event endpoint {self._source.endpoint}{doubt}"
                    self._note_fault()
                return
        self._behind_until_ms = 0.0  # the replay is no part of what is reported: the worker joins with what came of it

    def close(self) -> None:
        self._sockets.close()

    def claim(self, seed: RootSeed) -> None:
        """Tell of the blocks that were held until whose they are is known."""
        if effects := self._follower.claim(seed, self._clock.wall_ms()):
            self._on_effects(effects)

    def _note_state(self) -> None:
        """Note that the publisher is read from another place on, or to its end."""
        state, now_ms = self._follower.state, self._clock.monotonic_ms()
        self._state = state
        if state is not SourceState.ABSENT:
            self._connected.set()
            self._unreached = ""
        if state is SourceState.LIVE:
            self._current.set()
        if state is SourceState.REPLAYING:
            if self._asked_ms is None:
                self._asked_ms = now_ms
        elif self._asked_ms is not None:
            self._behind_until_ms = now_ms + (now_ms - self._asked_ms)
            self._asked_ms = None

    def _on_effects(self, effects: Sequence[PubEffect]) -> None:
        follower = self._follower
        if follower.state is not self._state:
            self._note_state()
        events: list[AnyEvent] = []
        for effect in effects:
            if isinstance(effect, EventBatch):
                events += effect.events
            elif isinstance(effect, NewLife | Leave):
                log.info("cache events of rank %d begin again: %s", self._source.dp_rank, effect.reason)
                events = [CacheCleared()] if events or self.told else []
                if isinstance(effect, Leave):
                    self._unreached = f"nothing answers at its event endpoint {self._source.endpoint} any more"
        if events:
            self.told.apply(events)
        if self._doubt or follower.degraded or follower.unknown or follower.state is not SourceState.LIVE:
            self._note_doubt()
        if events:
            self._tell(self._dp_rank, events)
        self._note_fault()

    def _note_fault(self) -> None:
        fault = self._follower.fault or self._unreached
        if fault == self.fault:
            return
        self.fault = fault
        if fault:
            log.error("cache events of rank %d do not fit: %s", self._source.dp_rank, fault)
        else:
            log.info("cache events of rank %d fit again", self._source.dp_rank)
        self._tell_fault()

    def _note_doubt(self) -> None:
        """Log when the claims cannot be trusted or are not all, and when that is over."""
        state, reason = self.health
        if state is StreamState.REPLAYING:
            return  # what comes of it shows
        if state is StreamState.LIVE and self.fault:
            reason = ""  # that events do not fit is reported by itself
        rank, before = self._source.dp_rank, self._doubt
        self._doubt = reason
        if reason == before:
            return
        if state is StreamState.STALE:
            log.warning("cache events of rank %d cannot be trusted: %s", rank, reason)
        elif reason:
            log.warning(
                "cache events of rank %d are not all: %s. A larger replay buffer of the server reaches further back "
                "(buffer_steps)",
                rank,
                reason,
            )
        else:
            log.warning(
                "cache events of rank %d can be trusted again, %d blocks%s are known: it was that %s",
                rank,
                self.told.count_on(Tier.DEVICE),
                f" of {self._total_blocks}" if self._total_blocks else "",
                before,
            )


IDLE_PAUSE_S = 0.05
"""Time between two questions to a server without an event: events as late cost a choice now and then."""

FAILED_PAUSE_S = 1.0
"""Time between two questions to a server that does not answer."""

DRAIN_TIMEOUT_S = 30.0
"""How long an answer may take: some servers wait for an event for seconds before they answer that there is none."""


class CacheEvents:
    """What follows the cache of every rank; this one follows nothing."""

    def cached_blocks(self, dp_rank: int) -> int:
        return 0

    def restate(self, dp_rank: int) -> Sequence[RestatedEvent]:
        return []

    def note_salt(self, cache_salt: str) -> None:
        """Take note of the part of the caches that a request is about to use; empty = the common one."""

    def is_current(self) -> bool:
        return True

    def is_behind(self, dp_rank: int) -> bool:
        """Return whether what is reported of a rank now may stand behind a replay."""
        return False

    async def until_current(self) -> None:
        """Wait, not without end, until what the server held before is known."""

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
        roots: RootSeeds | None = None,
        total_blocks: int = 0,
        on_fault: Callable[[str], None] = lambda fault: None,
        drafts: bool = False,
    ) -> None:
        """``roots`` tells whose first blocks are that the events name no salt of; ``None`` = they name them.

        ``total_blocks`` are those of each rank; 0 = that is not known. ``on_fault`` gets in what the events do not
        fit the worker's ranks, whenever that changes. ``drafts`` tells whether the server is known to draft tokens.
        """
        self._roots = roots
        self._total_blocks = total_blocks
        self._on_fault = on_fault
        self._drafts = drafts
        self._sources = sources
        self._block_size = block_size
        self._context = context
        self._clock = clock
        self._ranks: list[RankEvents] = []

    def cached_blocks(self, dp_rank: int) -> int:
        return self.blocks_on(dp_rank, Tier.DEVICE)

    def blocks_on(self, dp_rank: int, tier: Tier) -> int:
        return self._ranks[dp_rank].told.count_on(tier) if self._ranks else 0

    def restate(self, dp_rank: int) -> Sequence[RestatedEvent]:
        return self._ranks[dp_rank].told.restate() if self._ranks else []

    def note_salt(self, cache_salt: str) -> None:
        if self._roots is not None and self._roots.note_salt(cache_salt):
            fits = self._roots.of_salt(cache_salt)
            for each in self._ranks:
                each.claim(fits)

    def is_current(self) -> bool:
        return all(each.is_current for each in self._ranks)

    def is_behind(self, dp_rank: int) -> bool:
        return self._ranks[dp_rank].is_behind

    async def until_current(self) -> None:
        await asyncio.gather(*(each.until_current() for each in self._ranks))

    def describe(self) -> dict[str, object]:
        return {"events": [each.describe() for each in self._ranks]}

    def open(self, tell: Callable[[int, list[AnyEvent]], None]) -> None:
        """Begin to follow; raises ``ValueError`` for an endpoint that is none."""
        for dp_rank, source in enumerate(self._sources):
            rank = RankEvents(
                dp_rank,
                source,
                self._block_size,
                self._context,
                self._clock,
                tell,
                None if self._roots is None else self._roots.of_stream,
                self._total_blocks,
                self._tell_faults,
                self._drafts,
            )
            self._ranks.append(rank)
            rank.open()

    def close(self) -> None:
        for each in self._ranks:
            each.close()

    def _tell_faults(self) -> None:
        several = len(self._ranks) > 1
        faults = [
            f"rank {dp_rank}: {each.fault}" if several else each.fault
            for dp_rank, each in enumerate(self._ranks)
            if each.fault
        ]
        self._on_fault("; ".join(faults))


ParseEvent = Callable[[Any], AnyEngineEvent]


EVENTS_AT_ONCE = 1000
"""Events that are read without a look at anything else: a millisecond."""


class DrainedEvents(CacheEvents):
    """The events of a server with one rank."""

    def __init__(
        self, client: ServerClient, path: str, parse: ParseEvent, block_size: int, kept_events_max: int = 0
    ) -> None:
        """``parse`` reads one event in the server's words; raises ``DecodeError``.

        ``kept_events_max``: the server passes on some of the engine's events, and keeps so many until they are asked
        for; 0 = it passes on all.
        """
        self._client = client
        self._path = path
        self._parse = parse
        self._kept_events_max = kept_events_max
        self._translator = EventTranslator(block_size, root_seed=RootSeeds(block_size), is_filtered=kept_events_max > 0)
        self._reading: asyncio.Task[None] | None = None
        self._method = "POST"
        self._complaints = Complaints(log, client.clock)
        self._failed = ""
        self._undecodable = 0
        self._began = False
        self._asked = asyncio.Event()
        """Set once the server was asked, whatever came of it."""

    def cached_blocks(self, dp_rank: int) -> int:
        return self._translator.blocks_on(Tier.DEVICE)

    def restate(self, dp_rank: int) -> Sequence[RestatedEvent]:
        return self._translator.restate()

    def is_current(self) -> bool:
        return self._began and not self._failed

    async def until_current(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                await self._asked.wait()

    def describe(self) -> dict[str, object]:
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
                self._asked.set()
                await asyncio.sleep(FAILED_PAUSE_S)
                continue
            self._failed = ""
            events: list[AnyEngineEvent] = []
            wrong: DecodeError | None = None
            for number, item in enumerate(items, 1):
                if not number % EVENTS_AT_ONCE:
                    await asyncio.sleep(0)
                try:
                    events.append(self._parse(item))
                except DecodeError as error:
                    self._undecodable += 1
                    wrong = error
            if wrong is not None:
                self._complaints.note("events", "%s; the gap clears the claims%s", wrong)
            told: list[AnyEvent] = []
            if 0 < self._kept_events_max <= len(items):
                told.append(self._translator.lose())  # older events may have been dropped, and no hole shows it
            if events:
                told += self._translator.translate(events).events
            if told:
                tell(0, told)
            self._began = True
            self._asked.set()
            await asyncio.sleep(0 if items else IDLE_PAUSE_S)

    async def _ask(self) -> bytes:
        return await self._client.ask(self._path, self._method, timeout_s=DRAIN_TIMEOUT_S, bytes_max=EVENTS_BYTES_MAX)

    async def _drain(self) -> list[Any]:
        """Ask once; which method it takes depends on its version."""
        try:
            body = await self._ask()
        except ServerError as error:
            if error.status != 405:
                raise
            self._method = "GET" if self._method == "POST" else "POST"
            body = await self._ask()
        try:
            return msgspec.json.decode(body, type=list[Any])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DecodeError("drained cache events", str(error)) from None
