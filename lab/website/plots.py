"""Draw the plots of ``docs/benchmarks.md`` (``make plots``): from the simulator, or from the tables of that page.

Simulated figures are computed here, on the trace in the repository, and are the same each time. Measured figures are
read from the page, so that a plot and its table never differ.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poolgrid.kernel.decision.policy import Candidates, Choice, RoutingRequest
from poolgrid.kernel.routing.engine_times import Engines
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.plugins.bench.trace import read_trace
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation.pool import RouterFleet, RunResult, SimulatedPool
from poolgrid.plugins.simulation.recording import policy_report
from poolgrid.plugins.simulation.workload import SpeedChange, WorkerSpeeds, build_workload
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.workers.timing import PolynomialTiming

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
PAGE = "benchmarks.md"
GREY = "#777777"
DATE = "Nov 2026"
ANY_MACHINE = f"{DATE}, the same on every machine"
SIMULATED = f"simulated: 1,000 requests of the conversation trace, 8 workers, {ANY_MACHINE}"
TESTS = {"short": "short requests", "paced": "paced streams", "turns": "conversations"}


def simulated(policy: str, *, speed: float = 1.0, cache_tokens: int | None = None) -> dict[str, Any]:
    """Return the figures of one policy on the trace, as ``poolgrid simulate`` reports them."""
    workload = build_workload(read_trace(TRACE, None), speed, BLOCK_SIZE)
    count = len(workload.requests)
    roomy = workload.total_tokens // BLOCK_SIZE + 2 * count + 1
    limits = SimulatedLimits(
        block_size=BLOCK_SIZE,
        total_kv_blocks=roomy if cache_tokens is None else cache_tokens // BLOCK_SIZE,
        max_sequence_length=workload.longest + 1,
        max_waiting_requests=count,
    )
    pool = SimulatedPool(workload, make_policy(policy), WORKERS, limits, PolynomialTiming(), routers=RouterFleet())
    return policy_report(pool.run(), WORKERS)


class Watched(KvAware):
    """The policy, with the learned slowdown of each worker at each choice."""

    def __init__(self) -> None:
        super().__init__()
        self.compares_numbers = False
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
    """Return the policy ``kv`` after the trace on unlike workers, what came of it, and when requests came."""
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
    """Draw the learned slowdown of three workers over time, and the true one."""
    policy, _, arrival_ms = unlike_run()
    seconds = [arrival_ms[request_id] / 1000 for request_id, _ in policy.seen]
    for number, label, ink in (
        (0, "a quarter of its speed from 100 to 200 s", INK["round-robin"]),
        (7, "three times slower", INK["kv"]),
        (3, "as fast as its card states", INK["least-loaded"]),
    ):
        axes.plot(seconds, [paces[number] for _, paces in policy.seen], color=ink, label=label)
        moments = sorted({0.0, 99.999, 100.0, 199.999, 200.0, seconds[-1]})
        truth = [1 / UNLIKE.at(number, 1000 * moment) for moment in moments]
        axes.plot(moments, truth, color=ink, linestyle=":", linewidth=1)
    axes.plot([], [], color=GREY, linestyle=":", linewidth=1, label="true slowdown")
    axes.set(xlabel="time, s", ylabel="slowdown against the card, times", ylim=(0, 6))
    titled(axes, "Learned slowdown of three workers", f"policy kv, {SIMULATED}")
    axes.legend(frameon=False)


def draw_expected(axes: Any) -> None:
    """Draw the expected and the real TTFT of each request."""
    _, result, _ = unlike_run()
    slowed, others = "worker that slows down to a quarter for 100 s", "other workers"
    for chosen, label, ink in ((True, slowed, INK["round-robin"]), (False, others, INK["kv"])):
        points = [(expected, real) for _, worker, expected, real in result.predicted if (worker == 0) is chosen]
        axes.plot(*zip(*points, strict=True), marker=".", markersize=3, linestyle="", color=ink, label=label)
    axes.axline((10, 10), (10_000, 10_000), color="#333333", linewidth=0.8)
    axes.set(xlabel="expected TTFT, ms", ylabel="real TTFT, ms", xscale="log", yscale="log")
    titled(axes, "Expected and real TTFT of each request", f"policy kv, {SIMULATED}")
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


def ratio_range(cell: str) -> tuple[float, float, float]:
    """Return median, lowest and highest of a cell such as ``0.59 (0.47 to 0.79)``."""
    found = re.fullmatch(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", cell)
    if found is None:
        raise ValueError(f"a cell of a table has no range: {cell!r}")
    return float(found[1]), float(found[2]), float(found[3])


def titled(axes: Any, title: str, method: str, columns: int = 100) -> None:
    """Write the title, and below it how the figures were found, in lines of so many characters."""
    lines = textwrap.wrap(method, columns)
    axes.set_title(title + "\n" * len(lines), loc="left", fontsize=11, fontweight="bold")
    axes.text(0, 1.03, "\n".join(lines), transform=axes.transAxes, fontsize=8, color="#555555")


def draw_load(axes: Any) -> None:
    """Draw TTFT p99 over the arrival rate, by policy."""
    for policy in POLICIES:
        found = [simulated(policy, speed=speed)["ttft_ms"]["p99"] / 1000 for speed in SPEEDS]
        axes.plot(SPEEDS, found, marker="o", color=INK[policy], label=policy)
    axes.set(xlabel="arrival rate, times the recorded rate", ylabel="TTFT p99, s", ylim=(0, None))
    titled(axes, "TTFT under load", SIMULATED)
    axes.legend(frameon=False)


def draw_caches(axes: Any) -> None:
    """Draw the reuse over the size of the workers' caches, by policy, and the ideal."""
    for policy in POLICIES:
        found = [100 * simulated(policy, cache_tokens=tokens)["cached_token_ratio"] for tokens in CACHE_TOKENS]
        axes.plot(CACHE_TOKENS, found, marker="o", color=INK[policy], label=policy)
    ideal = 100 * build_workload(read_trace(TRACE, None), 1.0, BLOCK_SIZE).ideal_cached_token_ratio
    axes.axhline(ideal, color="#333333", linestyle=":", linewidth=1, label=f"ideal: one infinite cache ({ideal:.1f} %)")
    axes.set(xlabel="KV cache of one worker, tokens", ylabel="prompt tokens reused, %", xscale="log", ylim=(0, None))
    axes.set_xticks(CACHE_TOKENS, [f"{tokens // 1024}k" for tokens in CACHE_TOKENS])
    axes.minorticks_off()
    titled(axes, "Reuse by cache size", SIMULATED)
    axes.legend(frameon=False)


