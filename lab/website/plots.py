"""The plots of ``docs/results.md``, drawn anew by ``make plots``: from the simulator, and from tables on the pages.

What the simulator finds is run here, on the trace that is in the repository; it is the same each time. What was
measured on some machine at some hour is read from the page that tells of it, so that a plot never says anything else
than its table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poolgrid.router.core.candidates import Candidates, RoutingRequest
from poolgrid.router.core.cost import CostWeights
from poolgrid.router.core.policy import Choice
from poolgrid.router.policies.predicted.engine_times import Engines
from poolgrid.router.policies.predicted.policy import Predicted
from poolgrid.router.policy_loading import make_policy
from poolgrid.tools.bench.trace import read_trace
from poolgrid.tools.simulation.conditions import SpeedChange, WorkerSpeeds
from poolgrid.tools.simulation.pool import RouterFleet, RunResult, SimulatedPool
from poolgrid.tools.simulation.report import policy_report
from poolgrid.tools.simulation.workload import build_workload
from poolgrid.workers.core.timing import PolynomialTiming
from poolgrid.workers.engines.simulated.core.engine import SimulatedLimits

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLOTS = DOCS / "plots"
TRACE = ROOT / "tests" / "data" / "conversation_1000.jsonl"

POLICIES = ("kv", "least-loaded", "round-robin")
INK = {"kv": "#1b6ca8", "least-loaded": "#999999", "round-robin": "#c8553d"}
WORKERS = 8
SPEEDS = (1, 2, 4, 6, 8, 10, 12)
CACHE_TOKENS = (131_072, 262_144, 524_288, 1_048_576, 2_097_152)
"""KV tokens that fit on one worker."""

BLOCK_SIZE = 64


def simulated(policy: str, *, speed: float = 1.0, cache_tokens: int | None = None) -> dict[str, Any]:
    """Return the figures of one policy on the trace, as ``poolgrid simulate`` finds them."""
    workload = build_workload(read_trace(TRACE, None), speed, BLOCK_SIZE)
    count = len(workload.requests)
    roomy = workload.total_tokens // BLOCK_SIZE + 2 * count + 1
    limits = SimulatedLimits(
        block_size=BLOCK_SIZE,
        total_kv_blocks=roomy if cache_tokens is None else cache_tokens // BLOCK_SIZE,
        max_sequence_length=workload.longest + 1,
        max_waiting_requests=count,
    )
    pool = SimulatedPool(
        workload, make_policy(policy, CostWeights(), 0.0), WORKERS, limits, PolynomialTiming(), routers=RouterFleet()
    )
    return policy_report(pool.run(), WORKERS)


class Watched(Predicted):
    """The policy, and what it believed of each worker's pace at each choice."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[float]]] = []
        """By request, in order of arrival."""

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose as the policy does."""
        assert isinstance(candidates.engines, Engines)
        self.seen.append((request.request_id, candidates.engines.paces.tolist()))
        return super().choose(request, candidates)


UNLIKE = WorkerSpeeds((1.0,) * 7 + (1 / 3,), (SpeedChange(0, 100_000.0, 200_000.0, 0.25),))
"""The last worker is three times slower, and the first has a quarter of its speed for a hundred seconds."""


def unlike_run() -> tuple[Watched, RunResult, Mapping[str, float]]:
    """Return the policy ``predicted`` after the trace on unlike workers, what came of it, and when requests came."""
    workload = build_workload(read_trace(TRACE, None), 1.0, BLOCK_SIZE)
    count = len(workload.requests)
    limits = SimulatedLimits(
        block_size=BLOCK_SIZE,
        total_kv_blocks=workload.total_tokens // BLOCK_SIZE + 2 * count + 1,
        max_sequence_length=workload.longest + 1,
        max_waiting_requests=count,
    )
    policy = Watched()
    pool = SimulatedPool(workload, policy, WORKERS, limits, PolynomialTiming(), speeds=UNLIKE)
    return policy, pool.run(), {each.request_id: each.arrival_ms for each in workload.requests}


def draw_paces(axes: Any) -> None:
    """What is believed of three workers' paces over time, and what they are."""
    policy, _, arrival_ms = unlike_run()
    seconds = [arrival_ms[request_id] / 1000 for request_id, _ in policy.seen]
    for number, label, ink in (
        (0, "slows down to a quarter", INK["round-robin"]),
        (7, "three times slower", INK["kv"]),
        (3, "as its card says", INK["least-loaded"]),
    ):
        axes.plot(seconds, [paces[number] for _, paces in policy.seen], color=ink, label=label)
        moments = sorted({0.0, 99.999, 100.0, 199.999, 200.0, seconds[-1]})
        truth = [1 / UNLIKE.at(number, 1000 * moment) for moment in moments]
        axes.plot(moments, truth, color=ink, linestyle=":", linewidth=1)
    axes.set(xlabel="time, s", ylabel="times slower than the card says", ylim=(0, 6))
    axes.legend(frameon=False)


