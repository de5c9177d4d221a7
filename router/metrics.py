"""What the router counts, by the names that ``docs/metrics.md`` explains.

Counters move where things happen; gauges that mirror state are read at scrape time, so nothing is computed for nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from poolgrid.process.instruments import Counter, Histogram
from poolgrid.router.core.decision import DecisionLog
from poolgrid.router.core.projection import Projection
from poolgrid.router.decision_journal.recorder import DecisionRecorder
from poolgrid.serving.leg_times import LegTimes
from poolgrid.serving.reuse_sketch import ReuseSketch
from poolgrid.serving.tenant_paths import TenantPaths
from poolgrid.wire.identifiers import StreamState, WorkerKey
from poolgrid.wire.streams import OWN_STATES, WORKER_SOURCE

DECISION_SECONDS_BUCKETS = (10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)
QUEUE_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
TTFT_ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
"""Shares of a time: the step that is under way alone is some tenths of a short one."""
ERROR_BUCKETS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Shares of a prompt: fine where an index is nearly right, which is where it should be."""


class RouterMetrics:
    """The router's own series; requests and latencies are counted by the front end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "poolgrid_router_decisions_total",
            'Routing decisions, migrations included. If many have `reason="tie"`, nothing tells the workers '
            "apart: the caches are cold or the prompts short.",
            ["policy", "reason"],
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "poolgrid_router_decision_seconds",
            "Time of one decision, from the start of hashing the prompt to the send. It grows with ISL and the "
            "number of workers. Look here first when TTFT grows on idle workers.",
            buckets=DECISION_SECONDS_BUCKETS,
            registry=registry,
        )
        self.hash_seconds = Histogram(
            "poolgrid_router_hash_seconds",
            "Part of a decision spent on hashing the prompt.",
            buckets=DECISION_SECONDS_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "poolgrid_router_prompt_tokens_total",
            "Prompt tokens routed, each request once, those of requests that a global router has a worker reserved for "
            "too. The found, the realised and the achievable overlap are shares of these.",
            registry=registry,
        )
        self.overlap_found_tokens = Counter(
            "poolgrid_router_overlap_found_tokens_total",
            "Prompt tokens that the index said the chosen worker holds.",
            registry=registry,
        )
        self.overlap_realised_tokens = Counter(
            "poolgrid_router_overlap_realised_tokens_total",
            "Prompt tokens that the worker then really reused. If they are well below the overlap found, "
            "blocks are evicted before requests start (too little cache, long queues) or events are late.",
            registry=registry,
        )
        self.achievable_tokens = Counter(
            "poolgrid_router_achievable_tokens_total",
            "Prompt tokens that an infinite cache shared by all workers would have reused: leading blocks that this "
            "router was asked for before, as far as `reuse_sketch_bytes` remembers. What lies between this and the "
            "overlap found was evicted, or lies on other workers than the chosen ones.",
            registry=registry,
        )
        self.prediction_error_tokens = Counter(
            "poolgrid_router_prediction_error_tokens_total",
            "Prompt tokens by which workers reused `less` or `more` than the index said of them when they were chosen. "
            "Less: blocks went between choice and start, or events are late. More: events are missing.",
            ["direction"],
            registry=registry,
        )
        self.reused_less = self.prediction_error_tokens.labels("less")
        self.reused_more = self.prediction_error_tokens.labels("more")
        self.prediction_error = Histogram(
            "poolgrid_router_prediction_error_ratio",
            "How far the overlap that a worker was chosen for was from what it then reused, either way, as a share of "
            "the prompt. Once for each prompt that a worker computed.",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self.ttft_error = Histogram(
            "poolgrid_router_ttft_prediction_error_ratio",
            "How far the time to the first token that a worker was chosen for was from what it then took, either way, "
            "as a share of that. Only with a policy that predicts times; near 1 and above, step times are unlike "
            "those of the card, or workers change faster than is learned.",
            buckets=TTFT_ERROR_BUCKETS,
            registry=registry,
        )
        self.ttft_error_seconds = Counter(
            "poolgrid_router_ttft_prediction_error_seconds_total",
            "Time by which first tokens came `later` or `sooner` than the policy expected when it chose.",
            ["direction"],
            registry=registry,
        )
        self.ttft_later = self.ttft_error_seconds.labels("later")
        self.ttft_sooner = self.ttft_error_seconds.labels("sooner")
        self.leg_times = LegTimes("poolgrid_router_leg_seconds", registry)
        self.queue_seconds = Histogram(
            "poolgrid_router_queue_seconds",
            "Time requests waited for a worker with room, by cause: `workers_full`, `unreachable` (who could serve it "
            "cannot be reached), `behind_others`, `held` (with the policy predicted, for the worker that is best for a "
            "request: all new ones count, most with next to nothing), or, of requests whose clients are being served "
            "already, `worker_lost` and `next_leg`. Otherwise only those that had to wait count.",
            ["cause"],
            buckets=QUEUE_SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_evictions = Counter(
            "poolgrid_router_queue_evictions_total",
            "Waiting requests that gave way in a full queue to a higher priority, or to a tenant with less in "
            "it. They count as refused too.",
            registry=registry,
        )
        self.refused = Counter(
            "poolgrid_router_refused_requests_total",
            "Requests not served, by reason code. `busy` is answered 429, `no_worker` and `not_ready` 503, "
            "`duplicate_request` 409.",
            ["code"],
            registry=registry,
        )
        self.legs = Counter(
            "poolgrid_router_legs_total",
            "Dispatches by what the worker was asked to do (`whole`, `encode`, `prefill`, `decode`) and why "
            "(`aggregated`, `local_prefill`, `no_prefill_worker`, `disaggregated`, `media`). If many have "
            "`no_prefill_worker`, prefill workers are missing.",
            ["stage", "reason"],
            registry=registry,
        )
        self.migrations = Counter(
            "poolgrid_router_migrations_total",
            "Requests moved to another worker `before_output` or `amid_output`. Each costs a prefill. A steady "
            "rate means that workers die or refuse.",
            ["cause"],
            registry=registry,
        )
        self.poison_requests = Counter(
            "poolgrid_router_poison_requests_total",
            "Requests ended with `workers_lost`, because two workers were lost one after another with them, "
            "before their first token. If there are any, look in the log for the request, its tenant, and what "
            "the workers died of.",
            registry=registry,
        )
        self.crowded = Counter(
            "poolgrid_router_crowded_choices_total",
            "Choices that a worker refused because other routers had sent it more than this one knew. A worker "
            "was then chosen anew. With one router there are none.",
            registry=registry,
        )
        self.stream_faults = Counter(
            "poolgrid_router_stream_faults_total",
            "Worker output that was dropped, by kind. `position`: a hole or overlap in a stream. "
            "`unknown_request`: output after the end of a request, of which a few after cancels are normal. "
            "`exception`: output whose handling failed, which is a bug; its request moves. "
            "`undecodable`: a frame that does not decode.",
            ["kind"],
            registry=registry,
        )
        self.select_asks = Counter(
            "poolgrid_router_select_asks_total",
            "Messages of global routers on the select plane, by kind (select, probe, release, status) and outcome.",
            ["kind", "outcome"],
            registry=registry,
        )
        self.records_applied = Counter(
            "poolgrid_router_records_applied_total",
            "Journal records applied. If it is flat while workers work, the feed is broken.",
            registry=registry,
        )
        self.decisions_behind = Counter(
            "poolgrid_router_decisions_behind_total",
            "Choices made while the pool's journal was known to hold more than was applied. Their reason code "
            "ends in `-behind`.",
            registry=registry,
        )
        self.snapshots_loaded = Counter(
            "poolgrid_router_snapshots_loaded_total",
            "Snapshots that replaced the router's state. There is one at the start. More mean that the router "
            "fell too far behind or the consolidator restarted.",
            registry=registry,
        )


class Viewed(Protocol):
    """What the state metrics are read from."""

    @property
    def projection(self) -> Projection:
        """Return the router's state."""
        ...

    @property
    def decisions(self) -> DecisionLog:
        """Return the last decisions."""
        ...

    @property
    def paths(self) -> TenantPaths:
        """Return the cache of prompts' hashes."""
        ...

    @property
    def sketch(self) -> ReuseSketch:
        """Return what is remembered of prompts."""
        ...

    @property
    def trouble(self) -> str:
        """Return why the state may not be current."""
        ...

    @property
    def behind_records(self) -> int:
        """Return how many records the journal is known to hold beyond those applied."""
        ...

    def is_reachable(self, key: WorkerKey) -> bool:
        """Tell whether the request plane to a worker is up."""
        ...

    def counts(self) -> tuple[int, int]:
        """Return active and waiting requests."""
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


