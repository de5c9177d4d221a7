"""Attacks by a member of the pool: events that cost others more than they cost the sender.

A member joins with a sound card, drains, so that no request is sent to it, and reports what it likes. Each attack is a
few messages; what they cost the consolidator and the routers shows in the bystanders' times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from random import Random

import msgspec
import zmq

from lab.attacks.attack import Attack, Outcome, Part, Run, Scene
from lab.attacks.frames import from_attacker
from lab.attacks.pool import Shape
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventBatch,
    GroupsReported,
    KvGroup,
    RequestFinished,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
    TurnBegan,
    WorkerDraining,
)
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Role, Tier
from poolgrid.kernel.wire.ingest import BATCH_FRAME, CONTROL_FRAME, Acknowledged, Goodbye, Heartbeat, Hello, Welcome
from poolgrid.kernel.wire.limits import EVENTS_PER_BATCH_MAX, U32_MAX
from poolgrid.kernel.wire.sessions import SessionTurn

NAME = "attacker"
TAKEN_TIMEOUT_S = 60.0
"""How long a consolidator may take over what it is sent."""

REFUSED_TIMEOUT_S = 3.0
"""What is refused is never acknowledged: long enough for its harm to show."""

Messages = Callable[[Random, float], Iterator[list[AnyEvent]]]
"""Yields the events of one message after the other, given a share of their full number."""


def stored(hashes: list[int], parent: int | None = None, tier: Tier = Tier.DEVICE, group: int = 0) -> BlocksStored:
    return BlocksStored(parent, pack_hashes(hashes), tier, group)


def removed(hashes: list[int], tier: Tier = Tier.DEVICE) -> BlocksRemoved:
    return BlocksRemoved(pack_hashes(hashes), tier)


def _hashes(source: Random, count: int) -> list[int]:
    return [source.getrandbits(64) for _ in range(count)]


def flapping_root(source: Random, share: float) -> Iterator[list[AnyEvent]]:
    """A chain whose first block goes and comes."""
    chain = _hashes(source, 2000)
    yield [stored(chain)]
    yield [event for _ in range(int(30_000 * share)) for event in (removed(chain[:1]), stored(chain[:1]))]


def flapping_forks(source: Random, share: float) -> Iterator[list[AnyEvent]]:
    """A chain of forks, on all tiers, whose first block goes and comes on each."""
    root, parent = source.getrandbits(64), None
    events: list[AnyEvent] = []
    for block in [root, *_hashes(source, int(10_000 * share))]:
        events += [stored([block], parent, tier) for tier in Tier]
        events.append(stored(_hashes(source, 1), block))
        parent = block
    yield events[:EVENTS_PER_BATCH_MAX]
    yield [
        each
        for _ in range(int(9000 * share))
        for tier in Tier
        for each in (removed([root], tier), stored([root], None, tier))
    ]


def turns_of_one_session(source: Random, share: float) -> Iterator[list[AnyEvent]]:
    """Turns of one session, then as many dispatches of one turn."""
    count = int(65_000 * share)
    yield [TurnBegan(f"q{number}", 100, SessionTurn("one")) for number in range(count)]
    yield [TurnBegan(f"q~{number}", 100, SessionTurn("one")) for number in range(count)]


def chain_over_orphans(source: Random, share: float) -> Iterator[list[AnyEvent]]:
    """A long chain through blocks that came without their parents."""
    chain = _hashes(source, int(1_000_000 * share))
    yield [stored([chain[at]], chain[at - 1]) for at in range(1, min(len(chain), 120_000), 2)]
    yield [stored(chain)]


def shuffled_removals(source: Random, share: float) -> Iterator[list[AnyEvent]]:
    """A long chain that goes in no order."""
    chain = _hashes(source, int(200_000 * share))
    yield [stored(chain)]
    source.shuffle(chain)
    yield [removed(chain)]


def requests_and_clears(source: Random, share: float) -> Iterator[list[AnyEvent]]:
    """Many open requests, and a cache that is cleared all the time."""
    count = int(65_000 * share)
    yield [RequestStarted(f"r{number}", 100, 0, 4) for number in range(count)]
    yield [event for number in range(count // 2) for event in (stored([number]), CacheCleared())]
    for number in range(int(200 * share)):
        yield [stored([number]), CacheCleared()]
    yield [RequestFinished(f"r{number}", "stop") for number in range(count)]


def restatements(source: Random, share: float) -> Iterator[list[AnyEvent]]:
    """A cache that is restated again and again, in one message and in many."""
    chains = [stored(_hashes(source, 30)) for _ in range(int(1000 * share) + 1)]
    whole: list[AnyEvent] = [SnapshotBegan(), *chains, SnapshotEnded()]
    yield (whole * 60)[:EVENTS_PER_BATCH_MAX]
    for _ in range(int(50 * share)):
        yield whole


def groups_that_cannot_be(source: Random, share: float) -> Iterator[list[AnyEvent]]:
    """KV groups with the largest windows, and with none at all."""
    for groups in (
        (KvGroup(U32_MAX),),
        (KvGroup(1, 0),),
        tuple(KvGroup(1 + number, U32_MAX) for number in range(15)),
        tuple(KvGroup(4 * 1024 * 1024 - number) for number in range(15)),
    ):
        report = GroupsReported(groups, has_full_attention=False)
        yield [report, *(stored(_hashes(source, 10), group=1 + number) for number in range(len(groups)))]


class Member:
    """A member that speaks the contract past every check of its own."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(from_attacker(endpoint))
        self._epoch = time.time_ns()
        self._seq = 0
        self._card = WorkerCard(
            model, Role.AGGREGATED, 32, WorkerLimits(256, 8192, 2048, 131_072), request_endpoint="tcp://127.0.0.1:9"
        )

    def report(self, messages: Iterator[list[AnyEvent]], timeout_s: float) -> tuple[int, bool]:
        """Join, send all, wait until it was taken in, and leave; return the bytes, and whether all was taken."""
        try:
            self._control(Hello(NAME, 0, self._epoch, self._card, 0, 0))
            if not self._until(lambda answer: isinstance(answer, Welcome), 10.0):
                return 0, False
            sent = self._send([WorkerDraining()])
            for events in messages:
                sent += self._send(events)
            taken = self._until(
                lambda answer: isinstance(answer, Acknowledged) and answer.next_seq >= self._seq, timeout_s
            )
            self._control(Goodbye(NAME, 0, self._epoch, "done"))
            self._until(lambda answer: False, 0.5)
            return sent, taken
        finally:
            self._context.destroy(linger=0)

    def _send(self, events: list[AnyEvent]) -> int:
        # Encoded past every check of our own.
        batch = msgspec.msgpack.encode(EventBatch(NAME, 0, self._epoch, self._seq, int(time.time() * 1000), events))
        self._socket.send_multipart([BATCH_FRAME, batch])
        self._seq += 1
        return len(batch)

    def _control(self, message: Hello | Heartbeat | Goodbye) -> None:
        self._socket.send_multipart([CONTROL_FRAME, codec.to_consolidator.encode(message)])

    def _until(self, is_it: Callable[[object], bool], timeout_s: float) -> bool:
        """Read answers until one is the wanted; return whether it came."""
        ends_s = time.monotonic() + timeout_s
        while time.monotonic() < ends_s:
            if not self._socket.poll(200):
                self._control(Heartbeat(NAME, 0, self._epoch, self._seq))
            elif is_it(codec.from_consolidator.decode(self._socket.recv_multipart()[-1])):
                return True
        return False


