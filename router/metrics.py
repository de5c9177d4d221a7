"""What the router counts, by the names that ``docs/metrics.md`` explains.

Counters move where things happen; gauges that mirror state are read at scrape time (``state_metrics``).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from poolgrid.server.diagnosis.evidence import UncachedSplit
from poolgrid.server.process.instruments import Counter, Histogram
from poolgrid.server.serving.metrics import ServingMetrics

DECISION_SECONDS_BUCKETS = (10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)
TTFT_ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
"""Shares of a time: the step already begun alone is some tenths of a short one."""
ERROR_BUCKETS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Shares of a prompt: fine where an index is nearly right, which is where it should be."""


WAIT_CAUSES = (
    "`workers_full`, `unreachable`, `behind_others`, `working_set` (no room for its session), "
    "`held` (policy kv: all new requests count), or, after the "
    "first output, `worker_lost` and `next_leg`. Requests without a wait do not count, except for `held`."
)


class RouterMetrics(ServingMetrics):
    """The router's own series; requests and latencies are counted by the front end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("poolgrid_router", WAIT_CAUSES, registry)
        self.decisions = Counter(
            "poolgrid_router_decisions_total",
            'Routing decisions, migrations included. Many with `reason="tie"` mean cold caches or short prompts.',
            ["policy", "reason"],
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "poolgrid_router_decision_seconds",
            "Time of one decision, from hashing the prompt to the send. It grows with ISL and the number of "
            "workers. Check it first when TTFT grows on idle workers.",
            buckets=DECISION_SECONDS_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "poolgrid_router_prompt_tokens_total",
            "Prompt tokens routed, each request once, including requests of a global router. The base of "
            "found, realised and achievable overlap.",
            registry=registry,
        )
        self.overlap_found_tokens = Counter(
            "poolgrid_router_overlap_found_tokens_total",
            "Prompt tokens that the chosen worker holds according to the index.",
            registry=registry,
        )
        self.overlap_realised_tokens = Counter(
            "poolgrid_router_overlap_realised_tokens_total",
            "Prompt tokens that the worker reused. Well below the overlap found, blocks are evicted before "
            "requests start (small caches, long queues), or events are late.",
            registry=registry,
        )
        self.achievable_tokens = Counter(
            "poolgrid_router_achievable_tokens_total",
            "Prompt tokens that one infinite cache shared by all workers would have reused, as far as 64 MiB "
            "of history reach. The difference to the overlap found was evicted, or is on other workers.",
            registry=registry,
        )
        uncached = Counter(
            "poolgrid_router_uncached_tokens_total",
            "Prompt tokens computed, by cause: `cold` (never sent before), `routing` (another worker held them), "
            "`eviction` (no worker holds them any more), `mismatch` (promised by the index and not reused).",
            ["cause"],
            registry=registry,
        )
        self._uncached = [uncached.labels(cause) for cause in UncachedSplit.__struct_fields__]
        self.cold_tokens = self._uncached[0]
        self.prediction_error_tokens = Counter(
            "poolgrid_router_prediction_error_tokens_total",
            "Prompt tokens by which workers reused `less` or `more` than the index predicted. Less: evictions "
            "before the start, or late events. More: missing events.",
            ["direction"],
            registry=registry,
        )
        self.reused_less = self.prediction_error_tokens.labels("less")
        self.reused_more = self.prediction_error_tokens.labels("more")
        self.prediction_error = Histogram(
            "poolgrid_router_prediction_error_ratio",
            "Difference between predicted and real reuse, as a share of the prompt, once per computed prompt.",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self.ttft_error = Histogram(
            "poolgrid_router_ttft_prediction_error_ratio",
            "Difference between predicted and real TTFT, as a share of the real one, with a policy that "
            "predicts times. Near 1 and above, the step times on the cards are wrong, or workers change too "
            "fast.",
            buckets=TTFT_ERROR_BUCKETS,
            registry=registry,
        )
        self.legs = Counter(
            "poolgrid_router_legs_total",
            "Dispatches by stage (`whole`, `encode`, `prefill`, `decode`) and reason (`aggregated`, "
            "`local_prefill`, `overflow`, `no_prefill_worker`, `one_server`, `disaggregated`, `media`). Many with "
            "`overflow` or `no_prefill_worker` mean too few prefill workers.",
            ["stage", "reason"],
            registry=registry,
        )
        self.migrations = Counter(
            "poolgrid_router_migrations_total",
            "Requests moved to another worker `before_output` or `amid_output`. Each costs a prefill. A steady "
            "rate means dying or refusing workers.",
            ["cause"],
            registry=registry,
        )
        self.crowded = Counter(
            "poolgrid_router_crowded_choices_total",
            "Choices refused by a worker that had more committed work than this router knew. Another choice "
            "followed. Zero with one router.",
            registry=registry,
        )
        self.decisions_behind = Counter(
            "poolgrid_router_decisions_behind_total",
            "Decisions made with unapplied journal records. Their reason code ends in `-behind`.",
            registry=registry,
        )

    def count_uncached(self, split: UncachedSplit) -> None:
        """Count why the tokens of a prompt were computed."""
        cold, routing, eviction, mismatch = self._uncached
        cold.value += split.cold
        routing.value += split.routing
        eviction.value += split.eviction
        mismatch.value += split.mismatch

    def uncached(self) -> dict[str, int]:
        """Return the tokens computed so far by cause."""
        names = UncachedSplit.__struct_fields__
        return {name: int(counter.value) for name, counter in zip(names, self._uncached, strict=True)}
