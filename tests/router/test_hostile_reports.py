"""Whatever values a member of the pool reports: each request has its choice, and the state is the fold of events."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from poolgrid.kernel.consolidation.consolidator import ConsolidatorTurn
from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksShared,
    BlocksStored,
    CacheCleared,
    GroupsReported,
    KvGroup,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
    StreamStateChanged,
    TurnBegan,
    TurnEnded,
)
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import StreamState, Tier, WorkerId, WorkerKey
from poolgrid.kernel.wire.limits import U32_MAX, U64_MAX, WINDOW_BLOCKS_MAX
from poolgrid.kernel.wire.sessions import SessionTurn, TurnAnswer
from poolgrid.server.router.policy_loading import make_policy
from tests.consolidator.pusher import batch
from tests.consolidator.test_consolidator import Bench, folded, hello, same
from tests.examples import examples
from tests.router.fleet_builder import make_card

MODEL = make_card().model
EVIL = "evil"


class Reports:
    """Random events of the right types, with the extreme values of each."""

    def __init__(self, source: random.Random, path: list[int]) -> None:
        self._source = source
        self._path = path

    def u32(self) -> int:
        return self._source.choice([0, 1, 2, 3, 31, 1000, 2**16, 2**31, U32_MAX, self._source.randrange(2**32)])

    def u64(self) -> int:
        return self._source.choice([0, 1, 2**32, 2**63, U64_MAX, self._source.randrange(20)])

    def name(self) -> str:
        return self._source.choice(["a", "b~1", "~", "", "x" * 256, f"r{self._source.randrange(9)}", "\x1b[31m"])

    def hashes(self) -> bytes:
        begin = self._source.randrange(len(self._path))
        chosen = self._path[begin : begin + self._source.randrange(9)]
        return pack_hashes(chosen if self._source.random() < 0.7 else [self.u64() for _ in range(3)])

    def turn(self) -> SessionTurn:
        u64, u32 = self.u64, self.u32
        return SessionTurn(
            self.name(), self._source.randrange(3), self.name(), True, u64(), u64(), u64(), u32(), u32(), u32(), u64()
        )

    def event(self) -> AnyEvent:
        source, u32 = self._source, self.u32
        tier, group = source.choice(list(Tier)), source.choice([0, 0, 1, 2, 15])
        windows = (0, 1, 2, 100, WINDOW_BLOCKS_MAX)
        kinds: list[Callable[[], AnyEvent]] = [
            lambda: BlocksStored(source.choice([None, self.u64(), *self._path[:3]]), self.hashes(), tier, group),
            lambda: BlocksStored(None, pack_hashes(self._path[: source.randrange(20)]), tier, group),
            lambda: BlocksRemoved(self.hashes(), tier, group),
            CacheCleared,
            SnapshotBegan,
            SnapshotEnded,
            lambda: RequestStarted(self.name(), u32(), u32(), u32(), source.random() < 0.5),
            lambda: PrefillCompleted(self.name()),
            lambda: RequestProgressed(self.name(), u32()),
            lambda: RequestFinished(self.name(), source.choice(["stop", "", "migrated", "x" * 4096]), u32()),
            lambda: LoadReported(u32(), u32(), u32(), u32(), u32(), u32(), self.u64()),
            lambda: BlocksShared(self.hashes(), tier, group),
            lambda: StreamStateChanged(self.name(), source.choice(list(StreamState))),
            lambda: TurnBegan(self.name(), u32(), self.turn()),
            lambda: TurnEnded(TurnAnswer(self.name(), source.randrange(3), self.name(), u32(), self.u64())),
            lambda: GroupsReported(
                tuple(
                    KvGroup(source.choice(windows), source.choice([1, 2, 3, WINDOW_BLOCKS_MAX]))
                    for _ in range(source.randrange(4))
                ),
                source.random() < 0.5,
            ),
        ]
        return source.choice(kinds)()


@pytest.mark.parametrize("policy", ["kv", "field", "least-loaded", "lmetric"])
@pytest.mark.parametrize("seed", range(examples(6)))
def test_a_choice_is_made_for_every_request_whatever_a_member_reports(seed: int, policy: str) -> None:
    source = random.Random(seed)
    path = [source.getrandbits(64) for _ in range(200)]
    reports, bench = Reports(source, path), Bench()
    projection = Projection(PrefixIndex(), LoadLedger())
    selector = Selector(projection, make_policy(policy))
    applied = 0

    def apply() -> None:
        nonlocal applied
        for record in bench.records[applied:]:
            projection.apply(record, float(record.offset))
        applied = len(bench.records)

    for name in ("good", EVIL):
        bench.say(hello(name))
    bench.say(batch([BlocksStored(None, pack_hashes(path[:50]))], 0, "good"))
    for seq in range(60):
        bench.say(batch([reports.event() for _ in range(source.randrange(8))], seq, EVIL))
        apply()
        depth = source.choice([0, 1, 17, 200])
        request = RoutingRequest(f"r{seq}", MODEL, 16 * depth + 1, 16, depth + 1)
        found = selector.select(WorkerWanted(request, path[:depth], float(seq), seq))
        assert isinstance(found, Decision), found
        good = projection.index.overlap(path, WorkerKey(WorkerId("good")))
        assert good.blocks == 50, "what others hold is not the member's business"

    same(folded(bench.records), bench.core.pool)
    turn = ConsolidatorTurn(bench.now())
    bench.core.finish(turn)
    assert list(bench.core.pool.sessions.kept) == list(folded(bench.records).sessions.kept)
