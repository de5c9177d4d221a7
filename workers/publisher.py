"""Carries the worker's events to the consolidator: the push stream, its socket and its timer.

One task's worth of state on the event loop, no task: frames come by callback, time by a timer each for the stream and
for what is held.

Each batch costs the consolidator and every router more than the events in it. What changes nothing that a router waits
for (``GROWTH``) is therefore held for as long as two load reports are apart at most, and leaves with what comes
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import AnyEvent, BlocksRemoved, BlocksStored, LoadReported, RequestProgressed
from poolgrid.kernel.wire.ingest import LOADING_FRAME, TELL_EVERY_S, LoadingWorker
from poolgrid.kernel.worker_protocol.engine import UntilKnown
from poolgrid.kernel.worker_protocol.push_stream import (
    Effect,
    PublishedRequests,
    PushStream,
    RestateNeeded,
    Send,
    State,
)
from poolgrid.server.process.clock import Clock, shared_moment_s
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.process.tasks import unless
from poolgrid.server.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

SILENCE_SAID_S = 5.0
"""How long a worker is not welcomed until that is logged: what starts at the same time is there by then."""

SILENCE_SAID_MAX_S = 60.0
"""Between two such lines, whose intervals double."""

GROWTH = frozenset({RequestProgressed, LoadReported})
"""Events that tell how far something has grown; the next ones tell it again."""

SMALL_CHAIN_BYTES = 128
"""Hashes of 16 blocks: what decode fills in a step or two. Those of a prompt are published at once."""

HELD_EVENTS_MAX = 256
"""Events that are held; then they leave. Some 20 KB."""


def can_wait(events: Iterable[AnyEvent]) -> bool:
    """Return whether no reader waits for any of the events."""
    for event in events:
        if isinstance(event, BlocksStored | BlocksRemoved):
            if len(event.sequence_hashes) > SMALL_CHAIN_BYTES:
                return False
        elif type(event) not in GROWTH:
            return False
    return True


class IngestLink(Protocol):
    """A way to one consolidator."""

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send; ``False`` when it takes no more just now."""
        ...

    def close(self, orderly: bool) -> None: ...


ConnectIngest = Callable[[str, Callable[[list[bytes]], None]], IngestLink]
"""Opens the way to the consolidator at an endpoint, whose frames a function gets; raises ``ValueError``."""