def draw_expected(axes: Any) -> None:
    """What was expected of each first token, and when it came."""
    _, result, _ = unlike_run()
    for chosen, label, ink in ((True, "worker 0", INK["round-robin"]), (False, "the others", INK["kv"])):
        points = [(expected, real) for _, worker, expected, real in result.predicted if (worker == 0) is chosen]
        axes.plot(*zip(*points, strict=True), marker=".", markersize=3, linestyle="", color=ink, label=label)
    axes.axline((10, 10), (10_000, 10_000), color="#333333", linewidth=0.8)
    axes.set(xlabel="TTFT expected, ms", ylabel="TTFT, ms", xscale="log", yscale="log")
    axes.legend(frameon=False)


def table_rows(page: str, first_cell: str) -> list[list[str]]:
    """Return the rows of the table of a page whose head begins with a cell; raises ``ValueError`` without one."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith(f"| {first_cell} |"):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
            return rows
    raise ValueError(f"docs/{page} has no table whose head begins with {first_cell!r}")


def first_number(cell: str) -> float:
    """Return the first number in a cell of a table."""
    found = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    if found is None:
        raise ValueError(f"a cell of a table has no number: {cell!r}")
    return float(found[0].replace(",", ""))


def times_ours(cell: str) -> float:
    """Return the ratio in a cell such as ``537: 2.17 times ours (1.75 to 2.31)``, or ``188: 0.71 (0.60 to 0.79)``."""
    return first_number(cell.partition(": ")[2])


def draw_load(axes: Any) -> None:
    """TTFT p99 over the load, by policy."""
    for policy in POLICIES:
        found = [simulated(policy, speed=speed)["ttft_ms"]["p99"] / 1000 for speed in SPEEDS]
        axes.plot(SPEEDS, found, marker="o", color=INK[policy], label=policy)
    axes.set(xlabel="load: how much faster than recorded", ylabel="TTFT p99, s", ylim=(0, None))
    axes.legend(frameon=False)


def draw_caches(axes: Any) -> None:
    """Reuse over the size of the workers' caches, by policy."""
    for policy in POLICIES:
        found = [100 * simulated(policy, cache_tokens=tokens)["cached_token_ratio"] for tokens in CACHE_TOKENS]
        axes.plot(CACHE_TOKENS, found, marker="o", color=INK[policy], label=policy)
    axes.set(xlabel="KV tokens that fit on one worker", ylabel="prompt tokens reused, %", xscale="log", ylim=(0, None))
    axes.set_xticks(CACHE_TOKENS, [f"{tokens // 1024}k" for tokens in CACHE_TOKENS])
    axes.minorticks_off()
    axes.legend(frameon=False)


def draw_routers(axes: Any) -> None:
    """What several routers reuse that share a stream of events, and what they do without."""
    rows = table_rows("simulate.md", "routers")
    names = [row[0].partition(" (")[0] for row in rows]
    shares = [first_number(row[1]) for row in rows]
    bars = axes.bar(names, shares, color=[INK["round-robin"] if "separate" in name else INK["kv"] for name in names])
    axes.bar_label(bars, fmt="%.0f %%")
    axes.set(xlabel="routers", ylabel="reused, of what is possible, %", ylim=(0, 110))


