"""The sockets of one PUB engine: a subscription, its monitor, and a DEALER for replays."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from router.consolidator.core.consolidator import Consolidator, Turn
from router.consolidator.core.pool_state import WORKER_SOURCE
from router.consolidator.core.pub_source import AskReplay, Leave, NewLife, PubEffect, PubFollower, SourceState
from runtime.clock import Clock
from runtime.planes import leave_plain
from runtime.zmq_socket import BatchSocket
from wire.addresses import zmq_endpoint_problem
from wire.card import WorkerCard, WorkerLimits
from wire.card_check import SHOWN_CHARS_MAX, card_problem, name_problem
from wire.identifiers import StreamState, WorkerId, WorkerKey
from wire.limits import FRAME_BYTES_MAX

log = logging.getLogger(__name__)

TakeTurn = Callable[[Callable[[Consolidator, Turn], None]], None]

seq_frame = struct.Struct(">Q")
"""The frame in which a PUB engine numbers its messages, u64 big-endian (vLLM's `ZmqEventPublisher`)."""

SUBSCRIPTION_QUEUE_MAX = 20_000
"""Frames that ZMQ keeps while we are busy; beyond it they are lost, which the follower sees as a hole."""

SOURCES_MAX = 4096
"""Engines in one sources file."""

REPLAY_TIMEOUT_MS_MAX = 3_600_000
"""Longest wait for an engine's replay that a sources file may ask for: beyond an hour it is a mistake in the unit."""


class PubSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine that publishes itself, as the sources file lists it."""

    worker_id: str
    endpoint: str
    """ZMQ endpoint of the engine's PUB socket."""
    card: WorkerCard
    replay_endpoint: str = ""
    """ZMQ endpoint of its replay socket; empty = it has none."""
    topic: str = ""
    dp_rank: int = 0
    replay_timeout_ms: int = 1000

    @property
    def key(self) -> WorkerKey:
        """Return the worker rank."""
        return WorkerKey(WorkerId(self.worker_id), self.dp_rank)


def load_sources(path: Path | None) -> list[PubSource]:
    """Return the engines of a sources file (a JSON list); raises ``ValueError`` naming file and place."""
    if path is None:
        return []
    try:
        sources: list[PubSource] = decode_sources(path.read_bytes())
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"reading the PUB sources {path}: {error}") from error
    keys = [source.key for source in sources]
    if len(sources) > SOURCES_MAX:
        raise ValueError(f"reading the PUB sources {path}: {len(sources)} engines, allowed are at most {SOURCES_MAX}")
    for position, key in enumerate(keys):
        if key in keys[:position]:
            raise ValueError(f"reading the PUB sources {path}: worker {key} is listed twice")
    return sources


def decode_sources(data: bytes) -> list[PubSource]:
    """Return the engines of a JSON list in which cards are objects with the card's field names."""
    entries = msgspec.json.decode(data, type=list[dict[str, Any]])
    return [_source(entry, position) for position, entry in enumerate(entries)]


def _source(entry: dict[str, Any], position: int) -> PubSource:
    card = entry.get("card")
    if isinstance(card, dict):
        limits = card.get("limits")
        try:
            if isinstance(limits, dict):
                limits = _by_name("limits", limits, WorkerLimits.__struct_fields__)
            entry = {**entry, "card": _by_name("card", {**card, "limits": limits}, WorkerCard.__struct_fields__)}
        except ValueError as error:
            raise ValueError(f"entry {position}: {error}") from None
    try:
        source = msgspec.convert(entry, PubSource)
    except msgspec.ValidationError as error:
        raise ValueError(f"entry {position}: {error}") from None
    problem = _problem(source)
    if problem is not None:
        raise ValueError(f"entry {position}: {problem}")
    return source


