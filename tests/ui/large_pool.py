"""``python -m tests.ui.large_pool WORKERS RATE``: the page over a pool that no two cores could run.

The router's core is real (its fold, index, ledger, selector, decisions), and so are the page's source, its hub and the
HTTP server. The workers are not processes: records of a journal, as such workers would have written them, come from a
seeded hand at the rate of a real pool.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.inputs import Booked, RecordsArrived, Released, WorkerWanted
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    JournalRecord,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
    WorkerJoined,
)
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Role, WorkerId, WorkerKey
from poolgrid.plugins.fleet_page.endpoints import add_fleet_page
from poolgrid.plugins.fleet_page.hub import FleetHub
from poolgrid.plugins.fleet_page.router_source import RouterFleetSource
from poolgrid.plugins.fleet_page.router_watch import FleetWatch, ServedSeconds
from poolgrid.server.http.http_server import HttpServer
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.policy_loading import load_policy
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.admission_queue import QueueView
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application

BLOCK_SIZE = 32
BLOCKS = 4096
CONVERSATIONS = 400
TICK_S = 0.02


class StillQueue:
    """A queue in which no request waits."""

    def view(self) -> QueueView:
        return QueueView(0, 1024, 0, 4_194_304, None, {})

    def turns_without_place(self) -> list[object]:
        return []


class LargePool:
    """A pool of workers that exist in the journal alone; stands for a ``RouterService`` on the fleet page."""

    ready = True
    trouble = ""
    behind_records = 0
    unreachable: Mapping[WorkerKey, str] = {}

    def __init__(self, workers: int, rate: float) -> None:
        self.projection = Projection(PrefixIndex(), LoadLedger())
        settings = RouterSettings()
        self.settings = settings
        self.state = RouterState(Selector(self.projection, load_policy(settings), settings.worker_queue_factor))
        self.decisions = DecisionLog(10_000)
        self.queue = StillQueue()
        self._records = 0
        self._clock = SystemClock()
        self._rate = rate
        self._draw = random.Random(1)
        self._seqs: dict[WorkerKey, int] = {}
        self._running: dict[WorkerKey, int] = {}
        self._held: dict[WorkerKey, OrderedDict[int, None]] = {}
        self._paths: list[list[int]] = [[1, 2, 3, 4] for _ in range(CONVERSATIONS)]
        self._hashes = 1000
        self._later: list[tuple[float, int, WorkerKey, list[AnyEvent]]] = []
        self._count = 0
        for number in range(workers):
            key = WorkerKey(WorkerId(f"worker-{number}"))
            card = WorkerCard(
                "tiny", Role.AGGREGATED, BLOCK_SIZE, WorkerLimits(64, 8192, BLOCKS, 131_072), "tcp://127.0.0.1:1"
            )
            self._held[key], self._running[key] = OrderedDict(), 0
            self.say(key, [WorkerJoined(card)])

    def hold(self, worker: WorkerKey, path: Sequence[int]) -> None:
        """Have a worker store a path."""
        self.say(worker, [BlocksStored(None, pack_hashes(path))])

    def fill(self) -> None:
        """Have each worker hold blocks of earlier conversations: no pool in use has empty caches."""
        for worker in self._held:
            count = self._draw.randint(BLOCKS // 8, BLOCKS * 6 // 10)
            self.hold(worker, range(self._hashes, self._hashes + count))
            self._hashes += count

    def counts(self) -> tuple[int, int]:
        return sum(self._running.values()), 0

    def say(self, worker: WorkerKey, events: Sequence[AnyEvent]) -> None:
        """Have a worker report events."""
        now_ms = self._clock.wall_ms()
        seq = self._seqs[worker] = self._seqs.get(worker, -1) + 1
        record = JournalRecord(self._records, worker.worker_id, 0, 1, seq, now_ms, now_ms, list(events))
        self._records += 1
        self.state.apply(RecordsArrived([record], self._clock.monotonic_ms()))

    def _load(self, worker: WorkerKey) -> LoadReported:
        held = len(self._held[worker])
        return LoadReported(self._running[worker], 0, 0, 12 * self._running[worker], held, BLOCKS)

    def request(self) -> None:
        """Have somebody go on with a conversation."""
        draw = self._draw
        self._count += 1
        name = f"r{self._count}"
        at = int(draw.random() ** 2 * CONVERSATIONS)
        path = self._paths[at]
        grown = [*path, *range(self._hashes, self._hashes + draw.randint(2, 40))]
        self._hashes += 64
        self._paths[at] = grown if len(grown) < 600 else [1, 2, 3, 4]
        isl = len(grown) * BLOCK_SIZE + 7
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        request = RoutingRequest(name, "tiny", isl, BLOCK_SIZE, len(grown) + 1, session=f"c{at}")
        found = self.state.apply(WorkerWanted(request, grown, now_ms, wall_ms))
        assert isinstance(found, Decision), str(found)
        self.state.apply(Booked(found, grown, name, now_ms))
        self.decisions.add(found)
        worker, overlap = found.worker, found.overlap_blocks
        self._running[worker] += 1
        reused = overlap * BLOCK_SIZE
        found.realised_cached_tokens = reused
        self.say(worker, [RequestStarted(name, isl, reused, len(grown)), self._load(worker)])
        held = self._held[worker]
        new = [each for each in grown if each not in held]
        events: list[AnyEvent] = [PrefillCompleted(name)]
        if new:
            parent = grown[len(grown) - len(new) - 1] if len(new) < len(grown) else None
            events.append(BlocksStored(parent, pack_hashes(new)))
        self._after(0.05 + 0.001 * len(new), worker, events)
        self._after(draw.uniform(4.0, 10.0), worker, [RequestFinished(name, "stop")])

    def _after(self, seconds: float, worker: WorkerKey, events: list[AnyEvent]) -> None:
        self._hashes += 1
        due_ms = self._clock.monotonic_ms() + 1000 * seconds
        heapq.heappush(self._later, (due_ms, self._hashes, worker, events))

    def due(self) -> None:
        """Have workers report what is over by now."""
        now_ms = self._clock.monotonic_ms()
        while self._later and self._later[0][0] <= now_ms:
            _, _, worker, events = heapq.heappop(self._later)
            for event in list(events):
                if isinstance(event, RequestFinished):
                    self._running[worker] -= 1
                    self.state.apply(Released(worker, event.request_id))
                elif isinstance(event, BlocksStored):
                    events += self._store(worker, event)
            self.say(worker, [*events, self._load(worker)])

    def _store(self, worker: WorkerKey, event: BlocksStored) -> list[AnyEvent]:
        held = self._held[worker]
        held.update(dict.fromkeys(memoryview(event.sequence_hashes).cast("Q")))
        gone = []
        while len(held) > BLOCKS * 0.92:
            gone.append(held.popitem(last=False)[0])
        return [BlocksRemoved(pack_hashes(gone))] if gone else []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            now_s = loop.time()
            due_s = max(due_s, now_s - 1.0)
            while due_s <= now_s:
                self.request()
                due_s += self._draw.expovariate(self._rate)
            self.due()
            await asyncio.sleep(TICK_S)


async def main(workers: int, rate: float) -> None:
    """Serve until somebody ends this process."""
    pool = LargePool(workers, rate)
    pool.fill()
    app = application(FakeBackend())
    served = ServedSeconds(app.served, SystemClock())
    source = RouterFleetSource(pool.settings, cast(Any, pool), FleetWatch(pool.state), served)
    add_fleet_page(app, FleetHub(source, SystemClock()), source)
    server = HttpServer(app, "127.0.0.1", 0, "port")
    server.start()
    sys.stdout.write(f"ready {server.url}\n")
    sys.stdout.flush()
    await pool.run()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