def draw_pools(axes: Any) -> None:
    """Requests that met their targets, by the way in which a pool is chosen."""
    rows = table_rows("pool_selection.md", "strategy")
    names, shares = [row[0] for row in rows], [first_number(row[1]) for row in rows]
    bars = axes.barh(names, shares, color=[INK["kv"] if name[0] in "cde" else INK["least-loaded"] for name in names])
    axes.bar_label(bars, fmt="%.0f %%", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="requests that met both targets, %", xlim=(0, 110))


def draw_front_ends(axes: Any) -> None:
    """CPU of the front end and its peers, each test relative to ours."""
    rows = table_rows("front_end.md", "test")[:3]
    names = [re.sub(r"[`]", "", row[0]).partition(",")[0] for row in rows]
    peers = {"poolgrid": 1, "Dynamo, fast tokenizer": 2, "smg": 3}
    for place, (peer, column) in enumerate(peers.items()):
        ratios = [1.0 if column == 1 else times_ours(row[column]) for row in rows]
        places = [number + 0.27 * (place - 1) for number in range(len(rows))]
        ink = (INK["kv"], INK["round-robin"], INK["least-loaded"])[place]
        axes.bar_label(axes.bar(places, ratios, 0.25, color=ink, label=peer), fmt="%.1f", padding=2)
    axes.set_xticks(range(len(rows)), names)
    axes.set(ylabel="CPU, times poolgrid's", ylim=(0, None))
    axes.legend(frameon=False)


def draw_gpu(axes: Any) -> None:
    """TTFT of the heavy load on a real GPU, by who chooses the server; the first seed has all four ways."""
    rows = table_rows("stock_engines.md", "load, seed")
    begin = next(number for number, row in enumerate(rows) if row[0].startswith("heavy"))
    ways = [[cell.strip("*` ").replace("`", "").replace("**", "") for cell in row] for row in rows[begin : begin + 4]]
    for place, (column, label, ink) in enumerate(((3, "p99", INK["least-loaded"]), (2, "mean", INK["kv"]))):
        places = [number + 0.2 - 0.4 * place for number in range(len(ways))]
        bars = axes.barh(places, [first_number(way[column]) for way in ways], 0.38, color=ink, label=label)
        axes.bar_label(bars, fmt="%.0f ms", padding=3)
    axes.set_yticks(range(len(ways)), [f"{way[1]}\n{way[4]} reused" for way in ways])
    axes.invert_yaxis()
    axes.set(xlabel="TTFT, ms", xlim=(0, 600))
    axes.legend(frameon=False, loc=(0.8, 0.5))


def draw_event_plane(axes: Any) -> None:
    """Records a second that one core of a consolidator carries, by where its journal is."""
    rows = [row for row in table_rows("bench.md", "journal") if row[1] == "all"]
    names, carried = [row[0] for row in rows], [first_number(row[6]) for row in rows]
    bars = axes.barh(names, carried, 0.5, color=INK["kv"])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.axvline(10_000, color="#333333", linestyle=":", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="records a second per core of the consolidator", xlim=(0, 1.2 * max(carried)))


PLOTTED: Mapping[str, Callable[[Any], None]] = {
    "load": draw_load,
    "caches": draw_caches,
    "routers": draw_routers,
    "pools": draw_pools,
    "event_plane": draw_event_plane,
    "front_ends": draw_front_ends,
    "gpu": draw_gpu,
    "paces": draw_paces,
    "expected": draw_expected,
}
"""By the name of the file."""


def main(names: Sequence[str] = ()) -> None:
    """Draw the plots, or those that are named."""
    import matplotlib

    matplotlib.use("svg")
    # The same data gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "poolgrid", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot

    PLOTS.mkdir(exist_ok=True)
    for name in names or PLOTTED:
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        PLOTTED[name](axes)
        figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")
        pyplot.close(figure)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
