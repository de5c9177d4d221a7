"""What a router's state, and its decision journal, are at the moment of a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.kernel.wire.feed import OWN_STATES, WORKER_SOURCE
from poolgrid.kernel.wire.identifiers import StreamState
from poolgrid.server.router.service import RouterService
from poolgrid.server.serving.admission_queue import queue_metrics

if TYPE_CHECKING:
    from poolgrid.server.router.decision_journal.recorder import DecisionRecorder

PREFIX = "poolgrid_router"
WORKER_STATES = ("ready", "draining", "unreachable")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _by_label(name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


class StateCollector(Collector):
    """Reads the router's state at a scrape."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        projection = service.projection
        index, ledger, trust = projection.index, projection.ledger, projection.trust
        yield from queue_metrics(PREFIX, service.counts()[0], service.queue)
        yield _gauge(
            "behind_records",
            "Journal records known to exist and not applied yet. 0 while the router is up to date.",
            service.behind_records,
        )
        yield _gauge(
            "index_blocks",
            "Blocks in the prefix index. A block held by some workers without its ancestors counts twice.",
            len(index),
        )
        yield _gauge("ledger_requests", "Requests in the load ledger.", len(ledger))
        yield _gauge("journal_offset", "Next journal offset to apply.", projection.next_offset)
        yield _gauge(
            "journal_trouble",
            "1 while the router's state may be outdated: the consolidator is silent or cannot write. Alert on "
            "it. `/health` and `/v1/pool` have the reason.",
            bool(service.trouble),
        )
        yield _gauge(
            "reuse_sketch_bytes",
            "Memory for the history of prompts, at most 64 MiB. At the limit "
            "`poolgrid_router_achievable_tokens_total` is a lower bound.",
            service.tracker.sketch.used_bytes,
        )
        yield _gauge(
            "untrusted_workers",
            "Workers whose KV events are not trusted; their overlap comes from the router's own dispatches.",
            len(trust.untrusted),
        )
        yield _counter(
            "index_evicted_blocks",
            "Blocks evicted from the index to stay in its budget. If it grows, raise `index_budget_bytes`, or "
            "accept less reuse.",
            index.counters.evicted_blocks,
        )
        yield _counter(
            "index_contradictions",
            "Events that contradicted the index. More than 0 is a bug in an engine or in poolgrid: report it.",
            index.counters.contradictions,
        )
        yield _counter(
            "expired_reservations",
            "Reservations that no worker confirmed in time. Events are missing, or 30 s are shorter than the queues.",
            ledger.expired_reservations,
        )
        yield from self._of_workers()

    def _of_workers(self) -> Iterator[Metric]:
        projection = self._service.projection
        index, trust, unreachable = projection.index, projection.trust, self._service.unreachable
        yield _by_label(
            "overlap_disagreement_ratio",
            "Share of tokens about which index and worker disagree, over its last 64 requests.",
            ["worker"],
            [((str(key),), check.disagreement) for key, check in list(trust.checks.items())],
        )
        examiner = self._service.tracker.examiner
        yield _by_label(
            "reuse_verdict",
            "1 for the verdict of `poolgrid doctor` on each worker, by `cause`: `agrees`, `cold-workload`, `unknown`, "
            "or another name of the table of verdicts. Alert on faults.",
            ["worker", "cause"],
            [((str(key), examiner.verdict(key).cause.value), 1) for key in list(projection.fleet.workers)],
        )
        states: Counter[tuple[str, str, str]] = Counter()
        streams = Counter({(state.name.lower(),): 0 for state in OWN_STATES})
        further = Counter({(state.name.lower(),): 0 for state in StreamState})
        lags: list[tuple[tuple[str, ...], float]] = []
        blocks: list[tuple[tuple[str, ...], float]] = []
        # A copy: scrapes run in another thread than the loop that owns the fleet.
        for key, worker in list(projection.fleet.workers.items()):
            role = worker.card.role.name.lower()
            state = "draining" if worker.draining else "unreachable" if key in unreachable else "ready"
            for each in WORKER_STATES:
                states[worker.card.model, role, each] += each == state
            streams[(trust.stream(key)[0].name.lower(),)] += 1
            for source, stream in list(worker.streams.items()):
                if source != WORKER_SOURCE:
                    further[(stream.state.name.lower(),)] += 1
            if worker.last_event_ms:
                lags.append(((str(key),), max(0, worker.last_recorded_ms - worker.last_event_ms) / 1000))
            blocks.append(((str(key),), index.held_blocks(key)))
        yield _by_label(
            "role_workers",
            "Workers by model, role (`aggregated`, `prefill`, `decode`, `encode`) and state (`ready`, "
            "`draining`, `unreachable`). A role without ready workers cannot serve its leg.",
            ["model", "role", "state"],
            states.items(),
        )
        yield _by_label(
            "event_lag_seconds",
            "Age of a worker's last batch when the consolidator recorded it, by the clocks of two machines. "
            "Negative values show as 0.",
            ["worker"],
            lags,
        )
        yield _by_label(
            "worker_blocks",
            "Blocks that a worker holds according to the index. Compare with `poolgrid_worker_cached_blocks`.",
            ["worker"],
            blocks,
        )
        yield _by_label(
            "workers",
            "Workers that are `ready`, `draining` or `unreachable`.",
            ["state"],
            [
                ((state,), sum(count for (_, _, each), count in states.items() if each == state))
                for state in WORKER_STATES
            ],
        )
        yield _by_label(
            "streams",
            "Workers by the state of their own event stream: syncing, live, replaying, snapshotting or stale.",
            ["state"],
            streams.items(),
        )
        yield _by_label(
            "further_sources",
            "Further sources of workers by the state of their event stream: syncing, live, replaying, "
            "snapshotting, stale, absent or former.",
            ["state"],
            further.items(),
        )


def register_views(registry: CollectorRegistry, service: RouterService) -> None:
    """Have the state read at every scrape."""
    registry.register(StateCollector(service))


class DecisionRecordCollector(Collector):
    """Reads what became of the decisions that were to be recorded."""

    def __init__(self, recorder: DecisionRecorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """Yield what the recorder counted."""
        recorder = self._recorder
        yield _counter(
            "recorded_decisions",
            "Decisions written to the decision recording, with a `data_dir`.",
            recorder.counters.written_decisions,
        )
        yield _counter(
            "unrecorded_decisions",
            "Decisions missing from the recording. If it grows, the disk fails or is too slow.",
            recorder.counters.lost_decisions,
        )
        yield _gauge(
            "decision_journal_failing",
            "1 while decisions cannot be recorded. Routing continues; these decisions cannot be replayed.",
            bool(recorder.failing),
        )
        yield _gauge(
            "decision_journal_bytes",
            "Size of the decision recording, bounded by `journal_retention_bytes`.",
            recorder.segments.sizes()[1],
        )
