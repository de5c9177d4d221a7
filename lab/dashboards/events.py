"""Events and the journal: is what routers know current and whole?"""

from __future__ import annotations

from lab.dashboards.model import Board, Panel, Query, Row, Threshold, rate
from lab.dashboards.selectors import NAMESPACE, NAMESPACES, POOL, POOLS

NO_CONSOLIDATOR = "no consolidator is scraped"


def _rates(*names: tuple[str, str]) -> tuple[Query, ...]:
    return tuple(
        Query(rate(f"poolgrid_consolidator_{name}_total{{{POOL}}}", ["pool"]), f"{word} {{{{pool}}}}")
        for name, word in names
    )


def _gauge(name: str, legend: str = "{{pool}}") -> Query:
    return Query(f"max by (pool) (poolgrid_consolidator_{name}{{{POOL}}})", legend)


EVENTS = Board(
    "poolgrid-events",
    "poolgrid: Events and journal",
    "Whether the workers' events arrive, whole and in time, are written down, and reach the routers.",
    (NAMESPACES, POOLS),
    (
        Row(
            "Streams",
            (
                Panel(
                    "Events taken in",
                    "short",
                    _rates(("events", "events/s"), ("batches", "batches/s")),
                    "What workers say of their caches and requests.",
                    "0 while workers work: the ingest port cannot be reached, or the consolidator has stopped.",
                    "stream-broken",
                    no_value=NO_CONSOLIDATOR,
                ),
                Panel(
                    "Streams by state",
                    "short",
                    (
                        Query(
                            f"max by (pool, state) (poolgrid_router_streams{{{POOL}}}) > 0",
                            "{{pool}}: {{state}}",
                        ),
                    ),
                    "Workers by the state of their event stream, as routers see it. All should be `live`.",
                    "`replaying` and `snapshotting` pass by themselves; `stale` is not believed: see the logs.",
                    "stream-broken",
                    no_value="no worker is known",
                ),
                Panel(
                    "Age of events when taken in",
                    "s",
                    (Query(f"poolgrid_consolidator_event_lag_seconds{{{POOL}}}", "{{worker}}"),),
                    "By worker, between its clock and the consolidator's.",
                    "A constant age is a clock; a growing one is a consolidator that cannot keep up.",
                    "clock-skew",
                    no_value="no worker is known",
                ),
                Panel(
                    "Gaps and what mended them",
                    "short",
                    _rates(
                        ("gaps", "gaps/s"),
                        ("resends", "resends/s"),
                        ("restatements", "restatements/s"),
                        ("stale", "not believed/s"),
                    ),
                    "Holes in the sequences of workers, and how they were closed.",
                    "Single ones after restarts are normal. A steady rate: frames are lost or dropped at a high-water "
                    "mark.",
                    "stream-broken",
                    no_value=NO_CONSOLIDATOR,
                ),
                Panel(
                    "Workers that came and went",
                    "short",
                    _rates(("joined", "joined/s"), ("left", "left/s"), ("lease_expiries", "fell silent/s")),
                    "Worker ranks that joined, left, and left because they were silent.",
                    "Silent ones: killed, cut off, or starved of CPU.",
                    "no-worker-of-a-role",
                    no_value=NO_CONSOLIDATOR,
                ),
                Panel(
                    "Outboxes of workers",
                    "bytes",
                    (
                        Query(
                            f"sum by (instance) (poolgrid_worker_outbox_bytes{{{POOL}}}) * on (instance) group_left "
                            f"(worker) poolgrid_worker_info{{{POOL}}}",
                            "{{worker}}",
                        ),
                    ),
                    "Events that the consolidator has not acknowledged.",
                    "If they grow, it is away or cannot write. At 32 MiB a worker restates its whole cache.",
                    "journal-trouble",
                    no_value="no worker is scraped",
                ),
            ),
        ),
        Row(
            "Journal",
            (
                Panel(
                    "Journal stalled",
                    "short",
                    (_gauge("stalled"),),
                    "1 while the journal cannot be written: nothing is acknowledged, and routers learn nothing new.",
                    "Look at the disk of the data directory, and at the consolidator's log.",
                    "journal-trouble",
                    kind="stat",
                    no_value=NO_CONSOLIDATOR,
                    mappings=(("0", "writes", "green"), ("1", "stalled", "red")),
                ),
                Panel(
                    "Active consolidators",
                    "short",
                    (Query(f"sum by (pool) (poolgrid_consolidator_active{{{POOL}}})", "{{pool}}"),),
                    "Of a pool on NATS: how many of its consolidators believe to write the journal.",
                    "One. None for longer than the lease and two seconds: look at NATS. Two, for a moment: one of them "
                    "has not noticed yet, and cannot store anything.",
                    "no-consolidator-active",
                    kind="stat",
                    no_value="no pool is on NATS",
                    mappings=(("0", "none", "red"), ("1", "one", "green")),
                ),
                Panel(
                    "Slow writes",
                    "s",
                    (_gauge("journal_slow_write_seconds"),),
                    "How long a write takes while that is more than half a second, else 0.",
                    "A slow disk makes news of the workers late by as much.",
                    "journal-trouble",
                    no_value=NO_CONSOLIDATOR,
                ),
                Panel(
                    "Errors of the journal",
                    "short",
                    _rates(
                        ("journal_append_errors", "appends/s"),
                        ("journal_snapshot_errors", "snapshots/s"),
                        ("journal_read_errors", "reads/s"),
                        ("journal_lost_segments", "lost segments/s"),
                    ),
                    "Writes and reads that failed.",
                    "Any: the disk is full, read-only, or somebody else works in the data directory.",
                    "journal-trouble",
                    no_value=NO_CONSOLIDATOR,
                ),
                Panel(
                    "Size of journal and decision journal",
                    "bytes",
                    (
                        _gauge("journal_bytes", "journal {{pool}}"),
                        Query(
                            f"max by (pool) (poolgrid_router_decision_journal_bytes{{{POOL}}})",
                            "decisions {{pool}}",
                        ),
                    ),
                    "What `retention_bytes` bounds, each.",
                    "Compare with the free space of the disk.",
                    "journal-trouble",
                    no_value=NO_CONSOLIDATOR,
                ),
                Panel(
                    "Offsets: journal and routers",
                    "short",
                    (
                        Query(
                            f"max by (pool) (poolgrid_consolidator_offset{{{POOL}}}) - on (pool) group_right "
                            f"max by (pool, instance) (poolgrid_router_journal_offset{{{POOL}}})",
                            "{{pool}} {{instance}} behind",
                        ),
                    ),
                    "Records by which each router is behind its consolidator, as of the last scrapes.",
                    "Some hundred are the time between two scrapes. A growing number: the feed is broken.",
                    "journal-trouble",
                    no_value=NO_CONSOLIDATOR,
                ),
                Panel(
                    "Replays and snapshots",
                    "short",
                    _rates(
                        ("feed_replays", "replays/s"),
                        ("feed_snapshots", "snapshots/s"),
                        ("feed_answers_dropped", "answers dropped/s"),
                    ),
                    "What routers asked for that were behind or new.",
                    "A steady rate of replays: routers cannot keep up with the feed.",
                    "journal-trouble",
                    no_value=NO_CONSOLIDATOR,
                ),
            ),
        ),
        Row(
            "Hosts",
            (
                Panel(
                    "Clocks against Prometheus'",
                    "s",
                    (
                        Query(
                            f"poolgrid_wall_clock_seconds{{{NAMESPACE}}} - timestamp(poolgrid_wall_clock_seconds"
                            f"{{{NAMESPACE}}})",
                            "{{component}} {{instance}}",
                        ),
                    ),
                    "By how much the clock of each process's host differs from that of Prometheus.",
                    "More than a tenth of a second: NTP has stopped there. Ages of events are wrong by as much.",
                    "clock-skew",
                    no_value="nothing is scraped",
                ),
                Panel(
                    "Targets that cannot be scraped",
                    "short",
                    (
                        Query(
                            f'count(up{{{NAMESPACE}, job="poolgrid"}} == 0) or vector(0)',
                            "not scraped",
                        ),
                    ),
                    "Processes that Prometheus knows and that do not answer.",
                    "They are gone, hang, or their port is closed to Prometheus.",
                    "target-down",
                    kind="stat",
                    thresholds=(Threshold(1, "red"),),
                ),
                Panel(
                    "Certificates: time left",
                    "s",
                    (
                        Query(
                            f"poolgrid_http_certificate_expiry_timestamp_seconds{{{NAMESPACE}}} - time()",
                            "{{component}} {{instance}} {{file}}",
                        ),
                    ),
                    "Until the certificate in use ends.",
                    "Replace the files; processes read them again by themselves.",
                    "certificate-expiring",
                    needs="TLS",
                    no_value="no TLS",
                    thresholds=(Threshold(0, "red"), Threshold(604800, "orange"), Threshold(1814400, "green")),
                    kind="stat",
                ),
            ),
        ),
    ),
)
