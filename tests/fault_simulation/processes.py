"""The processes of a run: the real services, put together as their ``bootstrap`` modules do, without HTTP.

Each class is one machine's process over all its lives: ``start`` begins a life, ``kill`` ends it as ``kill -9`` does,
``stop`` asks it to end in good order. HTTP, the tokenizer and signal handling are left out; a client calls the
router's ``submit`` directly. Timeouts are shorter than the defaults, so that a run sees them pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

from prometheus_client import CollectorRegistry

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.journal.framing import JournalFenced
from poolgrid.kernel.journal.ports import Disk, Journal, PoolListener
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.card import WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.feed import BlockChain, WorkerState
from poolgrid.kernel.wire.ingest import Leader, LoadingWorker
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.wire.sessions import NO_SESSIONS, SessionsSnapshot
from poolgrid.kernel.worker_protocol.push_stream import PushStream, PushTiming
from poolgrid.kernel.worker_protocol.refusal import BusyError
from poolgrid.plugins.nats.election import LeaderElection, LeaderElectionMetrics
from poolgrid.plugins.nats.journal import StreamJournal, StreamJournalSettings
from poolgrid.plugins.nats.leader import LeaderWatch
from poolgrid.plugins.nats.message import BODY_BYTES
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulated.core.kv_transfer import KvSource, TransferModel
from poolgrid.plugins.simulated.core.next_token import Vocabulary
from poolgrid.plugins.simulated.real_time import RealTimeSimulatedEngine
from poolgrid.server.consolidator.journal.files import FileJournal, JournalSettings
from poolgrid.server.consolidator.journal.memory import MemoryJournal
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings, ConsolidatorSettings, Tuning
from poolgrid.server.global_router.configuration import Configuration
from poolgrid.server.global_router.document.reader import LoadedDocument
from poolgrid.server.global_router.metrics import GlobalRouterMetrics
from poolgrid.server.global_router.pools import Pools
from poolgrid.server.global_router.router_link import PoolNetwork
from poolgrid.server.global_router.service import GlobalRouterService
from poolgrid.server.global_router.settings import GlobalRouterSettings, Timings
from poolgrid.server.process.clock import AwakeClock
from poolgrid.server.process.settings import with_constants
from poolgrid.server.process.tasks import detached
from poolgrid.server.router.feeds import EmbeddedFeed, JournalFeed, RemoteFeed
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.router.select_plane import SelectPlane
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.links import LinksOnDemand, link_opener
from poolgrid.server.workers.adapters.sockets import CONSOLIDATOR, DealerSocket, RequestSocket
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.publisher import EventPublisher
from poolgrid.server.workers.service import ServiceLimits, WorkerService
from poolgrid.server.workers.timing import PolynomialTiming, ScaledTiming
from poolgrid.server.workers.transfers import KvExchange, KvFetcher
from tests.fault_simulation.jetstream import SimulatedJetStream, WrittenStream
from tests.fault_simulation.machine import Machine
from tests.fault_simulation.network import Network
from tests.fault_simulation.recordings import Recordings, is_recorded
from tests.fault_simulation.scenario import MODEL, VOCABULARY_SIZE, PoolPlan, Scenario, WorkerPlan
from tests.fault_simulation.virtual_loop import Life, VirtualLoop
from tests.fault_simulation.watcher import WatchedJournal, Watcher

LEASE_MS = 1000
STALE_AFTER_MS = 500
PEER_LEASE_MS = 2000.0
DRAIN_TIMEOUT_MS = 500.0
SELECT_TIMEOUT_MS = 300.0
KEPT_TRANSFERS_MAX = 6
"""In runs that are not strict: a worker that keeps as many refuses what comes, and refusals are counted as moves."""
KV_FETCH_TIMEOUT_MS = 1_500.0
"""Longer than a socket that lost its connection waits before it tries again."""
MAX_WAITING_REQUESTS = 12
LEADER_LEASE_S = 1
QUEUE_TIMEOUT_MS = 12_000.0
"""In runs that are not strict: longer than a session without a running turn keeps its place at first."""
STREAM_RETENTION_BYTES = 12_000
"""Of a journal in a stream; where nothing ever becomes durable it is a hundred times as much."""
NARROW_BYTES = 1_500
"""The same where nearly no snapshots are made: such a stream is soon full."""
NARROW_BODY_BYTES = 1_000
BLOCKS_PER_WORKER_MAX = 1024

_ROUTER_SETTINGS = with_constants(RouterSettings, {"worker_timeout_ms": 1_000, "reservation_ttl_ms": 3_000})


def kept_transfers_max(scenario: Scenario) -> int:
    """Return how many prefilled requests a worker keeps."""
    return 100 if scenario.strict else KEPT_TRANSFERS_MAX


class World:
    """What processes share: time, network, seed, scenario, and who watches."""

    def __init__(
        self, scenario: Scenario, loop: VirtualLoop, network: Network, watcher: Watcher, vocabulary: Vocabulary
    ) -> None:
        self.scenario = scenario
        self.loop = loop
        self.network = network
        self.watcher = watcher
        self.vocabulary = vocabulary
        self.streams: dict[str, SimulatedJetStream] = {}
        """By pool: the servers of those whose journal is in a stream."""
        self.recordings = Recordings() if is_recorded(scenario.seed) else None
        self.lives: list[Life] = []
        self.ports = 0
        self.on_end: Callable[[Process], None] = lambda process: None

    def port(self) -> int:
        """Return a port that nobody else has."""
        self.ports += 1
        return 10_000 + self.ports


class Process:
    """A machine's process over all its lives."""

    kind = ""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.machine = Machine(name, world.loop, Random(f"{world.scenario.seed}/{name}"))
        self.name = name
        self.life: Life | None = None
        self.wanted = True
        """It is started again when it has ended."""
        self._task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Say whether a life is under way."""
        return self.life is not None and not self.life.dead

    def start(self) -> None:
        """Begin a life."""
        assert not self.alive
        machine = self.machine
        machine.lives += 1
        self.life = life = Life(machine.name, self.kind, machine.lives)
        self.world.lives.append(life)
        self.world.watcher.note("start", str(life))
        self._task = self.world.loop.spawn(life, self._live(life))

    async def _live(self, life: Life) -> None:
        try:
            await self.run(life)
        except OSError as error:
            self.world.watcher.note("exit", f"{life} {error}")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.world.watcher.fail(f"{life} ended with {error!r}")
        self._ended(life)

    def _ended(self, life: Life) -> None:
        if not life.dead:
            life.dead = True
            self.world.watcher.note("end", str(life))
            self.world.network.kill(life)
            self.world.on_end(self)

    async def run(self, life: Life) -> None:
        """Be the process, from start to end."""
        raise NotImplementedError

    def kill(self) -> None:
        """End at once."""
        if self.life is not None and not self.life.dead:
            self.life.dead = True
            self.world.watcher.note("kill", str(self.life))
            self.world.network.kill(self.life)
            self.world.on_end(self)


class Store:
    """What a consolidator needs on whichever machine it runs."""

    def __init__(self, world: World, plan: PoolPlan, machine: Machine) -> None:
        self._world = world
        self._plan = plan
        self._machine = machine
        self._settings = ConsolidatorSettings.model_construct(
            **{
                **ConsolidatorSettings().model_dump(),
                "ingest_port": world.port(),
                "feed_port": world.port(),
                "query_port": world.port(),
                "lease_ms": LEASE_MS,
                "fsync": plan.fsync,
            }
        )
        self._tuning = Tuning(
            stale_after_ms=STALE_AFTER_MS,
            snapshot_every_records=world.scenario.snapshot_every_records,
            append_retry_ms=100,
            fsync_interval_ms=400,
            feed_keep_alive_ms=300,
            blocks_per_worker_max=BLOCKS_PER_WORKER_MAX,
        )
        self.ingest_endpoint = f"tcp://127.0.0.1:{self._settings.ingest_port}"
        self.feed_endpoint = f"tcp://127.0.0.1:{self._settings.feed_port}"
        self.query_endpoint = f"tcp://127.0.0.1:{self._settings.query_port}"
        self.service: ConsolidatorService | None = None
        self.journal: Journal | None = None

    def make(self) -> ConsolidatorService:
        """Return the service of a new life."""
        consolidator_id = f"{self._machine.name}/{self._machine.lives}"
        self.journal = None
        self.service = ConsolidatorService(
            self._settings,
            CollectorRegistry(),
            self._machine,
            lambda: self._open(consolidator_id),
            consolidator_id,
            self._world.network.context,
            tuning=self._tuning,
        )
        return self.service

    def make_successor(
        self, consolidator_id: str, on_fenced: Callable[[JournalFenced], None], servers: SimulatedJetStream
    ) -> ConsolidatorService:
        """Return the service of one of the lives of a process that shares its pool's stream."""

        def open_stream() -> Journal:
            stream = WrittenStream(servers, self._machine.name)
            durable_after_ms = 1000 * self._world.scenario.stream.sync_s
            body_bytes = NARROW_BODY_BYTES if servers.retention_bytes == NARROW_BYTES else BODY_BYTES
            sizes = StreamJournalSettings(
                servers.retention_bytes, 600_000, servers.bytes_max, body_bytes, durable_after_ms
            )
            self.journal = journal = StreamJournal(stream, consolidator_id, self._machine, sizes)
            watched = WatchedJournal(journal, self._world.watcher, self._plan.name, consolidator_id, servers.ever)
            return cast(Journal, watched)

        self.journal = None
        self.service = ConsolidatorService(
            self._settings,
            CollectorRegistry(),
            self._machine,
            open_stream,
            consolidator_id,
            self._world.network.context,
            on_fenced,
            tuning=self._tuning,
        )
        return self.service

    def _open(self, consolidator_id: str) -> Journal:
        scenario = self._world.scenario
        journal: Journal
        if self._plan.journal == "memory":
            journal = MemoryJournal(scenario.memory_journal_bytes)
        else:
            journal = FileJournal(
                self._machine.disk.open(),
                JournalSettings(segment_bytes=4_000, retention_bytes=12_000, retention_ms=600_000),
            )
        self.journal = journal
        return cast(Journal, WatchedJournal(journal, self._world.watcher, self._plan.name, consolidator_id))

    @property
    def machine_name(self) -> str:
        """Return where it runs."""
        return self._machine.name

    @property
    def memory_journal_bytes(self) -> int:
        """Return the bound of a journal in memory."""
        return self._world.scenario.memory_journal_bytes

    def disk(self) -> Disk:
        """Return the journal's directory."""
        return self._machine.disk.open()

    @property
    def offset(self) -> int | None:
        """Return the next offset, once it is known."""
        service = self.service
        return service.core.pool.offset if service is not None and service._core is not None else None


