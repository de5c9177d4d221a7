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
    "What the global router does: which cells requests fall into, whether their targets are met, and which pools "
    "cannot take them.",
    (NAMESPACES, GLOBAL_POOLS),
    (
        Row(
            "The grids",
            (
                _grid(
                    "Share of requests: prefill or aggregated",
                    FIRST,
                    SHARE,
                    "Where requests fell, over the time that is shown: rows and columns are the last two axes of the "
                    "grid.",
                    "If nearly all fall into one cell, the axes' ranges do not fit the traffic: "
                    "`poolgrid config build` makes a grid from profiles.",
                    SHARE_COLORS,
                ),
                _grid(
                    "Targets met: prefill or aggregated",
                    FIRST,
                    MET,
                    "Share of the judged requests of a cell that met its target.",
                    "A red cell: its pool is too slow for it, or too small. Give the cell to a faster pool, or let the "
                    "closed loop (`adapt`) spill.",
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
                    "A red cell: larger batches than its target allows. More workers, or a faster pool.",
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
                    "The state that each pool is in; each state is a line of its own.",
                    "`down`: its router cannot be reached. `breaker-open`: its workers failed requests. `saturated`: "
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
                    "One pool alone: it is too slow or too small. All: the targets that clients ask for are too tight.",
                    "pool-grid",
                    maximum=1,
                    needs=GLOBAL,
                ),
                Panel(
                    "Dispatches under way",
                    "short",
                    (Query(f"sum by (pool) (poolgrid_global_router_in_flight{{{POOL}}})", "{{pool}}"),),
                    "Requests on each pool's workers.",
                    "A pool that holds far more than its share for its size is the bottleneck.",
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
                    "`grid` is the rule; `spill` is the closed loop, `fallback` a pool that could not be used, `retry` "
                    "a worker that was lost.",
                    "Much `fallback`: see Pools passed over. Much `spill`: a cell misses its target.",
                    "pool-grid",
                    stacked=True,
                    needs=GLOBAL,
                ),
                Panel(
                    "Pools passed over",
                    "reqps",
                    (
                        Query(
                            rate(f"poolgrid_global_router_passed_over_total{{{POOL}}}", ["pool", "state"]),
                            "{{pool}}: {{state}}",
                        ),
                    ),
                    "Times a pool was wanted and could not be used.",
                    "`saturated`: more workers there. `down`, `breaker-open`: its router and workers.",
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
                    "A breaker that opens again and again: its pool answers probes and fails requests.",
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
                    "One question to a pool's router, there and back: what the global router adds to TTFT.",
                    "Milliseconds within a host, a round trip beyond. If it grows, a pool's router is short of CPU.",
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
                    "Requests for which no pool has room.",
                    "More workers; or let lower priorities be refused sooner (`queue_limit`).",
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
                    "Revision of the pool-grid document, the newest and the oldest among global routers.",
                    "If they differ, one has not reloaded: its log says why.",
                    "pool-grid",
                    kind="stat",
                    no_value="no global router is scraped",
                    needs=GLOBAL,
                ),
            ),
        ),
    ),
)
