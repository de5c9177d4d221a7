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
    "Arrival, storage and distribution of worker events.",
    (NAMESPACES, POOLS),
    (
        Row(
            "Streams",
            (
                Panel(
                    "Ingested events",
                    "short",
                    _rates(("events", "events/s"), ("batches", "batches/s")),
                    "Events of caches and requests.",
                    "0 while workers are busy: the ingest port is unreachable, or the consolidator has stopped.",
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
                    "Workers by the state of their event stream. All should be `live`.",
                    "`replaying` and `snapshotting` end by themselves; `stale` is untrusted: see the logs.",
                    "stream-broken",
                    no_value="no worker is known",
                ),
                Panel(
                    "Age of events on arrival",
                    "s",
                    (Query(f"poolgrid_consolidator_event_lag_seconds{{{POOL}}}", "{{worker}}"),),
                    "By worker, from its clock to the consolidator's.",
                    "A constant age is a clock error; a growing one is an overloaded consolidator.",
                    "clock-skew",
                    no_value="no worker is known",
                ),
                Panel(
                    "Gaps and their repair",
                    "short",
                    _rates(
                        ("gaps", "gaps/s"),
                        ("resends", "resends/s"),
                        ("restatements", "restatements/s"),
                        ("stale", "not believed/s"),
                    ),
                    "Gaps in the sequences of workers, and how they were closed.",
                    "Single gaps after restarts are normal. A steady rate: frames are lost or dropped at a "
                    "high-water mark.",
                    "stream-broken",
                    no_value=NO_CONSOLIDATOR,
                ),
                Panel(
                    "Joined and left workers",
                    "short",
                    _rates(("joined", "joined/s"), ("left", "left/s"), ("lease_expiries", "fell silent/s")),
                    "Worker ranks that joined, left, and were removed for silence.",
                    "Silent ones were killed, disconnected, or without CPU.",
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
                    "Unacknowledged events.",
                    "If they grow, the consolidator is away or cannot write. At 32 MiB a worker resyncs its whole "
                    "cache.",
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
                    "1 while the journal cannot be written: events are not acknowledged and not published.",
                    "Check the disk of the data directory, and the consolidator's log.",
                    "journal-trouble",
                    kind="stat",
                    no_value=NO_CONSOLIDATOR,
                    mappings=(("0", "writes", "green"), ("1", "stalled", "red")),
                ),
                Panel(
                    "Active consolidators",
                    "short",
                    (Query(f"sum by (pool) (poolgrid_consolidator_active{{{POOL}}})", "{{pool}}"),),
                    "Consolidators of a pool on NATS that claim to write the journal.",
                    "One is normal. None for longer than the lease and two seconds: check NATS. Two for a moment: "
                    "one has not noticed its replacement and cannot store anything.",
                    "no-consolidator-active",
                    kind="stat",
                    no_value="no pool is on NATS",
                    mappings=(("0", "none", "red"), ("1", "one", "green")),
                ),
                Panel(
                    "Slow writes",
                    "s",
                    (_gauge("journal_slow_write_seconds"),),
                    "Duration of a journal write above 0.5 s, else 0.",
                    "A slow disk delays events by that much.",
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
                    "Failed writes and reads.",
                    "Any: the disk is full or read-only, or another process changes the data directory.",
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
                    "Each is bounded by `journal_retention_bytes`.",
                    "Compare with the free disk space.",
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
                    "Records by which each router is behind its consolidator, at the last scrapes.",
                    "A few hundred are the time between scrapes. A growing number: the feed is broken.",
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
                    "Requests of routers that are behind or new.",
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
                    "Difference of each host's clock to Prometheus'.",
                    "Above 0.1 s: NTP has stopped there. Ages of events are wrong by that much.",
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
                    "Targets that do not answer Prometheus.",
                    "They are gone, hang, or their port is blocked.",
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
                    "Time until the certificate expires.",
                    "Replace the files; processes reload them.",
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