class ConsolidatorProcess(Process):
    """``poolgrid consolidator``."""

    kind = "consolidator"

    def __init__(self, world: World, plan: PoolPlan) -> None:
        super().__init__(world, f"{plan.name}.consolidator")
        self.store = Store(world, plan, self.machine)

    async def run(self, life: Life) -> None:
        """Serve for ever."""
        service = self.store.make()
        await service.start()
        await asyncio.Event().wait()


class SucceedingProcess(Process):
    """``poolgrid consolidator --event-plane nats``: one of several of a pool."""

    kind = "consolidator"

    def __init__(self, world: World, plan: PoolPlan, number: int) -> None:
        super().__init__(world, f"{plan.name}.consolidator{number}")
        self.store = Store(world, plan, self.machine)
        self.succession: LeaderElection | None = None
        self._servers = world.streams[plan.name]
        self._ids = 0

    async def run(self, life: Life) -> None:
        """Stand by and be active in turn, for ever."""
        self.succession = None
        link = self._servers.link(life)
        await link.open()
        settings = ConsolidatorProcessSettings.model_construct(
            **{**ConsolidatorProcessSettings().model_dump(), "leader_lease_ms": 1000 * LEADER_LEASE_S}
        )
        self.succession = LeaderElection(
            settings,
            link.journal,
            self.machine,
            LeaderElectionMetrics(CollectorRegistry()),
            lambda name, on_fenced: self.store.make_successor(name, on_fenced, self._servers),
            self._new_id,
        )
        await self.succession.run(asyncio.Event())

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.machine.name}/{self.machine.lives}/{self._ids}"

    @property
    def active(self) -> ConsolidatorService | None:
        """Return the service of a life that is under way, and believes to be the active one."""
        service = self.succession.service if self.alive and self.succession is not None else None
        return service if service is not None and service.started else None


