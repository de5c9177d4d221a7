"""What both routers count, each under its own prefix; ``docs/metrics.md`` lists them.

Counters move where things happen; gauges that mirror state are read at scrape time.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from poolgrid.process.instruments import Counter, Histogram
from poolgrid.serving.leg_times import LegTimes

QUEUE_SECONDS_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class ServingMetrics:
    """The series of a router's requests on workers; requests and latencies are counted by the front end."""

    def __init__(self, prefix: str, wait_causes: str, registry: CollectorRegistry) -> None:
        """``wait_causes`` describes the values of the label ``cause`` of the waiting times."""
        self.leg_times = LegTimes(f"{prefix}_leg_seconds", registry)
        self.queue_seconds = Histogram(
            f"{prefix}_queue_seconds",
            f"Time that requests waited, by cause: {wait_causes} Part of TTFT.",
            ["cause"],
            buckets=QUEUE_SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_evictions = Counter(
            f"{prefix}_queue_evictions_total",
            "Waiting requests evicted from a full queue by a higher priority or a tenant with fewer requests. "
            "Counted as refused too.",
            registry=registry,
        )
        self.refused = Counter(
            f"{prefix}_refused_requests_total",
            "Requests refused, by reason code: `busy` is 429, `no_worker` and `not_ready` 503, "
            "`duplicate_request` 409.",
            ["code"],
            registry=registry,
        )
        self.poison_requests = Counter(
            f"{prefix}_poison_requests_total",
            "Requests ended with `workers_lost`: two workers were lost with them before their first token. "
            "Find the request and its tenant in the log.",
            registry=registry,
        )
        self.stream_faults = Counter(
            f"{prefix}_stream_faults_total",
            "Worker output dropped, by kind. `position`: a gap or overlap in a stream. `unknown_request`: "
            "output after the end of a request; a few after cancellations are normal. `exception`: a bug; its "
            "request moves. `undecodable`: an undecodable frame.",
            ["kind"],
            registry=registry,
        )
