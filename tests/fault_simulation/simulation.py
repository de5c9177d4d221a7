"""One run: a scenario played to its end, watched all the way, and looked at when all is quiet.

    0 s              everything starts
    ``START_S`` ...  clients come, faults happen
    ``ends_s``       everything is mended: partitions heal, disks have room, what is down is started again
    then             all must become quiet (``quiet.py``) within ``QUIET_WITHIN_S``
    then             each entrance must serve one more request, and all become quiet again

Each request must end exactly once, with exactly the text that the engine's rule gives for its prompt, or with an error
or refusal that faults explain; in a ``calm`` run there are none.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from poolgrid.kernel.requests.inference import InferenceRequest, Refused, StreamDelta
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.plugins.nats.journal import SIZE_FACTOR
from poolgrid.plugins.simulated.core.next_token import AnswerLengths, Vocabulary, expected_reply
from poolgrid.server.global_router.document.reader import load_document
from tests.fault_simulation import bounds, quiet
from tests.fault_simulation.jetstream import SimulatedJetStream
from tests.fault_simulation.network import Network
from tests.fault_simulation.processes import (
    BLOCKS_PER_WORKER_MAX,
    NARROW_BYTES,
    STREAM_RETENTION_BYTES,
    AnyStore,
    ConsolidatorProcess,
    GlobalRouterProcess,
    Process,
    RouterProcess,
    SharedStore,
    SucceedingProcess,
    WorkerProcess,
    World,
)
from tests.fault_simulation.scenario import (
    CONSOLIDATORS,
    MODEL,
    VOCABULARY_SIZE,
    Fault,
    PoolPlan,
    RequestPlan,
    Scenario,
    make_scenario,
)
from tests.fault_simulation.trace import Trace
from tests.fault_simulation.virtual_loop import Life, StillBusy, VirtualLoop
from tests.fault_simulation.watcher import LogWatcher, Watcher

QUIET_WITHIN_S = 40.0
LOOK_EVERY_S = 0.1
AFTERMATH_S = 1.0
ENTRANCE_WAIT_S = 0.1
PROBE_AGAIN_S = 0.5
PROBES_MAX = 60
SNAPSHOTS_SPARSE = 1000
"""Records between two snapshots of a scenario that means to make none."""
REFUSALS = frozenset({"busy", "no_worker", "not_ready"})
ERRORS = (
    "moved ",
    "no worker",
    "worker",
    "no pool",
    "choosing a pool",
    "every other worker is busy",
)
"""Words that an error of a request may hold when there were faults; anything else is a breach."""


@dataclass(slots=True)
class Outcome:
    """What a client saw."""

    plan: RequestPlan
    expected: bytes
    expected_reason: str
    life: Life | None = None
    """Whose process serves it; ``None`` while no entrance was there."""
    tokens: bytearray = field(default_factory=bytearray)
    ended: str | None = None
    """Finish reason, ``refused``, or ``left`` when the client went away while it waited for a worker."""
    cancelled: bool = False

    @property
    def is_over(self) -> bool:
        """Say whether nothing more will happen: it ended, or its router's process did."""
        return self.ended is not None or (self.life is not None and self.life.dead)


@dataclass(frozen=True, slots=True)
class Report:
    """How a run went."""

    scenario: Scenario
    failure: str | None
    digest: str
    events: int
    virtual_s: float
    counts: dict[str, int]
    last_events: list[str]