class SharedStore:
    """What a pool's consolidators share: whichever is active has the state."""

    def __init__(self, world: World, plan: PoolPlan, sharers: Sequence[SucceedingProcess]) -> None:
        self.servers = world.streams[plan.name]
        self._sharers = sharers
        self.memory_journal_bytes = 0
        self.ingest_endpoint = ""
        """Workers are told by the servers."""

    @property
    def _active(self) -> SucceedingProcess | None:
        active = [process for process in self._sharers if process.active is not None]
        return active[0] if len(active) == 1 else None

    @property
    def machine_name(self) -> str:
        """Return where the active one runs."""
        active = self._active
        return active.name if active is not None else f"one of {[process.name for process in self._sharers]}"

    @property
    def service(self) -> ConsolidatorService | None:
        """Return the active consolidator; ``None`` while there is none, or several that believe to be it."""
        active = self._active
        return active.active if active is not None else None

    @property
    def journal(self) -> Journal | None:
        """Return the journal of the active one."""
        active = self._active
        return active.store.journal if active is not None else None

    @property
    def offset(self) -> int | None:
        """Return the next offset, once it is known."""
        service = self.service
        return service.core.pool.offset if service is not None else None


AnyStore = Store | SharedStore


class WatchedFeed:
    """A feed whose records the watcher sees before the router does."""

    def __init__(self, feed: JournalFeed, watcher: Watcher, router: RouterProcess) -> None:
        self._feed = feed
        self._watcher = watcher
        self._router = router
        self._listener: PoolListener | None = None

    async def start(self, listener: PoolListener) -> None:
        """Follow, with the watcher in between."""
        self._listener = listener
        await self._feed.start(self)

    def trouble(self, now_ms: float) -> str:
        """Pass on what is wrong."""
        return self._feed.trouble(now_ms)

    def resync(self) -> None:
        """Pass the wish on."""
        self._feed.resync()

    def loading(self) -> list[LoadingWorker]:
        return []

    def behind(self) -> int:
        """Pass on how much is missing."""
        return self._feed.behind()

    async def stop(self) -> None:
        """Stop following."""
        await self._feed.stop()

    def on_snapshot(
        self,
        next_offset: int,
        workers: Sequence[WorkerState],
        chains: Iterable[tuple[int, BlockChain]],
        sessions: SessionsSnapshot = NO_SESSIONS,
    ) -> None:
        """Pass a snapshot on."""
        assert self._listener is not None
        self._watcher.on_snapshot(self._router, next_offset)
        self._listener.on_snapshot(next_offset, workers, chains, sessions)

    def on_records(self, records: Sequence[JournalRecord]) -> None:
        """Pass records on."""
        assert self._listener is not None
        self._watcher.on_records(self._router, records)
        self._listener.on_records(records)