class StateCollector(Collector):
    """Reads the router's state when somebody scrapes."""

    def __init__(self, viewed: Viewed) -> None:
        self._viewed = viewed

    def collect(self) -> Iterator[Metric]:
        """Yield what the state is now."""
        projection = self._viewed.projection
        index = projection.index
        active, waiting = self._viewed.counts()
        gauges: tuple[tuple[str, str, float], ...] = (
            ("active_requests", "Requests on workers now.", active),
            (
                "queued_requests",
                "Requests waiting for a worker with room. At `queue_limit` the next one is refused.",
                waiting,
            ),
            (
                "queued_prompt_tokens",
                "Prompt tokens of the waiting requests. At `queue_prompt_tokens` a request is refused.",
                self._viewed.queued_prompt_tokens,
            ),
            (
                "queue_fill_ratio",
                "How full the queue is: the larger share of `queue_limit` and of `queue_prompt_tokens` that is used. "
                "At 1 the next request is refused.",
                self._viewed.queue_fill,
            ),
            (
                "backlog_seconds",
                "Time that the waiting requests will take, at the rate at which requests finished lately. Above some "
                "seconds for longer than a burst the pool needs more workers: scale by it.",
                self._viewed.backlog_s,
            ),
            (
                "behind_records",
                "Records that the pool's journal is known to hold and that are not applied yet. There may be "
                "more. It is 0 while the router is level with the journal.",
                self._viewed.behind_records,
            ),
            (
                "index_blocks",
                "Blocks in the prefix index. One that some workers hold without its ancestors counts twice.",
                len(index),
            ),
            (
                "index_bytes",
                "Bytes that the prefix index uses. Compare with `index_budget_bytes`.",
                index.size_bytes(),
            ),
            ("ledger_requests", "Requests in the load ledger.", len(projection.ledger)),
            (
                "ledger_bytes",
                "Bytes that the requests in the load ledger use, at most `ledger_budget_bytes`.",
                projection.ledger.size_bytes(),
            ),
            (
                "decision_log_bytes",
                "Bytes that the decisions kept for `/v1/decisions` use, at most `decision_log_bytes`.",
                self._viewed.decisions.size_bytes,
            ),
            ("journal_offset", "Next journal offset to apply.", projection.next_offset),
            (
                "journal_trouble",
                "1 while what the router knows may not be current, because the consolidator is silent or "
                "cannot write. Alert on it. `/health` and `/v1/pool` say why.",
                int(bool(self._viewed.trouble)),
            ),
            (
                "path_cache_bytes",
                "Bytes that the sequence hashes of prompt parts use, at most `path_cache_bytes`.",
                self._viewed.paths.used_bytes,
            ),
            (
                "reuse_sketch_bytes",
                "Bytes that the memory of seen prompts uses, at most `reuse_sketch_bytes`. At its bound it forgets, "
                "and `poolgrid_router_achievable_tokens_total` is a lower bound.",
                self._viewed.sketch.used_bytes,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"poolgrid_router_{name}", text, value=value)
        ledger, trust, retention = projection.ledger, projection.trust, projection.observer("retention")
        for name, text, count in (
            (
                "index_evicted_blocks",
                (
                    "Blocks cut from the index to stay in its budget. If it grows, raise `index_budget_bytes`, or "
                    "accept that the oldest prefixes are forgotten."
                ),
                index.counters.evicted_blocks,
            ),
            (
                "index_contradictions",
                "Events that contradicted the index. More than 0 is a bug in an engine or in poolgrid: report it.",
                index.counters.contradictions,
            ),
            (
                "path_cache_reused_blocks",
                "Prompt blocks whose hashes were not computed again. If it is flat under conversations, raise "
                "`path_cache_bytes`.",
                self._viewed.paths.reused_blocks,
            ),
            (
                "expired_reservations",
                (
                    "Predictions that no worker confirmed in time. Events are missing, or `reservation_ttl_ms` is "
                    "shorter than the queues."
                ),
                ledger.expired_reservations,
            ),
            (
                "ledger_refused_entries",
                "Requests that do not count as load, because the ledger was at its budget.",
                ledger.refused_entries,
            ),
            (
                "suspect_verdicts",
                "Times a worker reused so much more or less than its events said that they are not believed.",
                trust.verdicts,
            ),
            (
                "retention_gained_tokens",
                "Reused prompt tokens that the worker's cache would have lost, had it evicted what nobody used for the "
                "longest time; of up to 16 workers. Only with `retention`, and workers that take it.",
                0 if retention is None else retention.gained_tokens,
            ),
            (
                "retention_lost_tokens",
                "Prompt tokens that were not reused, and would have been, had the worker's cache evicted what nobody "
                "used for the longest time. If it grows faster than `poolgrid_router_retention_gained_tokens_total`, "
                "what is learned does harm: switch `retention` off.",
                0 if retention is None else retention.lost_tokens,
            ),
        ):
            yield CounterMetricFamily(f"poolgrid_router_{name}", text, value=count)
        states = {"ready": 0, "draining": 0, "unreachable": 0}
        yield GaugeMetricFamily(
            "poolgrid_router_untrusted_workers",
            "Workers whose overlap is predicted from the router's own choices, because their stream is not believed.",
            value=len(trust.untrusted),
        )
        disagreement = GaugeMetricFamily(
            "poolgrid_router_overlap_disagreement_ratio",
            "Share of tokens that the index and the worker disagree about, over its last 64 requests.",
            labels=["worker"],
        )
        for key, check in list(trust.checks.items()):
            disagreement.add_metric([str(key)], check.disagreement)
        yield disagreement
        streams = dict.fromkeys((state.name.lower() for state in OWN_STATES), 0)
        further = dict.fromkeys((state.name.lower() for state in StreamState), 0)
        lag = GaugeMetricFamily(
            "poolgrid_router_event_lag_seconds",
            "Age of a worker's last batch when the consolidator recorded it. The wall clocks of two machines "
            "are compared, and negative values show as 0.",
            labels=["worker"],
        )
        held = GaugeMetricFamily(
            "poolgrid_router_worker_blocks",
            "Blocks that the index says a worker holds. Compare with `poolgrid_worker_cached_blocks` of that worker.",
            labels=["worker"],
        )
        by_role: dict[tuple[str, str, str], int] = {}
        # A copy: scrapes run beside the loop that owns the fleet.
        for key, worker in list(projection.fleet.workers.items()):
            reachable = self._viewed.is_reachable(key)
            role = worker.card.role.name.lower()
            state = "draining" if worker.draining else "ready" if reachable else "unreachable"
            for each in states:
                by_role.setdefault((worker.card.model, role, each), 0)
            by_role[worker.card.model, role, state] += 1
            streams[trust.stream(key)[0].name.lower()] += 1
            for source, stream in list(worker.streams.items()):
                if source != WORKER_SOURCE:
                    further[stream.state.name.lower()] += 1
            states[state] += 1
            if worker.last_event_ms:
                lag.add_metric([str(key)], max(0, worker.last_recorded_ms - worker.last_event_ms) / 1000)
            held.add_metric([str(key)], index.held_blocks(key))
        workers = GaugeMetricFamily(
            "poolgrid_router_workers",
            "Workers that are `ready`, `draining` or `unreachable`.",
            labels=["state"],
        )
        for state, count in states.items():
            workers.add_metric([state], count)
        role_workers = GaugeMetricFamily(
            "poolgrid_router_role_workers",
            "Workers of each model and role (`aggregated`, `prefill`, `decode`, `encode`) that are `ready`, `draining` "
            "or `unreachable`. A role that had workers and has no ready one cannot serve its leg.",
            labels=["model", "role", "state"],
        )
        for labels, count in by_role.items():
            role_workers.add_metric(labels, count)
        yield role_workers
        stream_states = GaugeMetricFamily(
            "poolgrid_router_streams",
            "Workers by the state of their own event stream: syncing, live, replaying, snapshotting or stale.",
            labels=["state"],
        )
        for state, count in streams.items():
            stream_states.add_metric([state], count)
        further_states = GaugeMetricFamily(
            "poolgrid_router_further_sources",
            "Further sources of workers by the state of their event stream: syncing, live, replaying, "
            "snapshotting, stale, absent or former.",
            labels=["state"],
        )
        for state, count in further.items():
            further_states.add_metric([state], count)
        yield from (lag, held, workers, stream_states, further_states)


def register_views(registry: CollectorRegistry, viewed: Viewed) -> None:
    """Have the state read at every scrape."""
    registry.register(StateCollector(viewed))


class DecisionRecordCollector(Collector):
    """Reads what became of the decisions that were to be recorded."""

    def __init__(self, recorder: DecisionRecorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """Yield what the recorder counted."""
        recorder = self._recorder
        counters = recorder.counters
        for name, text, count in (
            (
                "recorded_decisions",
                "Decisions written to the decision journal, which exists only with a `data_dir`.",
                counters.written_decisions,
            ),
            (
                "unrecorded_decisions",
                "Decisions that the decision journal lacks, which it notes. If it grows, the disk fails or is "
                "too slow.",
                counters.lost_decisions,
            ),
            ("decision_journal_errors", "Writes to the decision journal that failed.", counters.failed_writes),
        ):
            yield CounterMetricFamily(f"poolgrid_router_{name}", text, value=count)
        gauges: tuple[tuple[str, str, float], ...] = (
            (
                "decision_journal_failing",
                "1 while the decision journal cannot be written. Routing goes on, but decisions of that time "
                "cannot be replayed.",
                bool(recorder.failing),
            ),
            (
                "decision_journal_bytes",
                "Size of the decision journal, which `retention_bytes` bounds.",
                recorder.segments.sizes()[1],
            ),
            (
                "decision_journal_pending",
                "Inputs of decisions that wait to be written. At 20,000 they are dropped.",
                recorder.pending,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"poolgrid_router_{name}", text, value=float(value))
