"""What both routers count, each under its own prefix; ``docs/metrics.md`` lists them.

Counters move where things happen; gauges that mirror state are read at scrape time.
"""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.kernel.requests.legs import WorkerReported
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import FinishReason
from poolgrid.kernel.wire.tasks import TASK_ROLES
from poolgrid.server.process.instruments import Counter, Histogram

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
            "output of a request that is not known here, or was cancelled over 30 s ago. `exception`: a bug; its "
            "request moves. `undecodable`: an undecodable frame.",
            ["kind"],
            registry=registry,
        )


LEG_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0,
)  # fmt: skip
"""Half a millisecond (a decision, a transfer within a host) to ten minutes (a long answer)."""


HANDED_OVER = (FinishReason.ENCODED, FinishReason.PREFILLED)
"""The ends of legs that leave something for the leg after them."""


class LegTimer(msgspec.Struct):
    """Where a request stands between two moments that are counted."""

    since_s: float
    """When its current leg, or its wait, began."""
    dispatch_number: int = -1
    """The dispatch that is measured; below 0 while there is none."""
    generates: bool = False
    """Whether the dispatch has had its first output."""
    waits_since_ms: float | None = None
    """Since when the request has found no room; ``None`` once a worker has begun with it."""


class LegTimes:
    """How long the legs of a request take, as its router sees them: a histogram with a series for each leg.

    Rules
        1. ``queue`` is all time without a worker: from the arrival to the first dispatch, and between two dispatches.
        2. ``encode`` is from the dispatch to the embeddings; ``prefill`` from the dispatch to the first token, the
           wait in the worker's own queue included; ``transfer`` from the dispatch of a decode leg to its first output,
           which proves that the KV has arrived; ``decode`` from there, or from the first token, to the last one.
        3. A leg that ends without what it was for (its worker was lost, the client left) is not counted: its time shows
           how long a failure took.
        4. At each of these moments one number is counted, by ``time.perf_counter``, which costs least. Nothing is done
           per token.
    """

    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        legs = Histogram(
            name,
            "Time of the legs of a request: `queue`, `encode`, `prefill` up to the first token, `transfer` of "
            "KV, `decode` to the last token, `task` up to its result. Check which leg grows.",
            ["leg"],
            buckets=LEG_BUCKETS_S,
            registry=registry,
        )
        self._queue = legs.labels("queue")
        self._first = {
            Stage.ENCODE: legs.labels("encode"),
            Stage.PREFILL: legs.labels("prefill"),
            Stage.WHOLE: legs.labels("prefill"),
            Stage.DECODE: legs.labels("transfer"),
            **dict.fromkeys(TASK_ROLES, legs.labels("task")),
        }
        """What the time up to a leg's first output counts for."""
        self._decode = legs.labels("decode")

    def sent(self, timer: LegTimer, dispatch_number: int, now_s: float) -> None:
        _count(self._queue, timer, now_s)
        timer.dispatch_number = dispatch_number
        timer.generates = False

    def reported(self, timer: LegTimer, report: WorkerReported, now_s: float) -> None:
        """Take note of a leg's first output, and of its end."""
        dispatch, finish = report.dispatch, report.delta.finish_reason
        if dispatch.number != timer.dispatch_number or finish is FinishReason.ERROR:
            return
        if not timer.generates:
            delta = report.delta
            if not (delta.token_ids or finish in HANDED_OVER or dispatch.stage is Stage.DECODE or delta.result):
                return  # it reports that it has begun
            leg = self._first[dispatch.stage]
            timer.generates = True
        elif finish is not None and finish is not FinishReason.PREFILLED:
            leg = self._decode
        else:
            return
        _count(leg, timer, now_s)

    def withdrawn(self, timer: LegTimer, now_s: float) -> None:
        """Take note that the request is to go elsewhere: from now on it waits."""
        timer.since_s = now_s
        timer.dispatch_number = -1


def _count(leg: Histogram, timer: LegTimer, now_s: float) -> None:
    leg.observe(now_s - timer.since_s)
    timer.since_s = now_s
