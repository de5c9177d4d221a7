"""The global router: its grids as heat maps, its pools, spill, breakers and fallbacks."""

from __future__ import annotations

from lab.dashboards.model import Board, Panel, Query, Row, Threshold, quantile, rate, share
from lab.dashboards.selectors import GLOBAL_POOLS, NAMESPACE, NAMESPACES

POOL = f'{NAMESPACE}, pool=~"$pool"'
GLOBAL = "a global router"


def _grid(title: str, stages: str, value: str, means: str, do: str, thresholds: tuple[Threshold, ...]) -> Panel:
    return Panel(
        title,
        "percentunit",
        (Query(value.replace("STAGES", f'{NAMESPACE}, stage=~"{stages}"')),),
        means,
        do,
        "pool-grid",
        kind="table",
        width=12,
        height=9,
        matrix=("row", "column"),
        thresholds=thresholds,
        decimals=0,
        needs=f"{GLOBAL} whose document has such a grid",
    )


SHARE = (
    "sum by (row, column) (increase(poolgrid_global_router_cell_requests_total{STAGES}[$__range])) / "
    "scalar(sum(increase(poolgrid_global_router_cell_requests_total{STAGES}[$__range])) > 0)"
)
MET = (
    'sum by (row, column) (increase(poolgrid_global_router_cell_judgements_total{STAGES, outcome="met"}[$__range])) / '
    "(sum by (row, column) (increase(poolgrid_global_router_cell_judgements_total{STAGES}[$__range])) > 0)"
)
SHARE_COLORS = (Threshold(0.02, "light-blue"), Threshold(0.1, "blue"), Threshold(0.3, "dark-blue"))
MET_COLORS = (Threshold(0, "red"), Threshold(0.9, "orange"), Threshold(0.99, "green"))
FIRST, SECOND = "prefill|aggregated", "decode"

