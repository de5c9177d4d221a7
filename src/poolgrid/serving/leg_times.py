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

from typing import Final, final

from prometheus_client import CollectorRegistry

from poolgrid.process.instruments import Histogram
from poolgrid.serving.effects import Heard
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import FinishReason

LEG_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0,
)  # fmt: skip
"""Half a millisecond (a decision, a transfer within a host) to ten minutes (a long answer)."""

_DECODE: Final = Stage.DECODE
_ENCODED: Final = FinishReason.ENCODED
_PREFILLED: Final = FinishReason.PREFILLED
_ERROR: Final = FinishReason.ERROR


@final
class LegWatch:
    """Where a request stands between two moments that are counted."""

    __slots__ = ("dispatch_number", "generates", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        """When its current leg, or its wait, began."""
        self.dispatch_number = -1
        """The dispatch that is measured; below 0 while there is none."""
        self.generates = False
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

    def sent(self, watch: LegWatch, dispatch_number: int, now_s: float) -> None:
        """Take note that a leg was sent to its worker."""
        _count(self._queue, watch, now_s)
        watch.dispatch_number = dispatch_number
        watch.generates = False

    def heard(self, watch: LegWatch, heard: Heard, now_s: float) -> None:
        """Take note of a leg's first output, and of its end."""
        dispatch, finish = heard.dispatch, heard.delta.finish_reason
        if dispatch.number != watch.dispatch_number or finish is _ERROR:
            return
        if not watch.generates:
            if finish is _ENCODED:
                leg = self._encode
            elif dispatch.stage is _DECODE:
                leg = self._transfer
            elif heard.delta.token_ids or finish is _PREFILLED:
                leg = self._prefill
            else:
                return  # it says that it has begun
            watch.generates = True
        elif finish is not None and finish is not _PREFILLED:
            leg = self._decode
        else:
            return
        _count(leg, watch, now_s)

    def withdrawn(self, watch: LegWatch, now_s: float) -> None:
        """Take note that the request is to go elsewhere: from now on it waits."""
        watch.since_s = now_s
        watch.dispatch_number = -1


def _count(leg: Histogram, watch: LegWatch, now_s: float) -> None:
    leg.observe(now_s - watch.since_s)
    watch.since_s = now_s