def _problem(source: PubSource) -> str | None:
    """Say what is wrong with an engine of the file, or ``None``."""
    problem = name_problem("worker_id", source.worker_id, needed=True) or card_problem(source.card)
    if problem is not None:
        return problem
    for field, endpoint in (("endpoint", source.endpoint), ("replay_endpoint", source.replay_endpoint)):
        problem = zmq_endpoint_problem(endpoint, local=True) if endpoint or field == "endpoint" else None
        if problem is not None:
            shown = endpoint[:SHOWN_CHARS_MAX]
            return f"{field} is {shown!r}, which {problem}; allowed are tcp://host:port and ipc://path"
    ranks = source.card.dp_size
    if not 0 <= source.dp_rank < ranks:
        return f"dp_rank is {source.dp_rank}, the card's dp_size {ranks} allows 0 to {ranks - 1}"
    if not 1 <= source.replay_timeout_ms <= REPLAY_TIMEOUT_MS_MAX:
        return f"replay_timeout_ms is {source.replay_timeout_ms}, allowed are 1 to {REPLAY_TIMEOUT_MS_MAX}"
    return None


def _by_name(what: str, given: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Return named fields in the order of a positional struct, up to the last one given."""
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"{what} has unknown fields {', '.join(unknown)}; allowed are {', '.join(names)}")
    ordered: list[Any] = []
    for name in names[: max((names.index(name) + 1 for name in given), default=0)]:
        if name not in given:
            raise ValueError(f"{what} lacks {name}, which stands before other fields that are given")
        ordered.append(given[name])
    return ordered


class PubShell:
    """Carries a follower's inputs and effects; owned by the consolidator service."""

    def __init__(
        self,
        source: PubSource,
        context: zmq.Context[Any],
        take_turn: TakeTurn,
        clock: Clock,
        lease_ms: int,
        blocks_max: int,
        epoch_floor: int,
    ) -> None:
        """``take_turn`` runs a turn of the core.

        ``blocks_max`` are the most blocks that are taken in, ``epoch_floor`` is the last life that the pool knows of.
        """
        self.source = source
        self._context = context
        self._take_turn = take_turn
        self._clock = clock
        self._follower = PubFollower(
            source.key,
            source.card.block_size,
            blocks_max,
            bool(source.replay_endpoint),
            source.replay_timeout_ms,
            lease_ms,
            epoch_floor,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._told = StreamState.SYNCING
        """What the pool was last told of the stream."""
        self.refused: str | None = None
        """Why the pool does not take this engine, if so."""
        self._subscription: zmq.Socket[bytes] = context.socket(zmq.SUB)
        leave_plain(self._subscription)  # engines publish without CURVE
        self._subscription.setsockopt(zmq.LINGER, 0)
        self._subscription.setsockopt(zmq.RCVHWM, SUBSCRIPTION_QUEUE_MAX)
        self._subscription.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._subscription.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        self._subscription.setsockopt(zmq.RECONNECT_IVL, 50)
        self._subscription.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._monitor: zmq.Socket[bytes] = self._subscription.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_inbox: BatchSocket | None = None
        self._subscription_inbox = BatchSocket(self._subscription, self._on_live)
        self._monitor_inbox = BatchSocket(self._monitor, self._on_monitor)

    @property
    def name(self) -> str:
        """Return the name of the worker rank, by which the source goes."""
        return str(self.source.key)

    @property
    def state(self) -> SourceState:
        """Return where the source stands."""
        return self._follower.state

    @property
    def degraded(self) -> bool:
        """Say whether the engine's blocks are known in part only, or not at all."""
        return self._follower.degraded or self.refused is not None or self._follower.state is SourceState.ABSENT

    @property
    def counts(self) -> dict[str, int]:
        """Return the counters of the source."""
        return self._follower.counts

    def start(self) -> None:
        """Connect and begin to receive."""
        self._monitor_inbox.start()
        self._subscription_inbox.start()
        try:
            self._subscription.connect(self.source.endpoint)
        except zmq.ZMQError as error:
            # One engine that cannot be followed is no reason for the others' events to stay away.
            self.refused = f"connecting to its endpoint {self.source.endpoint!r} failed: {error}"
            log.error("PUB engine %s is not followed: %s", self.name, self.refused)

    def pause(self) -> None:
        """Take nothing in: the journal does not take it."""
        self._paused = True
        for inbox in (self._subscription_inbox, self._monitor_inbox, self._replay_inbox):
            if inbox is not None:
                inbox.pause()

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        for inbox in (self._subscription_inbox, self._monitor_inbox, self._replay_inbox):
            if inbox is not None:
                inbox.resume()
        self._arm()

    def close(self) -> None:
        """Close the sockets."""
        if self._timer is not None:
            self._timer.cancel()
        self._monitor_inbox.stop()
        self._subscription_inbox.stop()
        self._subscription.disable_monitor()
        self._subscription.close()
        self._close_replay()

    def _close_replay(self) -> None:
        if self._replay_inbox is not None:
            self._replay_inbox.stop()
            self._replay_inbox = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    # Inputs

    def _on_monitor(self, messages: list[list[bytes]]) -> None:
        effects: list[PubEffect] = []
        for frames in messages:
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                log.info("PUB engine %s: connected to %s", self.name, self.source.endpoint)
                effects += self._follower.connected(self._clock.monotonic_ms(), self._clock.wall_ms())
            elif event == zmq.EVENT_DISCONNECTED:
                log.warning("PUB engine %s: connection lost", self.name)
                effects += self._follower.disconnected(self._clock.monotonic_ms())
        self._carry_out(effects)

    def _on_live(self, messages: list[list[bytes]]) -> None:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        effects: list[PubEffect] = []
        for frames in messages:
            if len(frames) < 2 or len(frames[-2]) != 8:
                self._follower.counts["source_undecodable"] += 1
                continue
            effects += self._follower.live(seq_frame.unpack(frames[-2])[0], frames[-1], now_ms, wall_ms)
        self._carry_out(effects)

    def _on_replay(self, messages: list[list[bytes]]) -> None:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        effects: list[PubEffect] = []
        for frames in messages:
            if len(frames) < 2 or len(frames[-2]) != 8:
                self._follower.counts["source_undecodable"] += 1
                continue
            effects += self._follower.replayed(seq_frame.unpack(frames[-2])[0], frames[-1], now_ms, wall_ms)
            if any(isinstance(effect, AskReplay) for effect in effects):
                break  # the rest answers a question that no longer stands
        self._carry_out(effects)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._paused:
            self._carry_out(self._follower.tick(self._clock.monotonic_ms(), self._clock.wall_ms()))

    # Effects

    def _carry_out(self, effects: list[PubEffect]) -> None:
        asked: AskReplay | None = None

        def work(core: Consolidator, turn: Turn) -> None:
            nonlocal asked
            for effect in effects:
                if isinstance(effect, NewLife):
                    before = self.refused
                    self.refused = core.attach(self.source.key, effect.epoch, self.source.card, turn)
                    if self.refused is not None and self.refused != before:
                        log.error("PUB engine %s is not taken into the pool: %s", self.name, self.refused)
                    log.info("PUB engine %s: new life, %s", self.name, effect.reason)
                elif isinstance(effect, Leave):
                    core.detach(self.source.key, effect.reason, turn)
                elif isinstance(effect, AskReplay):
                    asked = effect
                elif self.refused is None:
                    core.take(effect, turn)
            state, reason = self._follower.health
            core.note_stream(self.source.key, WORKER_SOURCE, state, reason, turn)

        if effects or self._follower.health[0] is not self._told:
            self._told = self._follower.health[0]
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
            log.error("PUB engine %s: asking %s for a replay failed: %s", self.name, self.source.replay_endpoint, error)
            self._close_replay()
            return
        self._replay_inbox = BatchSocket(self._replay, self._on_replay)
        if self._paused:
            self._replay_inbox.pause()
        self._replay_inbox.start()
        log.info("PUB engine %s: asked for a replay from frame %d", self.name, ask.from_seq)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self._follower.due_ms()
        if due_ms is not None and not self._paused:
            wait_ms = max(1.0, due_ms - self._clock.monotonic_ms())
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._on_timer)