class Simulation:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, keep_all: bool = False) -> None:
        self.scenario = scenario
        self._keep_all = keep_all
        self._rng = Random(f"{scenario.seed}/faults")
        self.loop = VirtualLoop(Random(f"{scenario.seed}/threads"))  # type: ignore[abstract]
        self.trace = Trace(keep_all)
        self.watcher = Watcher(self.loop, self.trace)
        self.network = Network(self.loop, Random(f"{scenario.seed}/network"), self.trace, scenario.network)
        self.network.on_send = self.watcher.on_send
        self.network.on_close = self.watcher.on_close
        mean = scenario.answer_tokens
        answers = AnswerLengths(mean, mean / 2) if mean else None
        vocabulary = Vocabulary(VOCABULARY_SIZE, eos_probability=scenario.eos_probability, answers=answers)
        self.world = World(scenario, self.loop, self.network, self.watcher, vocabulary)
        self.world.on_end = self._on_end
        self.processes: dict[str, Process] = {}
        self.stores: dict[str, AnyStore] = {}
        self.outcomes: list[Outcome] = []
        self._joined = 0
        self._probes_to_come = 0
        self._build()

    # -- what there is -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        scenario, world = self.scenario, self.world
        entrances: list[RouterProcess] = []
        by_pool: dict[str, RouterProcess] = {}
        for plan in scenario.pools:
            store: AnyStore | None = None
            if plan.journal == "stream":
                store = self._build_stream(plan)
            elif not plan.embedded:
                consolidator = ConsolidatorProcess(world, plan)
                store = consolidator.store
                self._add(consolidator)
            for name in plan.routers:
                router = RouterProcess(world, plan, name, store)
                self._add(router)
                self.watcher.routers[name] = router
                entrances.append(router)
                by_pool.setdefault(plan.name, router)
            self.stores[plan.name] = by_pool[plan.name].store
            if plan.journal == "disk" and plan.fsync == "always":
                machine = (by_pool[plan.name] if plan.embedded else self.processes[f"{plan.name}.consolidator"]).machine
                self.watcher.durable_machines[machine.name] = machine
            for worker in plan.workers:
                self._add(WorkerProcess(world, worker, self.stores[plan.name].ingest_endpoint))
        self.entrances: list[RouterProcess | GlobalRouterProcess] = list(entrances)
        if scenario.global_router:
            entrance = GlobalRouterProcess(world, load_document(_document(scenario), "simulated"), by_pool)
            self._add(entrance)
            self.entrances = [entrance] if scenario.mode == "disagg" else [entrance, *entrances]

    def _build_stream(self, plan: PoolPlan) -> SharedStore:
        scenario, world = self.scenario, self.world
        servers = SimulatedJetStream(plan.name, self.loop, self.network, self.watcher, scenario.seed)
        servers.faults = scenario.stream
        if scenario.stream.sync_s > scenario.ends_s:
            servers.retention_bytes = 100 * STREAM_RETENTION_BYTES  # what is never durable is never removed
        else:
            sparse = scenario.snapshot_every_records > SNAPSHOTS_SPARSE
            servers.retention_bytes = NARROW_BYTES if sparse else STREAM_RETENTION_BYTES
        servers.bytes_max = SIZE_FACTOR * servers.retention_bytes
        world.streams[plan.name] = servers
        self.watcher.streams[plan.name] = servers.ever
        sharers = [SucceedingProcess(world, plan, number) for number in range(CONSOLIDATORS)]
        for sharer in sharers:
            self._add(sharer)
        return SharedStore(world, plan, sharers)

    def _add(self, process: Process) -> None:
        self.processes[process.name] = process

    def of_kind(self, kind: type[Any]) -> list[Any]:
        """Return the processes of a class."""
        return [process for process in self.processes.values() if isinstance(process, kind)]

    def workers_of(self, pool: str) -> list[WorkerProcess]:
        """Return the workers that belong to a pool and shall live."""
        return [worker for worker in self.of_kind(WorkerProcess) if worker.plan.pool == pool and worker.wanted]

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """Play the scenario."""
        watcher, scenario = self.watcher, self.scenario
        with self._logs():
            try:
                self._play()
            except StillBusy as busy:
                watcher.fail(str(busy))
            finally:
                watcher.over = True
                digest = self.trace.digest()
                self.loop.close(self.world.lives)
        virtual_s = self.loop.time()
        failure = watcher.failure
        return Report(
            scenario,
            failure,
            digest,
            self.trace.events,
            virtual_s,
            {
                **self.network.counts,
                "dispatches": watcher.dispatches,
                "lives": len(self.world.lives),
                **{name: count for each in self.world.streams.values() for name, count in each.counts.items()},
                **(self.world.recordings.counts() if self.world.recordings is not None else {}),
            },
            self.trace.lines(),
        )

    def _play(self) -> None:
        scenario = self.scenario
        for process in self.processes.values():
            process.start()
        for plan in scenario.requests:
            self._at(plan.at_s, lambda plan=plan: self._come(plan))  # type: ignore[misc]
        for fault in scenario.faults:
            self._at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        if not self._run(scenario.ends_s):
            return
        self._mend()
        # What is still on its way, and connections whose end somebody has yet to notice, count as faults.
        if not self._run(scenario.ends_s + AFTERMATH_S) or not self._become_quiet():
            return
        for entrance in range(len(self.entrances)):
            self._probe(entrance)
        if not self._become_quiet():
            return
        for store in self.stores.values():
            unsound = quiet.unsound_journal(store)
            if unsound is not None:
                self.watcher.fail(unsound)
        for outcome in self.outcomes:
            self._judge_end(outcome)
        self._replay()

    def _replay(self) -> None:
        recordings = self.world.recordings
        if recordings is None:
            return
        for pool in recordings.by_pool:
            lives = [self.watcher.histories[life].records for life in self.watcher.lives_of.get(pool, ())]
            ever = self.watcher.streams.get(pool)
            if ever is not None:
                # Also of what no writer was ever told that it is stored.
                times = max(map(len, ever.values()), default=0)
                lives = [
                    {offset: each[time] for offset, each in ever.items() if time < len(each)} for time in range(times)
                ]
            differing = recordings.differing(pool, lives, BLOCKS_PER_WORKER_MAX)
            if differing is not None:
                self.watcher.fail(differing)

    def _run(self, until_s: float, done: Callable[[], bool] | None = None) -> bool:
        """Run and look at bounds now and then; return False when the run has failed (or, with ``done``, is not)."""
        watcher = self.watcher
        while True:
            if done is not None and done():
                return watcher.failure is None
            if self.loop.time() >= until_s:
                return done is None and watcher.failure is None
            next_s = min(until_s, self.loop.time() + LOOK_EVERY_S)
            self.loop.run_until(next_s, lambda: watcher.failure is not None)
            if self.loop.failures:
                watcher.fail(self.loop.failures[0])
            for fault in self._out_of_bounds():
                watcher.fail(fault)
            if watcher.failure is not None:
                return False

    def _out_of_bounds(self) -> Iterator[str]:
        for process in self.processes.values():
            fault: str | None = None
            if isinstance(process, WorkerProcess):
                fault = bounds.worker_faults(process)
            elif isinstance(process, RouterProcess):
                fault = bounds.router_faults(process)
            if fault is not None:
                yield fault
        for store in self.stores.values():
            fault = bounds.store_faults(store)
            if fault is not None:
                yield fault

    def _become_quiet(self) -> bool:
        started_s = self.loop.time()
        if self._run(started_s + QUIET_WITHIN_S, lambda: self._unquiet() is None):
            self.watcher.note("quiet", f"after {self.loop.time() - started_s:.3f} s")
            return True
        if self.watcher.failure is None:
            self.watcher.fail(f"not quiet {QUIET_WITHIN_S:.0f} s after the last fault: {self._unquiet()}")
        return False

    def _unquiet(self) -> str | None:
        for process in self.processes.values():
            if process.wanted and not process.alive:
                return f"{process.name} is not running"
        if self._probes_to_come:
            return "a probe was refused and comes again"
        for outcome in self.outcomes:
            if not outcome.is_over:
                return f"request {outcome.plan.request_id} has not ended, it runs at {outcome.life}"
        for process in self.processes.values():
            why: str | None = None
            if isinstance(process, WorkerProcess) and process.wanted:
                why = quiet.unquiet_worker(process)
            elif isinstance(process, RouterProcess):
                why = quiet.unquiet_router(process, self.workers_of(process.plan.name))
            elif isinstance(process, GlobalRouterProcess):
                why = quiet.unquiet_global(process)
            if why is not None:
                return why
        for pool, store in self.stores.items():
            why = quiet.unquiet_store(store, self.workers_of(pool), self.watcher)
            if why is not None:
                return why
        return None

    @contextmanager
    def _logs(self) -> Iterator[None]:
        root = logging.getLogger()
        handler = LogWatcher(self.watcher, self._keep_all)
        handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
        root.handlers[:] = [handler]
        root.setLevel(logging.DEBUG if self._keep_all else logging.ERROR)
        logging.disable(logging.NOTSET if self._keep_all else logging.WARNING)
        try:
            yield
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
            logging.disable(disabled)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _at(self, when_s: float, work: Callable[[], None]) -> None:
        self.loop.call_at(when_s, work, context=contextvars.Context())

    def _on_end(self, process: Process) -> None:
        if process.wanted:
            delay_s = self.scenario.restart_s * self._rng.uniform(0.5, 1.5)
            self._at(self.loop.time() + delay_s, lambda: self._revive(process))

    def _revive(self, process: Process) -> None:
        if process.wanted and not process.alive:
            process.start()

    def _strike(self, fault: Fault) -> None:
        self.watcher.note("FAULT", str(fault))
        network = self.network
        until_s = self.loop.time() + fault.for_s
        servers = next((each for each in self.world.streams.values() if each.machine == fault.target), None)
        if servers is not None:
            self._strike_servers(servers, fault, until_s)
            return
        process = self.processes[fault.target]
        if fault.kind == "crash":
            process.kill()
        elif fault.kind == "power-failure":
            process.kill()
            process.machine.disk.power_failure()
        elif fault.kind == "drain" and isinstance(process, WorkerProcess):
            process.drain()
        elif fault.kind == "remove" and isinstance(process, WorkerProcess):
            process.wanted = False
            if self._rng.random() < 0.5:
                process.drain()
            else:
                process.kill()
        elif fault.kind == "join" and isinstance(process, WorkerProcess):
            self._joined += 1
            plan = replace(process.plan, name=f"{process.plan.name}+{self._joined}")
            newcomer = WorkerProcess(self.world, plan, self.stores[plan.pool].ingest_endpoint)
            self._add(newcomer)
            newcomer.start()
        elif fault.kind == "partition":
            network.block(fault.target, fault.other, until_s)
            if self._rng.random() < 0.7:
                network.block(fault.other, fault.target, until_s)
        elif fault.kind == "silence":
            network.block(fault.target, fault.other, until_s)
        elif fault.kind == "break":
            network.break_connections(fault.target, fault.other)
        elif fault.kind == "pause" and process.life is not None:
            process.life.paused_until_s = max(process.life.paused_until_s, until_s)
        elif fault.kind == "full" and isinstance(process, WorkerProcess):
            process.full_until_s, process.retry_after_ms = until_s, fault.amount_ms or None
        elif fault.kind == "clock-jump":
            process.machine.wall_offset_ms += fault.amount_ms
        elif fault.kind == "disk-full":
            process.machine.disk.full = True
            self._at(until_s, lambda: setattr(process.machine.disk, "full", False))
        elif fault.kind == "slow-write":
            process.machine.disk.slow_once_s = fault.amount_ms / 1000
        elif fault.kind == "slow-disk":
            process.machine.disk.slow_s = fault.amount_ms / 1000
            self._at(until_s, lambda: setattr(process.machine.disk, "slow_s", 0.0))
        elif fault.kind == "sync-fails":
            process.machine.disk.sync_fails = True
            self._at(until_s, lambda: setattr(process.machine.disk, "sync_fails", False))

    def _strike_servers(self, servers: SimulatedJetStream, fault: Fault, until_s: float) -> None:
        if fault.kind == "power-failure":
            servers.power_failure()
            for machine in self.processes:
                servers.break_link(machine)
        elif fault.kind == "leaderless":
            servers.leaderless(until_s)
        elif fault.kind == "slow-disk":
            servers.slow_s = fault.amount_ms / 1000
            self._at(until_s, lambda: setattr(servers, "slow_s", 0.0))
        elif fault.kind == "break":
            servers.break_link(fault.other)
        elif fault.kind == "partition":
            self.network.block(fault.other, fault.target, until_s)
            if self._rng.random() < 0.7:
                self.network.block(fault.target, fault.other, until_s)

    def _mend(self) -> None:
        self.watcher.note("mend", "everything")
        self.network.heal()
        for servers in self.world.streams.values():
            servers.mend()
        for process in self.processes.values():
            disk = process.machine.disk
            disk.full = disk.sync_fails = False
            disk.slow_s = disk.slow_once_s = 0.0

    # -- clients -------------------------------------------------------------------------------------------------------

    def _come(self, plan: RequestPlan, outcome: Outcome | None = None) -> None:
        """A client comes; it tries again while the router it asks is not there."""
        if outcome is None:
            if plan.attempt:
                self._probes_to_come -= 1
            tokens, reason = expected_reply(plan.token_ids, plan.sampling, self.world.vocabulary)
            outcome = Outcome(plan, pack_tokens(tokens), reason)
            self.outcomes.append(outcome)
        entrance = self.entrances[plan.entrance % len(self.entrances)]
        if not entrance.ready or entrance.life is None or entrance.life.paused_until_s > self.loop.time():
            self._at(self.loop.time() + ENTRANCE_WAIT_S, lambda: self._come(plan, outcome))
            return
        outcome.life = entrance.life
        self.loop.spawn(entrance.life, self._client(entrance, outcome))

    def _probe(self, entrance: int, attempt: int = 0) -> None:
        """Send one more request, which must succeed; one that is refused comes again (a breaker may be open yet)."""
        rng = Random(f"{self.scenario.seed}/probe/{entrance}")
        prompt = [rng.randrange(3, VOCABULARY_SIZE) for _ in range(3 * self.scenario.block_size)]
        name = f"probe{entrance}" + (f".{attempt}" if attempt else "")
        self._come(RequestPlan(name, 0.0, entrance, pack_tokens(prompt), Sampling(max_tokens=8), attempt=attempt))

    async def _client(self, entrance: RouterProcess | GlobalRouterProcess, outcome: Outcome) -> None:
        plan = outcome.plan
        request = InferenceRequest(plan.request_id, MODEL, plan.token_ids, plan.sampling, read_whole=plan.read_whole)
        assert entrance.service is not None
        this = asyncio.current_task()
        assert this is not None
        stream: Any = None

        def leave() -> None:
            if outcome.ended is None:
                outcome.cancelled = True
                if stream is None:
                    this.cancel()
                else:
                    stream.cancel()

        if plan.cancel_after_s is not None:
            self.loop.call_later(plan.cancel_after_s, leave)
        try:
            stream = await entrance.service.submit(request)
        except Refused as refused:
            self._end(outcome, "refused")
            if self.scenario.global_router and self._is_probe(outcome) and plan.attempt < PROBES_MAX:
                again_s = self.loop.time() + PROBE_AGAIN_S
                self._at(again_s, lambda: self._probe(plan.entrance, plan.attempt + 1))
                self._probes_to_come += 1
            elif refused.code not in REFUSALS or self._is_strict(outcome):
                self.watcher.fail(f"request {plan.request_id} was refused: {refused.code}, {refused}")
            return
        except asyncio.CancelledError:
            self._end(outcome, "left")
            if not outcome.cancelled:
                self.watcher.fail(f"request {plan.request_id} was cancelled, and its client did not ask for it")
            return
        while True:
            deltas = await stream.next()
            if not deltas:
                self.watcher.fail(f"the stream of request {plan.request_id} ended without a last delta")
                return
            for delta in deltas:
                if outcome.ended is not None:
                    self.watcher.fail(f"request {plan.request_id} went on after its end")
                self._take(outcome, delta)
            if outcome.ended is not None:
                if await stream.next():
                    self.watcher.fail(f"request {plan.request_id} ended twice")
                return
            if plan.cancel_after_tokens is not None and len(outcome.tokens) // 4 >= plan.cancel_after_tokens:
                leave()

    def _is_probe(self, outcome: Outcome) -> bool:
        return outcome.plan.request_id.startswith("probe")

    def _is_strict(self, outcome: Outcome) -> bool:
        return self.scenario.strict or self._is_probe(outcome)

    def _take(self, outcome: Outcome, delta: StreamDelta) -> None:
        plan = outcome.plan
        outcome.tokens += delta.token_ids
        if not outcome.expected.startswith(outcome.tokens):
            self.watcher.fail(f"request {plan.request_id} got wrong tokens after {len(outcome.tokens) // 4}")
        if delta.finish_reason is None:
            return
        self._end(outcome, delta.finish_reason)
        if delta.finish_reason == "cancelled":
            if not outcome.cancelled:
                self.watcher.fail(f"request {plan.request_id} was cancelled, and its client did not ask for it")
        elif delta.finish_reason == "error":
            explained = any(words in (delta.error or "") for words in ERRORS)
            if self._is_strict(outcome) or not explained:
                self.watcher.fail(f"request {plan.request_id} ended with {delta.error!r}")
        elif bytes(outcome.tokens) != outcome.expected or delta.finish_reason != outcome.expected_reason:
            self.watcher.fail(
                f"request {plan.request_id} ended by {delta.finish_reason} with {len(outcome.tokens) // 4} tokens, "
                f"right are {outcome.expected_reason} and {len(outcome.expected) // 4}"
            )

    def _end(self, outcome: Outcome, how: str) -> None:
        if outcome.ended is not None:
            self.watcher.fail(f"request {outcome.plan.request_id} ended twice: {outcome.ended}, {how}")
        outcome.ended = how
        self.trace.note(
            self.loop.time(),
            "request",
            f"{outcome.plan.request_id} {how} {len(outcome.tokens) // 4}",
            bytes(outcome.tokens),
        )

    def _judge_end(self, outcome: Outcome) -> None:
        if outcome.ended is None and self._is_strict(outcome):
            self.watcher.fail(f"request {outcome.plan.request_id} was lost with {outcome.life}")


