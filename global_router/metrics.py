"""What the global router counts; ``docs/global_router.md`` explains each.

Counters move where things happen; gauges that mirror state are read at scrape time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.global_router.core.choice.circuit_breaker import BreakerState
from poolgrid.global_router.core.choice.fallback import PoolStanding
from poolgrid.global_router.target_board import TargetBoard
from poolgrid.process.instruments import Counter, Histogram
from poolgrid.serving.leg_times import LegTimes

SELECT_SECONDS_BUCKETS = (100e-6, 250e-6, 500e-6, 750e-6, 1e-3, 1.5e-3, 2.5e-3, 5e-3, 10e-3, 50e-3, 0.25, 1.0)
QUEUE_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class GlobalRouterMetrics:
    """The global router's own series; requests and latencies are counted by the front end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.dispatches = Counter(
            "poolgrid_global_router_dispatches_total",
            "Dispatches by pool, stage and how the pool was found: by the grid, an override, a fallback, a "
            "retry or a spill.",
            ["pool", "stage", "how"],
            registry=registry,
        )
        self.passed_over = Counter(
            "poolgrid_global_router_passed_over_total",
            "Times a pool was wanted and could not be used, by its state: it is down, draining or saturated.",
            ["pool", "state"],
            registry=registry,
        )
        self.targets = TargetBoard(registry)
        self.leg_times = LegTimes("poolgrid_global_router_leg_seconds", registry)
        self.select_seconds = Histogram(
            "poolgrid_global_router_select_seconds",
            "Time of one select-and-reserve at a pool's router, there and back. This is what the global router "
            "adds to TTFT.",
            buckets=SELECT_SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "poolgrid_global_router_queue_seconds",
            "Time requests waited for a pool with room, by cause: `pools_full`, `behind_others`, or, of requests whose "
            "clients are being served already, `next_leg_or_move`. It is part of TTFT.",
            ["cause"],
            buckets=QUEUE_SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_evictions = Counter(
            "poolgrid_global_router_queue_evictions_total",
            "Waiting requests that gave way in a full queue to others of a higher priority, or of a tenant "
            "with less in it.",
            registry=registry,
        )
        self.refused = Counter(
            "poolgrid_global_router_refused_requests_total",
            "Requests not served, by reason code.",
            ["code"],
            registry=registry,
        )
        self.moves = Counter(
            "poolgrid_global_router_moves_total",
            "Requests moved to another worker before or amid their output.",
            ["cause"],
            registry=registry,
        )
        self.poison_requests = Counter(
            "poolgrid_global_router_poison_requests_total",
            "Requests ended with `workers_lost`, because two workers were lost one after another with them, "
            "before their first token. If there are any, look in the log for the request, its tenant, and what "
            "the workers died of.",
            registry=registry,
        )
        self.breaker_steps = Counter(
            "poolgrid_global_router_breaker_steps_total",
            "Changes of a pool's circuit breaker, by the state after it.",
            ["pool", "state"],
            registry=registry,
        )
        self.loop_steps = Counter(
            "poolgrid_global_router_loop_steps_total",
            "Steps of the closed loop, by the pool whose traffic spills.",
            ["pool"],
            registry=registry,
        )
        self.reloads = Counter(
            "poolgrid_global_router_reloads_total",
            "Attempts to change the document, by outcome. `refused` means that a document with problems was "
            "left aside and the old one is in force.",
            ["outcome"],
            registry=registry,
        )
        self.stream_faults = Counter(
            "poolgrid_global_router_stream_faults_total",
            "Worker output that was dropped: a hole or overlap in a stream, an unknown request, an undecodable frame.",
            ["kind"],
            registry=registry,
        )

    def use_pools(self, names: Collection[str]) -> None:
        """Show these pools and no others: a frozen series would look like one of a pool that is there.

        Breakers' steps are shown from 0 on. A series that begins with its first step has no increase to be seen.
        """
        for name in names:
            for state in BreakerState:
                self.breaker_steps.labels(name, state.value)
            self.loop_steps.labels(name)
        for counter in (self.dispatches, self.passed_over, self.breaker_steps, self.loop_steps):
            counter.retain(lambda labels: labels[0] in names)
        self.targets.keep(names)


class Viewed(Protocol):
    """What the state metrics are read from."""

    def pool_states(self) -> Mapping[str, PoolStanding]:
        """Return the state of every pool."""
        ...

    def in_flight(self) -> Mapping[str, int]:
        """Return the dispatches under way by pool."""
        ...

    def counts(self) -> tuple[int, int]:
        """Return requests that have begun, and requests that wait for a pool with room."""
        ...

    @property
    def queued_prompt_tokens(self) -> int:
        """Return the prompt tokens of the waiting requests."""
        ...

    @property
    def queue_fill(self) -> float:
        """Return how full the queue is, from 0 to 1."""
        ...

    @property
    def backlog_s(self) -> float:
        """Return how long those that wait will take."""
        ...

    def revision(self) -> int:
        """Return the revision of the document in force."""
        ...


class StateCollector(Collector):
    """Reads the global router's state when somebody scrapes."""

    def __init__(self, viewed: Viewed) -> None:
        self._viewed = viewed

    def collect(self) -> Iterator[Metric]:
        """Yield what the state is now."""
        pools = GaugeMetricFamily(
            "poolgrid_global_router_pools",
            "1 for the state that a pool is in.",
            labels=["pool", "state"],
        )
        for name, state in dict(self._viewed.pool_states()).items():
            for each in PoolStanding:
                pools.add_metric([name, each.value], 1.0 if each is state else 0.0)
        dispatched = GaugeMetricFamily(
            "poolgrid_global_router_in_flight", "Dispatches under way, by pool.", labels=["pool"]
        )
        for name, count in dict(self._viewed.in_flight()).items():
            dispatched.add_metric([name], count)
        yield from (pools, dispatched)
        active, waiting = self._viewed.counts()
        for name, text, value in (
            ("active_requests", "Requests on workers, or on their way to one.", active),
            (
                "queued_requests",
                "Requests waiting for a pool with room. If it grows, the pools are too small for the load.",
                waiting,
            ),
            (
                "queued_prompt_tokens",
                (
                    "Prompt tokens of the waiting requests. At `queue_prompt_tokens` the lowest priority is answered "
                    "429."
                ),
                self._viewed.queued_prompt_tokens,
            ),
        ):
            yield GaugeMetricFamily(f"poolgrid_global_router_{name}", text, value=value)
        yield GaugeMetricFamily(
            "poolgrid_global_router_queue_fill_ratio",
            "How full the queue is: the larger share of `queue_limit` and of `queue_prompt_tokens` that is used. "
            "At 1 the lowest priority is answered 429.",
            value=self._viewed.queue_fill,
        )
        yield GaugeMetricFamily(
            "poolgrid_global_router_backlog_seconds",
            "Time that the waiting requests will take, at the rate at which requests finished lately. Above some "
            "seconds for longer than a burst the pools need more workers: scale by it.",
            value=self._viewed.backlog_s,
        )
        yield GaugeMetricFamily(
            "poolgrid_global_router_revision",
            "Revision of the document in force. If it differs between replicas, one has not reloaded.",
            value=self._viewed.revision(),
        )


def register_views(registry: CollectorRegistry, viewed: Viewed) -> None:
    """Have the state read at every scrape."""
    registry.register(StateCollector(viewed))