def draw_routers(axes: Any) -> None:
    """Draw the cache hit rate of several routers that share the events, and of separate ones."""
    rows = table_rows(PAGE, "routers")
    names = [row[0].partition(" (")[0] for row in rows]
    shares = [first_number(row[1]) for row in rows]
    bars = axes.bar(names, shares, color=[INK["round-robin"] if "separate" in name else INK["kv"] for name in names])
    axes.bar_label(bars, fmt="%.0f %%")
    axes.set(xlabel="routers", ylabel="cache hit rate, % of the ideal", ylim=(0, 110))
    titled(
        axes,
        "Several routers of one pool",
        f"simulated: 12,031 requests of the conversation trace, 8 workers, {ANY_MACHINE}",
    )


def draw_pools(axes: Any) -> None:
    """Draw the requests that met their targets, by the way in which a pool is chosen."""
    rows = table_rows(PAGE, "strategy")
    names, shares = [row[0] for row in rows], [first_number(row[1]) for row in rows]
    bars = axes.barh(names, shares, color=[INK["kv"] if "grid" in name else INK["least-loaded"] for name in names])
    axes.bar_label(bars, fmt="%.0f %%", padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="requests that met both latency targets, %", xlim=(0, 110))
    titled(
        axes,
        "Choosing a pool, fleets of equal cost",
        f"simulated: 12,031 requests of the conversation trace at 12 times its rate (41/s), {ANY_MACHINE}",
        72,
    )


