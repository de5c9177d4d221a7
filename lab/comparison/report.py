"""What runs of the comparison came to: figures, tables in Markdown, plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lab.comparison.load import Record

CAUTION = """\
How to read it: one machine, engines of one version, prompts made of random words, one client on the same host, each
router with its defaults. Differences below 10 % are noise: runs of one router differ by as much. Routers that pass
text on leave tokenization to the engines, so part of a difference in TTFT is who tokenizes, not who chooses better.
Nothing here ranks features, other engines, other traffic, or several hosts.
"""

COLUMNS = (
    *("load", "seed", "router", "requests", "failed", "TTFT mean/p50/p99", "TPOT", "gap p99", "end to end"),
    *("tokens/s", "reused", "later turns whole", "most/mean per server", "CPU cores", "CPU µs/token", "MB"),
)


class Run(msgspec.Struct):
    """One router under one load of one seed."""

    level: str
    seed: int
    router: str
    disturbance: str
    wall_s: float
    cpu_s: float
    rss_mb: float
    records: list[Record]
    engines: list[dict[str, float]]
    """Of each engine server, how far its counters went."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else 0.0


def figures(run: Run) -> dict[str, Any]:
    """Return what a run came to; times in ms.

    Reuse is what the engines report for each request. Their counters of queries and hits are not: vLLM asks its cache
    again for a request that waits, in every step.
    """
    good = [each for each in run.records if not each.fault]
    ttft = [each.ttft_ms for each in good]
    gaps = [gap_ms for each in good for gap_ms, count in each.gaps_ms for _ in range(count)]
    tokens = sum(each.answer_tokens for each in good)
    prompt_tokens = sum(each.prompt_tokens for each in good)
    served = [each["vllm:request_success"] for each in run.engines]
    return {
        "level": run.level,
        "seed": run.seed,
        "router": run.router,
        "disturbance": run.disturbance,
        "requests": len(run.records),
        "failed": len(run.records) - len(good),
        "faults": sorted({each.fault for each in run.records if each.fault})[:5],
        "ttft_mean_ms": _mean(ttft),
        "ttft_p50_ms": quantile(ttft, 0.5),
        "ttft_p99_ms": quantile(ttft, 0.99),
        "tpot_mean_ms": _mean([each.tpot_ms for each in good if each.answer_tokens > 1]),
        "gap_p99_ms": quantile(gaps, 0.99),
        "e2e_mean_ms": _mean([each.e2e_ms for each in good]),
        "tokens_per_s": tokens / run.wall_s,
        "reused_share": sum(each.cached_tokens for each in good) / prompt_tokens if prompt_tokens else 0.0,
        "later_turns_whole_share": whole_share(run.records),
        "most_to_mean": max(served) * len(served) / sum(served) if sum(served) else 0.0,
        "served": served,
        "preemptions": sum(each["vllm:num_preemptions"] for each in run.engines),
        "cpu_cores": run.cpu_s / run.wall_s,
        "cpu_us_per_token": run.cpu_s / tokens * 1e6 if tokens else 0.0,
        "rss_mb": run.rss_mb,
    }


def whole_share(records: Sequence[Record]) -> float:
    """Return the share of later turns that reused all of the prompt before them, but for its last two blocks.

    The answer in between is canned, so nothing behind the prompt before can be reused.
    """
    before: dict[int, Record] = {}
    later = whole = 0
    for each in records:
        earlier = before.get(each.session)
        if earlier is not None and not earlier.fault and not each.fault:
            later += 1
            whole += each.cached_tokens >= earlier.prompt_tokens - 32
        before[each.session] = each
    return whole / later if later else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def cells(found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    level = f"{found['level']}, {found['disturbance']}" if found["disturbance"] else found["level"]
    ttft = "/".join(f"{found[f'ttft_{each}_ms']:.1f}" for each in ("mean", "p50", "p99"))
    return [
        *(level, str(found["seed"]), found["router"], str(found["requests"]), str(found["failed"]), ttft),
        *(f"{found[name]:.1f}" for name in ("tpot_mean_ms", "gap_p99_ms")),
        *(f"{found['e2e_mean_ms']:.0f}", f"{found['tokens_per_s']:.0f}", f"{found['reused_share']:.1%}"),
        *(f"{found['later_turns_whole_share']:.1%}", f"{found['most_to_mean']:.2f}", f"{found['cpu_cores']:.2f}"),
        *(f"{found['cpu_us_per_token']:.0f}", f"{found['rss_mb']:.0f}"),
    ]


def markdown(rows: Sequence[dict[str, Any]], heading: str) -> str:
    """Return all figures as a page; within a load the lowest mean TTFT comes first."""
    ordered = sorted(rows, key=lambda row: (row["level"], row["disturbance"], row["seed"], row["ttft_mean_ms"]))
    table = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, ordered)]
    lines = [f"| {' | '.join(each)} |" for each in table]
    faults = [
        f"- {row['router']}, {row['level']} {row['seed']}: {'; '.join(row['faults'])}"
        for row in ordered
        if row["faults"]
    ]
    return "\n".join([f"# {heading}", "", CAUTION, *lines, "", "Times in ms.", *faults, ""])


def plot(rows: Sequence[dict[str, Any]], heading: str, path: Path) -> bool:
    """Draw TTFT and reuse of each router by load; return whether it could (matplotlib is of the extra ``docs``)."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    calm = [row for row in rows if not row["disturbance"]]
    levels = list(dict.fromkeys(row["level"] for row in calm))
    routers = list(dict.fromkeys(row["router"] for row in calm))
    shown = (
        *(("ttft_mean_ms", "TTFT, mean (ms)"), ("ttft_p99_ms", "TTFT, p99 (ms)")),
        *(("gap_p99_ms", "time between tokens, p99 (ms)"), ("cpu_us_per_token", "CPU of the router (µs per token)")),
    )
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    width = 0.8 / len(routers)
    for (name, title), axis in zip(shown, axes.flat, strict=True):
        for at, router in enumerate(routers):
            means = [
                _mean([row[name] for row in calm if (row["level"], row["router"]) == (level, router)])
                for level in levels
            ]
            axis.bar([place + at * width for place in range(len(levels))], means, width, label=router)
        axis.set_title(title)
        axis.set_xticks([place + width * (len(routers) - 1) / 2 for place in range(len(levels))], levels)
    axes.flat[0].legend(fontsize="small")
    figure.suptitle(heading, fontsize="medium")
    figure.savefig(path, dpi=110)
    return True
