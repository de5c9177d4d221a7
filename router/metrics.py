"""What the router counts, by the names that ``docs/metrics.md`` explains.

Counters move where things happen; gauges that mirror state are read at scrape time (``state_metrics``).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from poolgrid.process.instruments import Counter, Histogram
from poolgrid.serving.metrics import ServingMetrics

DECISION_SECONDS_BUCKETS = (10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)
TTFT_ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
"""Shares of a time: the step that is under way alone is some tenths of a short one."""
ERROR_BUCKETS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
"""Shares of a prompt: fine where an index is nearly right, which is where it should be."""


WAIT_CAUSES = (
    "`workers_full`, `unreachable` (the workers that could serve it cannot be reached), `behind_others`, `held` (with "
    "the policy predicted, for the worker that is best for a request: all new ones count, most with next to nothing), "
    "or, of requests whose clients are being served already, `worker_lost` and `next_leg`. Otherwise only those that "
    "had to wait count."
)


class RouterMetrics(ServingMetrics):
    """The router's own series; requests and latencies are counted by the front end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__("poolgrid_router", WAIT_CAUSES, registry)
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
            "router was asked for before, as far as 64 MiB remember. What lies between this and the "
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
        self.crowded = Counter(
            "poolgrid_router_crowded_choices_total",
            "Choices that a worker refused because other routers had sent it more than this one knew. A worker "
            "was then chosen anew. With one router there are none.",
            registry=registry,
        )
        self.decisions_behind = Counter(
            "poolgrid_router_decisions_behind_total",
            "Choices made while the pool's journal was known to hold more than was applied. Their reason code "
            "ends in `-behind`.",
            registry=registry,
        )