class EventPublisher:
    """Publishes batches, keeps membership, restates when asked.

    ``restate`` returns everything that must follow a ``SnapshotBegan`` besides the requests, which the publisher knows
    from what went through it.
    """

    def __init__(
        self,
        connect: ConnectIngest,
        endpoint: str,
        stream: PushStream,
        restate: Callable[[], tuple[Sequence[AnyEvent], Sequence[AnyEvent]]],
        clock: Clock,
        metrics: WorkerMetrics,
        load_interval_ms: float,
    ) -> None:
        """``endpoint`` is where the consolidator takes events in; empty until ``follow`` says it."""
        self._stream = stream
        self._restate = restate
        self._clock = clock
        self._complaints = Complaints(log, clock)
        self._metrics = metrics
        metrics.show_stream(stream)
        self._load_interval_ms = load_interval_ms
        self._load_said_ms = float("-inf")
        self._load_said: LoadReported | None = None
        self._requests = PublishedRequests()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_ms = 0.0
        """When it is due, by the clock."""
        self._held: list[AnyEvent] = []
        self._holding: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self.started = asyncio.Event()
        self._endpoint = endpoint
        self._connect = connect
        self._link = connect(endpoint, self._on_frames) if endpoint else None

    @property
    def is_registered(self) -> bool:
        return self._stream.is_open

    def start(self) -> None:
        """Join, with all that is held already."""
        self.started.set()
        before, _ = self._restate()
        if len(before) > 1:  # more than its end
            self._say_all()
        self._do(self._stream.begin(self._clock.monotonic_ms()))

    def follow(self, endpoint: str) -> None:
        """Push to another consolidator from now on; empty = to none, until there is one."""
        if self._closed or endpoint == self._endpoint:
            return
        if self._link is not None:
            self._link.close(orderly=False)
        self._endpoint = endpoint
        self._link = self._connect(endpoint, self._on_frames) if endpoint else None
        if self.started.is_set() and endpoint:
            self._do(self._stream.greet_again(self._clock.monotonic_ms()))

    def introduce(self, card: WorkerCard) -> None:
        effects = self._stream.introduce(card, self._clock.monotonic_ms())
        if self.started.is_set():
            self._do(effects)

    def publish(self, events: list[AnyEvent], load: LoadReported | None = None) -> None:
        """Publish a step's events as one batch, with the load when it is time to report it."""
        if load is not None and self._is_load_due(load):
            events = [*events, load]
        if not events:
            return
        self._requests.apply(events)
        self._held += events
        if len(self._held) > HELD_EVENTS_MAX or not can_wait(events):
            self._publish_held()
        elif self._holding is None:
            # At once with what the other workers of this process hold: together it is one turn of the consolidator.
            at_s = shared_moment_s(self._loop.time(), self._load_interval_ms / 1e3)
            self._holding = self._loop.call_at(at_s, self._publish_held)

    def _publish_held(self) -> None:
        held = self._take_held()
        if held and not self._closed:
            self._do(self._stream.publish(held, self._clock.wall_ms(), self._clock.monotonic_ms()))

    def _take_held(self) -> list[AnyEvent]:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        held, self._held = self._held, []
        return held

    async def until_registered(self) -> None:
        """Wait until the consolidator has welcomed the worker; logs now and then that it has not."""
        pause_s, waited_s = SILENCE_SAID_S, 0.0
        while not self._stream.is_open:
            try:
                async with asyncio.timeout(pause_s):
                    await self._until(lambda: self._stream.is_open)
            except TimeoutError:
                waited_s += pause_s
                pause_s = min(2 * pause_s, SILENCE_SAID_MAX_S)
                where = (
                    f"at {self._endpoint} for {waited_s:.0f} s: is a router or a consolidator running, and is this its "
                    "ingest address (--consolidator)?"
                    if self._endpoint
                    else f"for {waited_s:.0f} s: none is active, as far as is known where they register. Does one of "
                    "this pool run?"
                )
                log.warning(
                    "no consolidator has accepted this worker %s It keeps asking, and serves no requests until then",
                    where,
                )

    def leave(self, reason: str) -> None:
        """Say goodbye, for the time being; what is published until ``rejoin`` is left out."""
        self._publish_held()
        self._do(self._stream.end(reason))

    def rejoin(self, epoch: int) -> None:
        """Join again, in another life, with all that holds now."""
        self._load_said = None
        self._do(self._stream.begin_again(epoch, self._clock.monotonic_ms()))
        self._say_all()

    async def say_goodbye(self, reason: str, timeout_s: float) -> bool:
        """Wait for the last acknowledgement, say goodbye, wait for the answer; return whether all that came in time."""
        self._publish_held()
        try:
            async with asyncio.timeout(timeout_s):
                if self._stream.state is not State.ENDED:
                    await self._until(lambda: self._stream.is_open and self._stream.is_settled)
                    self._do(self._stream.end(reason))
                await self._until(lambda: self._stream.goodbye_acknowledged)
                return True
        except TimeoutError:
            self._do(self._stream.end(reason))
            return False

    def close(self, orderly: bool) -> None:
        """End without another word."""
        self._closed = True
        self._take_held()
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close(orderly)

    def _is_load_due(self, load: LoadReported) -> bool:
        if load == self._load_said:
            return False
        now_ms = self._clock.monotonic_ms()
        idle = not load.running_requests and not load.waiting_requests
        if not idle and now_ms - self._load_said_ms < self._load_interval_ms:
            return False
        self._load_said_ms = now_ms
        self._load_said = load
        return True

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = codec.from_consolidator.decode(frames[-1])
        except DecodeError as error:
            self._metrics.undecodable_frames.labels("events").inc()
            self._complaints.about("the consolidator", error)
            return
        self._do(self._stream.receive(message, self._clock.monotonic_ms()))

    def _on_timer(self) -> None:
        self._timer = None
        self._do(self._stream.tick(self._clock.monotonic_ms()))

    def _do(self, effects: list[Effect]) -> None:
        if self._closed:
            return
        for effect in effects:
            if isinstance(effect, Send):
                # A frame that does not leave now is still in the outbox (or is said again by the timer).
                if self._link is not None:
                    self._link.send(effect.frames)
            elif isinstance(effect, RestateNeeded):
                log.warning("restating the cache: %s", effect.reason)
                self._say_all()
            else:
                log.warning("%s", effect.text)
        self._changed.set()
        self._set_timer()

    def _say_all(self) -> None:
        self._take_held()  # the restatement tells all of it
        before, after = self._restate()
        facts = [*before, *self._requests.restate(), *after]
        self._do(self._stream.restate(facts, self._clock.wall_ms(), self._clock.monotonic_ms()))

    def _set_timer(self) -> None:
        moment_ms = self._stream.next_moment_ms()
        if self._timer is not None:
            # Moments mostly move away; the timer then finds nothing due and sets itself again.
            if moment_ms is not None and self._due_ms <= moment_ms:
                return
            self._timer.cancel()
            self._timer = None
        if moment_ms is not None and not self._closed:
            self._due_ms = moment_ms
            delay_s = max(0.001, (moment_ms - self._clock.monotonic_ms()) / 1e3)
            self._timer = self._loop.call_later(delay_s, self._on_timer)