class RouterProcess(Process):
    """``poolgrid router``, with the consolidator inside or elsewhere."""

    kind = "router"

    def __init__(self, world: World, plan: PoolPlan, name: str, store: AnyStore | None) -> None:
        super().__init__(world, name)
        self.plan = plan
        self.store: AnyStore = store or Store(world, plan, self.machine)
        self.embedded = store is None
        self.service: RouterService | None = None
        self.feed: JournalFeed | None = None
        self.select_endpoint = ""
        self._settings = _ROUTER_SETTINGS.model_copy(
            update={
                "legs": "expected-time" if world.scenario.local_prefill_max_tokens else "two",
                "queue_timeout_ms": 60_000.0 if world.scenario.strict else QUEUE_TIMEOUT_MS,
                "max_queue_requests": world.scenario.queue_limit,
                "worker_queue_factor": world.scenario.worker_queue_factor,
                "select_port": world.port(),
            }
        )

    @property
    def settings(self) -> RouterSettings:
        """Return the settings."""
        return self._settings

    async def run(self, life: Life) -> None:
        """Serve for ever."""
        world, settings = self.world, self._settings
        self.service = None  # that of the life before, while this one connects
        clock = AwakeClock(self.machine, settings.worker_timeout_ms).start()
        metrics = RouterMetrics(CollectorRegistry())
        ledger = LoadLedger(settings.reservation_ttl_ms)
        projection = Projection(PrefixIndex(settings.index_budget_bytes), ledger)
        policy = make_policy("kv")
        state = RouterState(Selector(projection, policy, settings.worker_queue_factor))
        feed: JournalFeed
        if isinstance(self.store, SharedStore):
            link = self.store.servers.link(life)
            await link.open()
            feed = RemoteFeed("", "", clock, make_context=world.network.context)
            await LeaderWatch(link.connection, partial(_follow, feed)).start()
        elif self.embedded:
            feed = EmbeddedFeed(self.store.make())
        else:
            feed = RemoteFeed(
                self.store.feed_endpoint, self.store.query_endpoint, clock, make_context=world.network.context
            )
        self.feed = feed
        context = world.network.context()
        open_link = link_opener(context, settings.worker_timeout_ms, clock, lambda: None)
        service = RouterService(settings, state, WatchedFeed(feed, world.watcher, self), metrics, clock, open_link)
        self.service = service
        if world.recordings is not None:
            recorder = world.recordings.begin(self.plan.name, str(life), settings, state, clock)
            service.tracker.recorder = recorder
            state.log = recorder
            recorder.start()
        plane = SelectPlane(context, settings.host, settings.select_port, service, state, clock)
        self.select_endpoint = plane.endpoint
        await service.start()
        await asyncio.Event().wait()

    @property
    def ready(self) -> bool:
        """Say whether requests may be sent here."""
        return self.alive and self.service is not None and self.service.ready


