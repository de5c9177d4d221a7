"""How long the legs of a request take, as its router sees them: a histogram with a series for each leg.

Rules
    1. ``queue`` is all time without a worker: from the arrival to the first dispatch, and between two dispatches.
    2. ``encode`` is from the dispatch to the embeddings; ``prefill`` from the dispatch to the first token, the wait in
       the worker's own queue included; ``transfer`` from the dispatch of a decode leg to its first output, which proves
       that the KV has arrived; ``decode`` from there, or from the first token, to the last one.
    3. A leg that ends without what it was for (its worker was lost, the client left) is not counted: its time says how
       long a failure took.
    4. At each of these moments one number is counted, by ``time.perf_counter``, which costs least. Nothing is done
       per token.
"""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.process.instruments import Histogram
from poolgrid.serving.legs import WorkerReported
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import FinishReason

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
    """The histogram of one router."""

    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        legs = Histogram(
            name,
            "Time of the legs of a request: `queue` without a worker, `encode`, `prefill` up to the first token, "
            "`transfer` of KV to a decode worker, `decode` from there to the last token. The leg that grows is where "
            "to look when latencies do.",
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
        }
        """What the time up to a leg's first output counts for."""
        self._decode = legs.labels("decode")

    def sent(self, timer: LegTimer, dispatch_number: int, now_s: float) -> None:
        """Take note that a leg was sent to its worker."""
        _count(self._queue, timer, now_s)
        timer.dispatch_number = dispatch_number
        timer.generates = False

    def reported(self, timer: LegTimer, report: WorkerReported, now_s: float) -> None:
        """Take note of a leg's first output, and of its end."""
        dispatch, finish = report.dispatch, report.delta.finish_reason
        if dispatch.number != timer.dispatch_number or finish is FinishReason.ERROR:
            return
        if not timer.generates:
            if not (report.delta.token_ids or finish in HANDED_OVER or dispatch.stage is Stage.DECODE):
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