class ConsolidatorPlace:
    """The endpoint at which the consolidator takes events in; empty while it is unknown."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.publishers: list[EventPublisher] = []
        """Who pushes there; they come once the engine is there."""

    def answers(self) -> bool | None:
        """Return whether the consolidator there has a publisher of this worker as a member; ``None`` without any."""
        if not self.publishers:
            return None
        return any(publisher.is_registered for publisher in self.publishers)

    def move(self, endpoint: str) -> None:
        self.endpoint = endpoint
        for publisher in self.publishers:
            publisher.follow(endpoint)


GOODBYE_TIMEOUT_S = 2.0
"""How long the end waits for the consolidator's last acknowledgements; without them the lease ends the membership."""


class Membership:
    """The event streams of a worker's ranks, in their order; ``join`` gives them.

    It joins with all its ranks, leaves for a while, comes back in another life. A life has an epoch, the same for all
    ranks; each coming back has the next.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.is_away = False
        """It has left, and may come back."""
        self.publishers: Sequence[EventPublisher] = ()

    @property
    def is_registered(self) -> bool:
        return bool(self.publishers) and all(publisher.is_registered for publisher in self.publishers)

    def publish(self, dp_rank: int, events: list[AnyEvent], load: LoadReported) -> None:
        """Publish a step's events of a rank; before it joins there is nothing to do, it states all of it then."""
        if self.publishers:
            self.publishers[dp_rank].publish(events, load)

    async def join(
        self, publishers: Sequence[EventPublisher], until_known: UntilKnown | None, stop: asyncio.Event
    ) -> None:
        """Join once it is known what the engine held before, unless ``stop`` is set first."""
        if until_known is not None:
            await unless(stop, until_known(), "what the engine holds")
        if not stop.is_set():
            self.publishers = publishers
            for publisher in publishers:
                publisher.start()

    def leave(self, reason: str) -> None:
        self.is_away = True
        for publisher in self.publishers:
            publisher.leave(reason)

    def rejoin(self) -> None:
        """Join in another life, with all that holds now."""
        self.is_away = False
        self.epoch += 1
        for publisher in self.publishers:
            publisher.rejoin(self.epoch)

    async def say_goodbye(self, reason: str) -> bool:
        """End every rank's stream; return whether all were acknowledged in time."""
        return all(await asyncio.gather(*(each.say_goodbye(reason, GOODBYE_TIMEOUT_S) for each in self.publishers)))


FIRST_WORD_S = 0.25
"""An engine that is there by then has not been loading visibly."""


async def tell_while_loading(
    connect: ConnectIngest, where: Callable[[], str], now: Callable[[], LoadingWorker]
) -> None:
    """Send what ``now`` says to the consolidator that is ``where`` says, again and again until cancelled.

    While it is nowhere (empty) nothing is said. A word that the link does not take is left out. Raises
    ``ValueError`` for an endpoint that cannot be used.
    """
    await asyncio.sleep(FIRST_WORD_S)
    endpoint, link = "", None
    try:
        while True:
            if (there := where()) != endpoint:
                if link is not None:
                    link.close(orderly=False)
                # There are no answers.
                endpoint, link = there, connect(there, lambda frames: None) if there else None
            if link is not None:
                link.send([LOADING_FRAME, codec.loading_worker.encode(now())])
            await asyncio.sleep(TELL_EVERY_S)
    finally:
        if link is not None:
            link.close(orderly=False)