def draw_front_ends(axes: Any) -> None:
    """Draw the CPU of other front ends relative to poolgrid's: the median over machines, with the range."""
    rows = table_rows(PAGE, "test")[:3]
    peers = {"poolgrid": 1, "Dynamo 1.6, fast tokenizer": 2, "smg 1.13": 3}
    for place, (peer, column) in enumerate(peers.items()):
        ratios = [(1.0, 1.0, 1.0) if column == 1 else ratio_range(row[column]) for row in rows]
        medians = [median for median, _, _ in ratios]
        places = [number + 0.27 * (place - 1) for number in range(len(rows))]
        ink = (INK["kv"], INK["round-robin"], INK["least-loaded"])[place]
        bars = axes.bar(places, medians, 0.25, color=ink, label=peer)
        if column != 1:
            below = [median - low for median, low, _ in ratios]
            above = [high - median for median, _, high in ratios]
            axes.errorbar(places, medians, [below, above], linestyle="", color="#333333", linewidth=1, capsize=3)
        axes.bar_label(bars, [f"{median:.1f}" for median in medians], label_type="center", color="white")
    machines = [
        f"{TESTS[name.strip('`')]}, {unit}\n{row[5]} machine{'s' * (row[5] != '1')}"
        for row in rows
        for name, _, unit in [row[0].partition(", ")]
    ]
    axes.set_xticks(range(len(rows)), machines)
    axes.set(ylabel="CPU, times poolgrid's (less is better)", ylim=(0, 4.2))
    titled(
        axes,
        "CPU of HTTP front ends",
        f"measured, {DATE}: medians and ranges over machines, five rounds each, one core per front end",
    )
    axes.legend(frameon=False)


def draw_gpu(axes: Any) -> None:
    """Draw the TTFT of the heavy load on a GPU, by the way in which a server is chosen, for the first seed."""
    rows = table_rows(PAGE, "load, seed")
    begin = next(number for number, row in enumerate(rows) if row[0].startswith("heavy"))
    ways = [[cell.strip("*` ").replace("`", "").replace("**", "") for cell in row] for row in rows[begin : begin + 4]]
    for place, (column, label, ink) in enumerate(((2, "mean", INK["kv"]), (3, "p99", INK["least-loaded"]))):
        places = [number - 0.2 + 0.4 * place for number in range(len(ways))]
        bars = axes.barh(places, [first_number(way[column]) for way in ways], 0.38, color=ink, label=label)
        axes.bar_label(bars, fmt="%.0f ms", padding=3)
    axes.set_yticks(range(len(ways)), [f"{way[1]}\n{way[4]} of prompt tokens reused" for way in ways])
    axes.invert_yaxis()
    axes.set(xlabel="TTFT, ms", xlim=(0, 640))
    titled(
        axes,
        "TTFT of conversations on vLLM",
        f"3 vLLM 0.25.0 servers, one H200, Qwen3-4B shape, 168 requests, one run, seed 11, {DATE}",
        72,
    )
    axes.legend(frameon=False, loc="center right")


def draw_event_plane(axes: Any) -> None:
    """Draw the records a second that one core of a consolidator carries, by the place of its journal."""
    rows = [row for row in table_rows(PAGE, "journal") if row[1] == "all"]
    names, carried = [row[0] for row in rows], [first_number(row[6]) for row in rows]
    bars = axes.barh(names, carried, 0.5, color=INK["kv"])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.axvline(10_000, color="#333333", linestyle=":", linewidth=1, label="1,000 workers, 10 records a second each")
    axes.invert_yaxis()
    axes.set(xlabel="records a second per core of the consolidator", ylabel="journal", xlim=(0, 1.3 * max(carried)))
    titled(
        axes,
        "Capacity of one consolidator",
        f"measured, {DATE}: 1,000 sources, 10 s per bar, two shared cores for all processes",
    )
    axes.legend(frameon=False)


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
    """Draw all plots, or the named ones."""
    import matplotlib

    matplotlib.use("svg")
    # The same data gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "poolgrid", "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot

    PLOTS.mkdir(exist_ok=True)
    for name in names or PLOTTED:
        figure, axes = pyplot.subplots(figsize=(7.5, 4), layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        PLOTTED[name](axes)
        figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")
        pyplot.close(figure)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
