"""Metrics of a consolidator, read from its counters when somebody asks: counting costs the stream nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from poolgrid.consolidator.pub_shell import WAITING, PubShell
from poolgrid.wire.identifiers import StreamState, WorkerKey

PREFIX = "poolgrid_consolidator_"

COUNTERS: dict[str, str] = {
    "batches": "Batches taken in from sources.",
    "events": "Events in those batches.",
    "duplicates": "Batches dropped because they had been taken in before. This is normal after a reconnect.",
    "gaps": "Holes found in the sequence of a source.",
    "resends": "Requests to a worker to send missing batches again.",
    "restatements": (
        "Caches restated by their worker because missing batches were gone. The outbox was too small for the outage."
    ),
    "refused": "Registrations and batches refused. The worker's log has the reason.",
    "unknown": "Messages of workers that must say Hello first.",
    "ignored_events": "Events in batches that only the consolidator may write.",
    "joined": "Worker ranks that joined.",
    "left": "Worker ranks that left, for any reason.",
    "lease_expiries": (
        "Worker ranks that left because they were silent for the lease: killed, cut off, or starved of CPU."
    ),
    "lost_requests": "Requests closed because their end was lost with a gap.",
    "stale": "Worker ranks whose blocks were not trusted any more, because a gap stayed open.",
    "undecodable_frames": "Frames that did not decode and were dropped.",
    "journal_append_errors": "Appends to the journal that failed and were tried again. Look at the disk.",
    "journal_snapshot_errors": "Journal snapshots that could not be written. Restarts get slower.",
    "journal_read_errors": "Requests for records that a damaged or unreadable segment left to a snapshot.",
    "journal_lost_segments": (
        "Journal segments that somebody deleted or cut while the consolidator ran. A snapshot stands in for them."
    ),
    "feed_records": "Records published on the live feed; none while nobody subscribes.",
    "feed_replays": "Replay requests of routers answered. If it grows steadily, routers cannot keep up with the feed.",
    "feed_snapshots": "Snapshot requests of routers answered.",
    "feed_answers_dropped": "Parts of answers dropped because the asking router did not take them.",
    "feed_subscribers_refused": "Connections to the feed that were ended because they named more than 16 topics.",
}
"""Counter (without prefix and ``_total``) and help."""

GAUGES: dict[str, str] = {
    "offset": "Offset of the next journal record.",
    "oldest_offset": "Offset of the oldest journal record still kept.",
    "workers": "Worker ranks in the pool.",
    "blocks": "Blocks held in the pool, by tier.",
    "refused_blocks": (
        "Blocks not taken in because a worker is beyond 4,194,304. Such a worker is known in part only."
    ),
    "event_lag_seconds": "Age of the newest batch of a worker rank when it was taken in.",
    "journal_bytes": "Size of the journal's segments.",
    "journal_segments": "Number of journal segments.",
    "stalled": "1 while the journal cannot be written and nothing is acknowledged. Alert on it.",
    "journal_slow_write_seconds": (
        "How long a write of the journal takes while that is more than half a second, else 0. Nothing "
        "fails meanwhile, but routers learn what workers say that much later."
    ),
}
"""Gauge (without prefix) and help."""

SOURCE_GAUGES: dict[str, str] = {
    "source_degraded": (
        "1 while a PUB source's blocks are known in part only (a gap was not filled) or not at all. Alert "
        "on it: reuse is less than it could be."
    ),
    "source_blocks": "Blocks that a PUB source says its worker holds, each tier counted.",
}

SOURCE_STATE = (
    "1 for the state that the stream of a PUB source is in. `waiting` means that its worker has not "
    "joined. The source is the worker, or `w0:kvbm` for a further source of worker `w0`."
)

SOURCE_STATES = (*(state.name.lower() for state in StreamState), WAITING)

SOURCE_COUNTERS: dict[str, str] = {
    "source_gaps": "Holes in the sequence of a PUB source.",
    "source_replays": "Replay requests to a PUB source.",
    "source_losses": (
        "Times what a PUB source had said was dropped because batches were lost for good. Enlarge the "
        "engine's replay buffer."
    ),
    "source_restarts": "New lives of the engine of a PUB source.",
    "source_undecodable": "Messages of a PUB source that did not decode.",
    "source_ignored_blocks": "Blocks of a PUB source that could not be placed (unknown parent, partial, other medium).",
}


class ConsolidatorCollector(Collector):
    """Collects the metrics of one service."""

    def __init__(
        self,
        measure: Callable[[], tuple[dict[str, int], dict[str, float]]],
        lags_ms: Callable[[], Mapping[WorkerKey, int]],
        blocks_by_tier: Callable[[], Mapping[str, int]],
        sources: Callable[[], Sequence[PubShell]],
    ) -> None:
        """``measure`` returns counters and gauges by name."""
        self._measure = measure
        self._lags_ms = lags_ms
        self._blocks_by_tier = blocks_by_tier
        self._sources = sources

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: names are fixed, and collecting needs a started service."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        counters, gauges = self._measure()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=counters[name])
        for name, text in GAUGES.items():
            if name == "event_lag_seconds":
                family = GaugeMetricFamily(PREFIX + name, text, labels=["worker"])
                for key, lag_ms in sorted(self._lags_ms().items()):
                    family.add_metric([str(key)], lag_ms / 1000)
                yield family
            elif name == "blocks":
                family = GaugeMetricFamily(PREFIX + name, text, labels=["tier"])
                for tier, count in self._blocks_by_tier().items():
                    family.add_metric([tier], count)
                yield family
            else:
                yield GaugeMetricFamily(PREFIX + name, text, value=gauges[name])
        sources = self._sources()
        for name, text in SOURCE_GAUGES.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=["source"])
            for source in sources:
                value = source.degraded if name == "source_degraded" else source.blocks
                family.add_metric([source.name], float(value))
            yield family
        states = GaugeMetricFamily(PREFIX + "source_state", SOURCE_STATE, labels=["source", "state"])
        for source in sources:
            for state in SOURCE_STATES:
                states.add_metric([source.name, state], float(source.shown_state == state))
        yield states
        for name, text in SOURCE_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["source"])
            for source in sources:
                counter.add_metric([source.name], source.counts[name])
            yield counter
