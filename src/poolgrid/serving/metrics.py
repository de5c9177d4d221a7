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
            f"Time that requests waited for room, by cause: {wait_causes} It is part of TTFT.",
            ["cause"],
            buckets=QUEUE_SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_evictions = Counter(
            f"{prefix}_queue_evictions_total",
            "Waiting requests that gave way in a full queue to a higher priority, or to a tenant with less in "
            "it. They count as refused too.",
            registry=registry,
        )
        self.refused = Counter(
            f"{prefix}_refused_requests_total",
            "Requests not served, by reason code. `busy` is answered 429, `no_worker` and `not_ready` 503, "
            "`duplicate_request` 409.",
            ["code"],
            registry=registry,
        )
        self.poison_requests = Counter(
            f"{prefix}_poison_requests_total",
            "Requests ended with `workers_lost`, because two workers were lost one after another with them, "
            "before their first token. If there are any, look in the log for the request, its tenant, and what "
            "the workers died of.",
            registry=registry,
        )
        self.stream_faults = Counter(
            f"{prefix}_stream_faults_total",
            "Worker output that was dropped, by kind. `position`: a hole or overlap in a stream. "
            "`unknown_request`: output after the end of a request, of which a few after cancels are normal. "
            "`exception`: output whose handling failed, which is a bug; its request moves. "
            "`undecodable`: a frame that does not decode.",
            ["kind"],
            registry=registry,
        )
