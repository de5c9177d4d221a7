"""The worker's side of the push protocol, as dialogues on a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksStored,
    CacheCleared,
    EventBatch,
    RequestFinished,
    SnapshotBegan,
    SnapshotEnded,
)
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Role, Tier
from poolgrid.kernel.wire.ingest import (
    BATCH_FRAME,
    Acknowledged,
    Goodbye,
    Heartbeat,
    Hello,
    JoinRefused,
    Resend,
    ToConsolidator,
    Unknown,
    Welcome,
)
from poolgrid.kernel.worker_protocol.push_stream import (
    BLOCKS_PER_RESTATED_BATCH,
    EVENTS_PER_RESTATED_BATCH,
    OUTBOX_BYTES_MIN,
    Effect,
    Outbox,
    PushStream,
    PushTiming,
    RestateNeeded,
    Send,
    State,
    Warn,
)
from tests.examples import examples

CARD = WorkerCard("m", Role.AGGREGATED, 4, WorkerLimits(8, 64, 256, 4096), "tcp://127.0.0.1:1")
EPOCH = 77
TIMING = PushTiming(
    heartbeat_ms=100, hello_retry_ms=50, silence_ms=1000, refused_retry_ms=200, refused_retry_max_ms=500
)
EVENTS: list[AnyEvent] = [CacheCleared()]


def make_stream(outbox_bytes_max: int = OUTBOX_BYTES_MIN) -> PushStream:
    return PushStream("w", 0, EPOCH, CARD, TIMING, outbox_bytes_max)


def said(effects: list[Effect]) -> list[ToConsolidator | EventBatch | RestateNeeded | Warn]:
    """Decode what leaves."""
    decoded: list[ToConsolidator | EventBatch | RestateNeeded | Warn] = []
    for effect in effects:
        if not isinstance(effect, Send):
            decoded.append(effect)
        elif effect.frames[0] == BATCH_FRAME:
            decoded.append(codec.event_batch.decode(effect.frames[1]))
        else:
            decoded.append(codec.to_consolidator.decode(effect.frames[1]))
    return decoded


def seqs(effects: list[Effect]) -> list[int]:
    return [message.seq for message in said(effects) if isinstance(message, EventBatch)]


def welcome(next_seq: int, life: str = "c0", lease_ms: int = 10_000) -> Welcome:
    return Welcome("w", 0, EPOCH, next_seq, life, lease_ms)


def acknowledged(next_seq: int, life: str = "c0") -> Acknowledged:
    return Acknowledged("w", 0, EPOCH, next_seq, life)


def open_stream() -> PushStream:
    stream = make_stream()
    stream.begin(0)
    stream.receive(welcome(0), 0)
    return stream


def test_while_nobody_answers_it_greets_at_intervals_that_double() -> None:
    stream = make_stream()
    stream.begin(0)
    greeted = []
    for now_ms in range(0, 500, 10):
        greeted += [now_ms for message in said(stream.tick(now_ms)) if isinstance(message, Hello)]
    assert greeted == [50, 150, 250, 350, 450], "as far as that of heartbeats, which greetings stand for"

    stream.receive(welcome(0, lease_ms=150), 500)
    stream.receive(Unknown("w", 0), 510)
    assert stream.next_moment_ms() == 560, "a new silence begins with the first wait"
    stream.tick(560)
    assert stream.next_moment_ms() == 610, "a third of a short lease"


def test_only_the_first_welcome_of_a_consolidator_that_stood_still_has_anything_sent() -> None:
    stream = make_stream()
    stream.begin(0)
    stream.publish(EVENTS, 1, 1)
    assert seqs(stream.receive(welcome(0), 10)) == [0]

    assert [stream.receive(welcome(0), 11) for _ in range(30)] == [[]] * 30
    assert seqs(stream.publish(EVENTS, 12, 12)) == [1]
    assert stream.receive(welcome(2), 13) == []
    assert stream.is_settled


def test_a_consolidator_of_another_life_that_welcomes_an_open_stream_gets_what_it_misses() -> None:
    stream = open_stream()
    stream.publish(EVENTS, 1, 1)

    assert seqs(stream.receive(welcome(0, life="c1"), 10)) == [0]


def test_a_long_restatement_is_cut_into_batches_and_only_the_first_begins() -> None:
    stream = open_stream()
    facts: list[AnyEvent] = [BlocksStored(None, pack_hashes([at])) for at in range(2 * EVENTS_PER_RESTATED_BATCH)]

    batches = [batch for batch in said(stream.restate(facts, 0, 0)) if isinstance(batch, EventBatch)]

    assert [len(batch.events) for batch in batches] == [EVENTS_PER_RESTATED_BATCH, EVENTS_PER_RESTATED_BATCH, 1]
    assert [event for batch in batches for event in batch.events] == [SnapshotBegan(), *facts]


def test_a_restatement_of_long_chains_is_cut_so_that_no_batch_is_much_work_for_its_readers() -> None:
    stream = open_stream()
    most = BLOCKS_PER_RESTATED_BATCH
    facts: list[AnyEvent] = [
        BlocksStored(7, pack_hashes(range(10, 10 + most - 1)), Tier.HOST),
        BlocksStored(None, pack_hashes([1, 2])),
        BlocksStored(3, pack_hashes(range(100_000, 100_000 + 2 * most + 5)), Tier.DISK),
        SnapshotEnded(),
    ]

    batches = [batch for batch in said(stream.restate(facts, 0, 0)) if isinstance(batch, EventBatch)]

    stored = [[event for event in batch.events if isinstance(event, BlocksStored)] for batch in batches]
    assert [sum(len(event.sequence_hashes) // 8 for event in some) for some in stored] == [most - 1, 2, most, most, 5]
    assert [batch.seq for batch in batches] == [0, 1, 2, 3, 4]
    assert [batches[0].events[0], batches[-1].events[-1]] == [SnapshotBegan(), SnapshotEnded()]
    pieces = [event for some in stored for event in some if event.tier is Tier.DISK]
    assert [event.parent for event in pieces] == [3, 100_000 + most - 1, 100_000 + 2 * most - 1]
    assert b"".join(event.sequence_hashes for event in pieces) == facts[2].sequence_hashes  # type: ignore[union-attr]


def test_it_keeps_its_lease_with_heartbeats_that_name_the_next_batch() -> None:
    stream = open_stream()
    stream.publish(EVENTS, 0, 0)

    assert stream.next_moment_ms() == 100
    assert said(stream.tick(100)) == [Heartbeat("w", 0, EPOCH, next_seq=1)]
    assert stream.next_moment_ms() == 200


def test_a_refused_worker_asks_again_ever_more_slowly_and_says_why() -> None:
    stream = make_stream()
    stream.begin(0)
    now = 0.0
    waits = []
    for _ in range(4):
        (warning,) = stream.receive(JoinRefused("w", 0, "block_size is 4"), now)
        assert isinstance(warning, Warn)
        assert "block_size is 4" in warning.text
        moment = stream.next_moment_ms()
        assert moment is not None
        waits.append(moment - now)
        now = moment
        assert isinstance(said(stream.tick(now))[0], Hello)

    assert waits == [200, 400, 500, 500]
    stream.receive(welcome(0), now)
    assert stream.is_open


@pytest.mark.parametrize(
    "message",
    [
        Welcome("other", 0, EPOCH, 0, "c0", 1000),
        Welcome("w", 1, EPOCH, 0, "c0", 1000),
        Welcome("w", 0, EPOCH - 1, 0, "c0", 1000),
    ],
)
def test_messages_about_another_worker_or_life_are_ignored(message: Welcome) -> None:
    stream = make_stream()
    stream.begin(0)

    assert stream.receive(message, 1) == []
    assert stream.state is State.GREETING


def test_it_ends_with_a_goodbye() -> None:
    stream = open_stream()

    assert said(stream.end("drained")) == [Goodbye("w", 0, EPOCH, "drained")]
    assert stream.next_moment_ms() is None
    assert not stream.goodbye_acknowledged
    stream.receive(acknowledged(0), 1)
    assert stream.goodbye_acknowledged


def test_a_full_outbox_drops_everything_and_the_hole_in_the_numbers_shows_it() -> None:
    outbox = Outbox("w", 0, EPOCH)
    small = Outbox("w", 0, EPOCH, OUTBOX_BYTES_MIN)
    event = BlocksStored(None, pack_hashes(range(2000)))

    kept = [small.add([event], 0) is not None for _ in range(7)]

    assert kept == [True, True, True, True, False, False, False]
    assert (len(small), small.kept_bytes, small.next_seq, small.oldest_seq, small.overflows) == (0, 0, 7, 7, 1)
    small.reopen()
    assert small.add([event], 0) is not None
    assert small.oldest_seq == 7
    assert not outbox.overflowed


def test_an_impossible_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes_max is 1"):
        Outbox("w", 0, EPOCH, 1)


def filling(events: int) -> list[AnyEvent]:
    """Make events that mean nothing and weigh 4 KB each; 16 fill the smallest outbox."""
    return [RequestFinished("filler", "x" * 4000) for _ in range(events)]


class World:
    """A worker and a consolidator joined by a link that loses messages; both sides' truth is a list of numbers."""

    def __init__(self) -> None:
        self.stream = make_stream()
        self.now = 0.0
        self.truth: list[int] = []
        self.copy: list[int] = []
        self.next_seq = 0
        self.member = False
        self.life = 0
        self.losing = False

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RestateNeeded):
                # Larger than the outbox, as the cache of a large worker may be.
                facts: list[AnyEvent] = [BlocksStored(None, pack_hashes([block])) for block in self.truth]
                self.do(self.stream.restate([*facts, *filling(20), SnapshotEnded()], 0, self.now))
            elif isinstance(effect, Send) and not self.losing:
                self.hear(effect)

    def hear(self, effect: Send) -> None:
        (message,) = said([effect])
        answer: Welcome | Acknowledged | Resend | Unknown
        if isinstance(message, Hello):
            if not self.member:
                self.next_seq, self.member, self.copy = 0, True, []
            answer = welcome(self.next_seq, f"c{self.life}")
        elif not self.member:
            answer = Unknown("w", 0)
        elif isinstance(message, EventBatch):
            restates = isinstance(message.events[0], SnapshotBegan)
            if message.seq > self.next_seq and not restates:
                answer = Resend("w", 0, EPOCH, self.next_seq)
            else:
                if message.seq >= self.next_seq:
                    for event in message.events:
                        if isinstance(event, SnapshotBegan):
                            self.copy = []
                        elif isinstance(event, BlocksStored):
                            self.copy.append(int.from_bytes(event.sequence_hashes, "little"))
                    self.next_seq = message.seq + 1
                answer = acknowledged(self.next_seq, f"c{self.life}")
        elif isinstance(message, Heartbeat) and message.next_seq > self.next_seq:
            answer = Resend("w", 0, EPOCH, self.next_seq)
        else:
            answer = acknowledged(self.next_seq, f"c{self.life}")
        self.do(self.stream.receive(answer, self.now))

    def wait(self, ms: float) -> None:
        until = self.now + ms
        while (moment := self.stream.next_moment_ms()) is not None and moment <= until:
            self.now = max(self.now, moment)
            self.do(self.stream.tick(self.now))
        self.now = until

    def store(self, filler: int = 0) -> None:
        self.truth.append(len(self.truth) + 1)
        stored = BlocksStored(None, pack_hashes(self.truth[-1:]))
        self.do(self.stream.publish([stored, *filling(filler)], 0, self.now))


