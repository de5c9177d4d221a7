"""How long the legs of a request take, as its router sees them: a histogram with a series for each leg.

Rules
    1. ``queue`` is all time without a worker: from the arrival to the first dispatch, and between two dispatches.
    2. ``encode`` is from the dispatch to the embeddings; ``prefill`` from the dispatch to the first token, the wait in
       the worker's own queue included; ``transfer`` from the dispatch of a decode leg to its first output, which proves
       that the KV has arrived; ``decode`` from there, or from the first token, to the last one.
    3. A leg that ends without what it was for (its worker was lost, the client left) is not counted: its time says how
       long a failure took.
    4. At each of these moments one number is counted. Nothing is done per token.
"""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from poolgrid.dispatch.request_machine import Heard
from poolgrid.runtime.instruments import Histogram
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import FinishReason

LEG_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0,
)  # fmt: skip
"""Half a millisecond (a decision, a transfer within a host) to ten minutes (a long answer)."""

_DECODE = Stage.DECODE
_ENCODED, _PREFILLED, _ERROR = FinishReason.ENCODED, FinishReason.PREFILLED, FinishReason.ERROR


class LegWatch(msgspec.Struct):
    """Where a request stands between two moments that are counted."""

    since_ms: float
    """When its current leg, or its wait, began."""
    dispatch_number: int = -1
    """The dispatch that is measured; below 0 while there is none."""
    generates: bool = False
    """Whether the dispatch has had its first output."""


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
        self._encode = legs.labels("encode")
        self._prefill = legs.labels("prefill")
        self._transfer = legs.labels("transfer")
        self._decode = legs.labels("decode")

    def sent(self, watch: LegWatch, dispatch_number: int, now_ms: float) -> None:
        """Take note that a leg was sent to its worker."""
        self._count(self._queue, watch, now_ms)
        watch.dispatch_number = dispatch_number
        watch.generates = False

    def heard(self, watch: LegWatch, heard: Heard, now_ms: float) -> None:
        """Take note of a leg's first output, and of its end."""
        dispatch, finish = heard.dispatch, heard.delta.finish_reason
        if dispatch.number != watch.dispatch_number or finish is _ERROR:
            return
        if not watch.generates:
            if finish is _ENCODED:
                self._count(self._encode, watch, now_ms)
            elif dispatch.stage is _DECODE:
                self._count(self._transfer, watch, now_ms)
            elif heard.delta.token_ids or finish is _PREFILLED:
                self._count(self._prefill, watch, now_ms)
            else:
                return  # it says that it has begun
            watch.generates = True
        elif finish is not None and finish is not _PREFILLED:
            self._count(self._decode, watch, now_ms)

    def withdrawn(self, watch: LegWatch, now_ms: float) -> None:
        """Take note that the request is to go elsewhere: from now on it waits."""
        watch.since_ms = now_ms
        watch.dispatch_number = -1

    def _count(self, leg: Histogram, watch: LegWatch, now_ms: float) -> None:
        leg.observe((now_ms - watch.since_ms) / 1000)
        watch.since_ms = now_ms