def reporting(messages: Messages, is_taken: bool = True) -> Run:
    """Return the attack that reports these; ``is_taken``: the contract allows all of it."""

    async def run(scene: Scene) -> Outcome:
        member = Member(scene.pool.endpoint("ingest"), scene.pool.model.name)
        began_s = time.monotonic()
        sent, taken = await asyncio.to_thread(
            member.report, messages(scene.random, scene.share), TAKEN_TIMEOUT_S if is_taken else REFUSED_TIMEOUT_S
        )
        faults = ["what the contract allows was not taken in"] if is_taken and not taken else []
        return Outcome(f"{sent / 1e6:.1f} MB, taken in after {time.monotonic() - began_s:.1f} s", faults)

    return run


def attack(name: str, does: str, messages: Messages, short: bool = False, is_taken: bool = True) -> Attack:
    """Return a row. A member that is muted, or whose messages are refused, may lose its lease."""
    return Attack(name, does, reporting(messages, is_taken), Shape(), short=short, expiries_max=1)


PART = Part(
    "members",
    "Hostile members of the pool",
    (
        attack(
            "flapping root",
            "Stores a chain of 2,000 blocks, then removes and stores its first block 30,000 times in one message.",
            flapping_root,
            short=True,
        ),
        attack(
            "flapping forks",
            "Does so on all tiers with the first block of a chain of 10,000 forks.",
            flapping_forks,
        ),
        attack(
            "turns of one session",
            "Begins 65,000 turns of one session in one message, then dispatches one turn as often.",
            turns_of_one_session,
            short=True,
        ),
        attack(
            "chain over orphans",
            "Stores 60,000 blocks without their parents, then a chain of 1,000,000 blocks through them.",
            chain_over_orphans,
        ),
        attack("shuffled removals", "Removes a chain of 200,000 blocks in no order.", shuffled_removals),
        attack(
            "requests and clears",
            "Starts 65,000 requests, and stores a block and clears its cache 32,500 times.",
            requests_and_clears,
        ),
        attack("restatements", "Restates 30,000 blocks 60 times in one message and in 50 more.", restatements),
        attack(
            "groups that cannot be",
            "Reports KV groups with windows of 2^32 blocks, and with blocks of none.",
            groups_that_cannot_be,
            short=True,
            is_taken=False,
        ),
    ),
)