class _SometimesFull(RealTimeSimulatedEngine):
    """An engine that has no room for a while, like one behind a server that answers 429."""

    def __init__(self, process: WorkerProcess, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._process = process

    def submit(self, request: Generate) -> None:
        process = self._process
        if asyncio.get_running_loop().time() < process.full_until_s:
            raise BusyError("the engine is full", process.retry_after_ms)
        super().submit(request)


class WorkerProcess(Process):
    """``poolgrid worker`` with the simulated engine."""

    kind = "worker"

    def __init__(self, world: World, plan: WorkerPlan, ingest_endpoint: str) -> None:
        super().__init__(world, plan.name)
        self.plan = plan
        self._ingest_endpoint = ingest_endpoint
        self._port = world.port()
        self._stop: asyncio.Event | None = None
        self.service: WorkerService | None = None
        self.engine: RealTimeSimulatedEngine | None = None
        self.stream: PushStream | None = None
        self.fetcher: KvFetcher | None = None
        self.epoch = 0
        self.card: WorkerCard | None = None
        self.full_until_s = 0.0
        """Until when its engine refuses whatever is new for lack of room."""
        self.retry_after_ms: int | None = None

    async def run(self, life: Life) -> None:
        """Serve until stopped, and drain."""
        world, plan, clock = self.world, self.plan, self.machine
        awake = AwakeClock(clock, PEER_LEASE_MS).start()
        network = world.network
        metrics = WorkerMetrics(CollectorRegistry())
        context = network.context()
        self.epoch = epoch = clock.wall_ms() * 1_000_000 + clock.lives
        requests = RequestSocket(context, "127.0.0.1", self._port if plan.same_port else world.port())
        limits = SimulatedLimits(
            block_size=world.scenario.block_size,
            total_kv_blocks=plan.total_kv_blocks,
            host_kv_blocks=plan.host_kv_blocks,
            max_batch_size=plan.max_batch_size,
            max_num_tokens=64,
            max_sequence_length=plan.total_kv_blocks * world.scenario.block_size,
            max_waiting_requests=MAX_WAITING_REQUESTS,
        )
        self.card = card = WorkerCard(
            model=MODEL,
            role=plan.role,
            block_size=limits.block_size,
            limits=WorkerLimits(
                limits.max_batch_size,
                limits.max_num_tokens,
                limits.total_kv_blocks,
                limits.max_sequence_length,
                limits.host_kv_blocks,
            ),
            request_endpoint=f"tcp://127.0.0.1:{requests.port}",
            eos_token_ids=(2,),
            vocabulary_size=VOCABULARY_SIZE,
        )
        self.engine = engine = _SometimesFull(
            self,
            limits,
            world.vocabulary,
            ScaledTiming(PolynomialTiming(), plan.speedup),
            clock,
            TransferModel(
                timeout_ms=60_000.0 if world.scenario.strict else 3_000.0, kept_max=kept_transfers_max(world.scenario)
            ),
            KvSource(card.request_endpoint, plan.name, epoch),
        )
        self.fetcher = fetcher = KvFetcher(
            context, KV_FETCH_TIMEOUT_MS, MAX_WAITING_REQUESTS + plan.max_batch_size, awake, metrics
        )
        self.service = service = WorkerService(
            plan.name,
            epoch,
            card,
            engine,
            requests,
            ServiceLimits(PEER_LEASE_MS, DRAIN_TIMEOUT_MS),
            awake,
            metrics,
            KvExchange(engine, fetcher),
        )
        self.stream = PushStream(
            plan.name,
            0,
            epoch,
            card,
            PushTiming(heartbeat_ms=300.0, silence_ms=1_500.0, refused_retry_ms=200.0, refused_retry_max_ms=2_000.0),
            world.scenario.outbox_bytes,
        )
        publisher = EventPublisher(
            partial(DealerSocket, context, CONSOLIDATOR),
            self._ingest_endpoint,
            self.stream,
            service.restate,
            clock,
            metrics,
            load_interval_ms=100,
        )
        self._stop = asyncio.Event()
        try:
            servers = world.streams.get(plan.pool)
            if servers is not None:
                link = servers.link(life)
                await link.open()
                await LeaderWatch(link.connection, partial(_push_to, publisher)).start()
            await service.run([publisher], self._stop)
        finally:
            fetcher.close(orderly=True)
            requests.close(orderly=True)
            publisher.close(orderly=True)

    def drain(self) -> None:
        """Ask it to end in good order."""
        if self.alive and self._stop is not None:
            self.world.watcher.note("drain", str(self.life))
            self._stop.set()


def _follow(feed: RemoteFeed, leader: Leader | None) -> None:
    if leader is not None and leader.feed:
        detached(feed.move(leader.feed, leader.query), "move to another consolidator")


def _push_to(publisher: EventPublisher, leader: Leader | None) -> None:
    publisher.follow("" if leader is None else leader.ingest)


class GlobalRouterProcess(Process):
    """``poolgrid global-router`` over the pools of the scenario."""

    kind = "global"

    def __init__(self, world: World, document: LoadedDocument, routers: dict[str, RouterProcess]) -> None:
        super().__init__(world, "global")
        self._document = document
        self._routers = routers
        self.service: GlobalRouterService | None = None
        self.links: LinksOnDemand | None = None
        self._ready = False

    async def run(self, life: Life) -> None:
        """Serve for ever."""
        clock = AwakeClock(self.machine, SELECT_TIMEOUT_MS).start()
        self._ready = False
        settings = GlobalRouterSettings(
            config=Path("simulated"),
            worker_timeout_ms=1_000,
            local_prefill_max_tokens=self.world.scenario.local_prefill_max_tokens,
        )
        timings = Timings(
            status_interval_ms=100,
            status_timeout_ms=600,
            select_timeout_ms=SELECT_TIMEOUT_MS,
            connect_timeout_ms=300,
            link_idle_ms=2_000,
            move_timeout_ms=4_000,
        )
        metrics = GlobalRouterMetrics(CollectorRegistry())
        context = self.world.network.context()
        open_link = link_opener(context, settings.worker_timeout_ms, clock, lambda: None)
        self.links = links = LinksOnDemand(open_link, timings.link_idle_ms, clock)
        configuration = Configuration(self._document, settings.config, clock)
        urls = {name: f"http://{name}" for name in self._routers}
        network = PoolNetwork(context, self._discover, clock, timings.status_interval_ms, timings.status_timeout_ms)
        pools = Pools(urls, network)
        self.service = service = GlobalRouterService(
            settings, configuration, pools, links, metrics, clock, timings=timings
        )
        pools.use(self._document.document)
        housekeeping = asyncio.create_task(service.run_housekeeping())
        await pools.first_look()
        self._ready = True
        await housekeeping

    async def _discover(self, url: str) -> str:
        router = self._routers[url.removeprefix("http://")]
        await asyncio.sleep(0.002)
        if not router.alive or not router.select_endpoint:
            raise OSError(f"asking {url}/v1/pool: connection refused")
        return router.select_endpoint

    @property
    def ready(self) -> bool:
        """Say whether requests may be sent here."""
        return self.alive and self._ready and self.service is not None and self.service.view.missing() is None