POOLS_BOARD = Board(
    "poolgrid-pools",
    "poolgrid: Pools",
    "Requests and met targets by cell of the grid, and the state of the pools.",
    (NAMESPACES, GLOBAL_POOLS),
    (
        Row(
            "The grids",
            (
                _grid(
                    "Share of requests: prefill or aggregated",
                    FIRST,
                    SHARE,
                    "Requests by cell in the shown time: rows and columns are the last two axes of the grid.",
                    "If nearly all are in one cell, the ranges do not fit the traffic: build a grid from profiles "
                    "with `poolgrid config build`.",
                    SHARE_COLORS,
                ),
                _grid(
                    "Targets met: prefill or aggregated",
                    FIRST,
                    MET,
                    "Share of the judged requests of a cell that met its target.",
                    "A red cell: its pool is too slow or too small. Assign a faster pool, or enable the closed "
                    "loop (`adapt`).",
                    MET_COLORS,
                ),
                _grid(
                    "Share of requests: decode",
                    SECOND,
                    SHARE,
                    "The same for the decode grid: rows are context lengths, columns ITL targets.",
                    "As above.",
                    SHARE_COLORS,
                ),
                _grid(
                    "Targets met: decode",
                    SECOND,
                    MET,
                    "The same for ITL targets.",
                    "A red cell: batches are too large for its target. Add workers, or assign a faster pool.",
                    MET_COLORS,
                ),
            ),
        ),
        Row(
            "Pools",
            (
                Panel(
                    "State of each pool",
                    "short",
                    (
                        Query(
                            f"max by (pool, state) (poolgrid_global_router_pools{{{POOL}}}) == 1", "{{pool}}: {{state}}"
                        ),
                    ),
                    "State of each pool, one line per state.",
                    "`down`: its router is unreachable. `breaker-open`: its workers failed requests. `saturated`: "
                    "it is full.",
                    "pool-unreachable",
                    no_value="no global router is scraped",
                    needs=GLOBAL,
                ),
                Panel(
                    "Targets met by pool and role",
                    "percentunit",
                    (
                        Query(
                            share(
                                rate(
                                    f'poolgrid_global_router_target_judgements_total{{{POOL}, outcome="met"}}',
                                    ["pool", "role", "target"],
                                ),
                                rate(
                                    f"poolgrid_global_router_target_judgements_total{{{POOL}}}",
                                    ["pool", "role", "target"],
                                ),
                            ),
                            "{{pool}} {{role}} {{target}}",
                        ),
                    ),
                    "Requests that met the target for which their pool was chosen.",
                    "One pool: it is too slow or too small. All: the clients' targets are too tight.",
                    "pool-grid",
                    maximum=1,
                    needs=GLOBAL,
                ),
                Panel(
                    "Dispatches in flight",
                    "short",
                    (Query(f"sum by (pool) (poolgrid_global_router_in_flight{{{POOL}}})", "{{pool}}"),),
                    "Requests on each pool's workers.",
                    "A pool with far more than its share is the bottleneck.",
                    "pool-grid",
                    stacked=True,
                    no_value="no global router is scraped",
                    needs=GLOBAL,
                ),
                Panel(
                    "Dispatches by how the pool was found",
                    "reqps",
                    (
                        Query(
                            rate(f"poolgrid_global_router_dispatches_total{{{POOL}}}", ["pool", "how"]),
                            "{{pool}}: {{how}}",
                        ),
                    ),
                    "`grid` is normal; `spill` is the closed loop, `fallback` an unusable pool, `retry` a lost worker.",
                    "Much `fallback`: see Skipped pools. Much `spill`: a cell misses its target.",
                    "pool-grid",
                    stacked=True,
                    needs=GLOBAL,
                ),
                Panel(
                    "Skipped pools",
                    "reqps",
                    (
                        Query(
                            rate(f"poolgrid_global_router_passed_over_total{{{POOL}}}", ["pool", "state"]),
                            "{{pool}}: {{state}}",
                        ),
                    ),
                    "Times that a pool could not be used.",
                    "`saturated`: add workers there. `down`, `breaker-open`: check its router and workers.",
                    "pool-unreachable",
                    no_value="none was passed over",
                    needs=GLOBAL,
                ),
                Panel(
                    "Breakers and closed loop",
                    "short",
                    (
                        Query(
                            f"sum by (pool, state) (increase(poolgrid_global_router_breaker_steps_total{{{POOL}}}"
                            "[$__rate_interval]))",
                            "breaker {{pool}}: {{state}}",
                        ),
                        Query(
                            f"sum by (pool) (increase(poolgrid_global_router_loop_steps_total{{{POOL}}}"
                            "[$__rate_interval]))",
                            "spill {{pool}}",
                        ),
                    ),
                    "Steps of circuit breakers and of the closed loop in each interval.",
                    "A breaker that reopens repeatedly: its pool answers probes and fails requests.",
                    "breaker-open",
                    no_value="no breaker and no loop moved",
                    needs=GLOBAL,
                ),
                Panel(
                    "Time to select a worker",
                    "s",
                    tuple(
                        Query(
                            f"{quantile(q, f'poolgrid_global_router_select_seconds_bucket{{{NAMESPACE}}}')} >= 0",
                            f"p{q * 100:g}",
                        )
                        for q in (0.5, 0.99)
                    ),
                    "Round trip to a pool's router: the TTFT that the global router adds.",
                    "Milliseconds on one host, a network round trip otherwise. If it grows, a pool's router lacks CPU.",
                    "pool-unreachable",
                    needs=GLOBAL,
                ),
                Panel(
                    "Waiting for a pool",
                    "short",
                    (
                        Query(f"sum(poolgrid_global_router_queued_requests{{{NAMESPACE}}})", "requests"),
                        Query(rate(f"poolgrid_global_router_queue_evictions_total{{{NAMESPACE}}}"), "gave way/s"),
                    ),
                    "Requests for which no pool has capacity.",
                    "Add workers, or refuse low priorities sooner (`max_queue_requests`).",
                    "queue-filling",
                    no_value="no global router is scraped",
                    needs=GLOBAL,
                ),
                Panel(
                    "Document in force",
                    "short",
                    (
                        Query(f"max(poolgrid_global_router_revision{{{NAMESPACE}}})", "newest revision"),
                        Query(f"min(poolgrid_global_router_revision{{{NAMESPACE}}})", "oldest revision"),
                    ),
                    "Newest and oldest revision of the pool-grid document among global routers.",
                    "If they differ, one has not reloaded; its log has the reason.",
                    "pool-grid",
                    kind="stat",
                    no_value="no global router is scraped",
                    needs=GLOBAL,
                ),
            ),
        ),
    ),
)
