"""Metrics of a consolidator, read from its counters at a scrape: counting costs the stream nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from poolgrid.kernel.wire.identifiers import StreamState, WorkerKey
from poolgrid.server.consolidator.pub_shell import WAITING, PubShell

PREFIX = "poolgrid_consolidator_"

COUNTERS: dict[str, str] = {
    "batches": "Event batches accepted from sources.",
    "events": "Events in accepted batches.",
    "duplicates": "Batches dropped as duplicates. Normal after a reconnect.",
    "gaps": "Gaps in the sequence of a source.",
    "resends": "Requests to a worker to send missing batches again.",
    "restatements": (
        "Full resyncs of workers that no longer had the missing batches. The outbox was too small for the outage."
    ),
    "refused": "Registrations and batches refused. The worker's log has the reason.",
    "unknown": "Messages of workers that must register again first.",
    "ignored_events": "Events in batches that only the consolidator may write.",
    "joined": "Worker ranks that joined.",
    "left": "Worker ranks that left, for any reason.",
    "lease_expiries": ("Worker ranks removed after their lease: killed, disconnected, or without CPU."),
    "lost_requests": "Requests closed because their end was lost in a gap.",
    "stale": "Worker ranks whose blocks became untrusted because a gap stayed open.",
    "muted": "Worker ranks whose events were dropped for a while: they took more than a worker's share of the loop.",
    "undecodable_frames": "Frames that did not decode and were dropped.",
    "journal_append_errors": "Failed appends to the journal, which were retried. Check the disk.",
    "journal_snapshot_errors": "Journal snapshots that could not be written. Restarts take longer.",
    "journal_read_errors": "Requests for records in a damaged or unreadable segment, answered by a snapshot.",
    "journal_lost_segments": (
        "Journal segments deleted or cut from outside while the consolidator ran. A snapshot replaces them."
    ),
    "feed_records": "Records published on the feed; none without subscribers.",
    "feed_replays": "Answered replay requests of routers. If it grows steadily, routers cannot keep up.",
    "feed_snapshots": "Snapshot requests of routers answered.",
    "feed_answers_dropped": "Parts of answers dropped because the router did not read them.",
    "feed_subscribers_refused": "Connections to the feed closed because they named more than 16 topics.",
}
"""Counter (without prefix and ``_total``) and help."""

GAUGES: dict[str, str] = {
    "offset": "Offset of the next journal record.",
    "oldest_offset": "Offset of the oldest journal record still kept.",
    "workers": "Worker ranks in the pool.",
    "blocks": "Blocks held in the pool, by tier.",
    "refused_blocks": ("Blocks ignored because a worker exceeds 4,194,304. Such a worker is known only in part."),
    "event_lag_seconds": "Age of the newest batch of a worker rank on arrival.",
    "journal_bytes": "Size of the journal's segments.",
    "journal_segments": "Number of journal segments.",
    "stalled": "1 while the journal cannot be written and nothing is acknowledged. Alert on it.",
    "journal_slow_write_seconds": (
        "Duration of a journal write above 0.5 s, else 0. Routers learn of events that much later."
    ),
}
"""Gauge (without prefix) and help."""

SOURCE_GAUGES: dict[str, str] = {
    "source_degraded": (
        "1 while a PUB source's blocks are known only in part or not at all. Alert on it: cache hit rate falls."
    ),
    "source_blocks": "Blocks that a PUB source reports for its worker, each tier counted.",
}

SOURCE_STATE = (
    "1 for the stream state of a PUB source. `waiting`: its worker has not joined. The source is the "
    "worker, or `w0:kvbm` for a further source of worker `w0`."
)

SOURCE_STATES = (*(state.name.lower() for state in StreamState), WAITING)

SOURCE_COUNTERS: dict[str, str] = {
    "source_gaps": "Gaps in the sequence of a PUB source.",
    "source_replays": "Replay requests to a PUB source.",
    "source_losses": (
        "Times that blocks of a PUB source were dropped because batches were lost. Enlarge the engine's replay buffer."
    ),
    "source_restarts": "Restarts of the engine of a PUB source.",
    "source_undecodable": "Undecodable messages of a PUB source.",
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