@settings(max_examples=examples(40))
@given(
    script=st.lists(
        st.sampled_from(["store", "store many", "wait", "lose", "heal", "restart", "forget"]), min_size=1, max_size=40
    )
)
def test_after_any_faults_have_healed_the_copy_equals_the_truth(script: list[str]) -> None:
    world = World()
    world.do(world.stream.begin(0))
    for action in script:
        if action == "store":
            world.store()
        elif action == "store many":
            for _ in range(8):
                world.store(filler=4)
        elif action == "wait":
            world.wait(300)
        elif action == "restart":
            world.life += 1
        elif action == "forget":
            world.life += 1
            world.member = False
        else:
            world.losing = action == "lose"

    world.losing = False
    world.wait(5000)

    assert world.copy == world.truth
    assert world.stream.is_open
    assert world.stream.is_settled


def test_requests_published_are_restated_as_they_stand() -> None:
    from poolgrid.kernel.wire.events import PrefillCompleted, RequestProgressed, RequestStarted
    from poolgrid.kernel.worker_protocol.push_stream import PublishedRequests

    requests = PublishedRequests()
    requests.apply(
        [
            RequestStarted("a", 10, 4, 3),
            RequestStarted("b", 20, 0, 5),
            RequestStarted("c", 30, 0, 7),
            PrefillCompleted("b"),
            RequestProgressed("b", 6),
            RequestProgressed("unknown", 6),
            RequestFinished("a", "length"),
        ]
    )

    assert requests.restate() == [RequestStarted("b", 20, 0, 6), PrefillCompleted("b"), RequestStarted("c", 30, 0, 7)]
    assert len(requests) == 2