def _document(scenario: Scenario) -> bytes:
    """Return the pool grid of a scenario: a cell for each pool."""

    def stage(names: list[str], rows: str, columns: str) -> dict[str, Any]:
        return {
            "pools": [{"name": name, "url": f"http://{name}", "priority": n} for n, name in enumerate(names)],
            f"{rows}_min": 0,
            f"{rows}_max": 200,
            f"{rows}_resolution": 2,
            f"{columns}_min_ms": 0,
            f"{columns}_max_ms": 1000,
            f"{columns}_resolution": 1,
            "mapping": [[names[0]], [names[-1]]],
        }

    names = [pool.name for pool in scenario.pools]
    document: dict[str, Any] = {"version": 1, "mode": scenario.mode}
    if scenario.mode == "disagg":
        prefill = [name for name in names if name.startswith("prefill")]
        decode = [name for name in names if name.startswith("decode")]
        document["prefill"] = stage(prefill, "isl", "ttft")
        document["decode"] = stage(decode, "context_length", "itl")
    else:
        document["aggregated"] = {
            "pools": [{"name": name, "priority": n} for n, name in enumerate(names)],
            "isl_min": 0,
            "isl_max": 100,
            "isl_resolution": 2,
            "ttft_min_ms": 0,
            "ttft_max_ms": 1000,
            "ttft_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 20,
            "itl_resolution": 1,
            "mapping": [[[names[0]]], [[names[-1]]]],
        }
    return json.dumps(document).encode()


def play(seed: int, profile: str | None = None, keep_all: bool = False) -> Report:
    """Run the scenario of a seed."""
    return Simulation(make_scenario(seed, profile), keep_all).run()
