"""The report of a run as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from poolgrid.plugins.bench.statistics import Point, Report, Summary
from poolgrid.server.process.figures import UNKNOWN, counted, number, percent
from poolgrid.server.process.terminal_table import Heading, TerminalTable

OVER_IDEAL = 0.01
"""More than the ideal by rounding to blocks; beyond it the endpoint knew the prompts before."""

WORKERS_SHOWN_MAX = 32
"""Rows of the table by worker; the JSON report has all."""

_FIGURES = ("at a time", "req/s", "tokens/s", "reused", "TTFT", "p99", "ITL", "errors")
_RATIOS = {
    "tokens/s": "output_tokens_per_s",
    "reused": "cached_token_ratio",
    "TTFT": "ttft_ms.mean",
    "ITL": "itl_ms.mean",
}
"""Headings of the ratios, and which they are."""
_SPREADS = ("TTFT", "reused", "ITL", "tokens/s")
"""Ratios whose extremes are shown, as far as there is room."""


def series_table(points: Sequence[Point]) -> RenderableType:
    """Return the tables of several runs: figures, and ratios where endpoints are compared."""
    rounds = max(len(point.rounds) for point in points)
    first = points[0]
    # What all rows have in common stands above them: a sweep of one endpoint fits a narrow terminal.
    alone = all(point.name == first.name for point in points)
    failed = any(point.report.errors for point in points)
    figures = TerminalTable(
        [
            *([] if alone else [Heading("endpoint", numeric=False)]),
            *(Heading(name, optional=name == "errors" and not failed) for name in _FIGURES),
        ],
        f"{first.report.mode} loop, {first.report.model}{f' at {first.name}' if alone else ''}, "
        f"{counted(rounds, 'round')}; milliseconds",
    )
    ratios = TerminalTable(
        [
            Heading("endpoint", numeric=False),
            Heading("at a time"),
            *map(Heading, _RATIOS),
            *(Heading(f"{name} from–to", optional=True) for name in _SPREADS),
        ],
        f"ratios to {first.name}" + (f", median of {rounds} rounds" if rounds > 1 else ""),
    )
    for point in points:
        report = point.report
        level = "" if point.concurrency is None else f"{point.concurrency:,}"
        figures.add(
            *([] if alone else [point.name]),
            level,
            number(report.requests_per_s, 1),
            number(report.output_tokens_per_s, 0),
            percent(report.cached_token_ratio),
            number(report.ttft_ms.mean, 1),
            number(report.ttft_ms.p99, 0),
            number(report.itl_ms.mean, 1),
            f"{report.errors:,}",
        )
        if point.ratios is not None:
            found = [point.ratios.get(place) for place in _RATIOS.values()]
            medians = [UNKNOWN if ratio is None else f"× {ratio.median:.2f}" for ratio in found]
            ranges = [point.ratios.get(_RATIOS[name]) for name in _SPREADS]
            spreads = [UNKNOWN if ratio is None else f"{ratio.low:.2f}–{ratio.high:.2f}" for ratio in ranges]
            ratios.add(point.name, level, *medians, *spreads)
    return Group(figures, Text(), ratios) if ratios.rows else figures


def report_table(report: Report) -> RenderableType:
    """Return the tables of a report: totals, latencies, workers, errors."""
    totals = TerminalTable(
        (Heading(report.mode, numeric=False), Heading("measured")), f"{report.model} at {report.url}"
    )
    for name, text in _totals(report):
        totals.add(name, text)
    latencies = TerminalTable([Heading("milliseconds", numeric=False), *map(Heading, ("mean", "p50", "p90", "p99"))])
    summaries: list[tuple[str, Summary]] = [
        ("TTFT", report.ttft_ms),
        ("ITL", report.itl_ms),
        ("whole answer", report.latency_ms),
    ]
    for name, found in summaries:
        latencies.add(name, *(number(value) for value in (found.mean, found.p50, found.p90, found.p99)))
    parts: list[RenderableType] = [totals, Text(), latencies]
    if report.per_worker:
        headings = [Heading("worker", numeric=False), *map(Heading, ("requests", "prompt tokens", "cached"))]
        workers = TerminalTable(headings)
        for name, share in list(report.per_worker.items())[:WORKERS_SHOWN_MAX]:
            cached = share.cached_tokens / share.prompt_tokens if share.prompt_tokens else None
            workers.add(name, f"{share.requests:,}", f"{share.prompt_tokens:,}", percent(cached))
        more = len(report.per_worker) - WORKERS_SHOWN_MAX
        spread = f"busiest worker over the mean: {number(report.worker_tokens_max_over_mean)}"
        workers.note = f"and {counted(more, 'more worker')}; {spread}" if more > 0 else spread
        parts += [Text(), workers]
    if report.errors_by_kind:
        errors = TerminalTable([Heading("error", numeric=False), Heading("count"), Heading("for example", False)])
        for kind, entry in report.errors_by_kind.items():
            errors.add(kind, f"{entry.count:,}", entry.samples[0] if entry.samples else "")
        parts += [Text(), errors]
    return Group(*parts)


def _totals(report: Report) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{report.requests:,}"),
        ("errors", f"{report.errors:,}"),
        ("duration", f"{number(report.duration_s)} s"),
        ("requests/s", number(report.requests_per_s)),
        ("output tokens/s", number(report.output_tokens_per_s, 1)),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("cached tokens", f"{report.cached_tokens:,}"),
        ("cached token ratio", percent(report.cached_token_ratio)),
    ]
    if report.ideal_cached_token_ratio is not None:
        known = (report.cached_token_ratio or 0.0) > report.ideal_cached_token_ratio + OVER_IDEAL
        note = ": it has seen these prompts before; take another --seed" if known else ""
        rows.append(("ideal cached token ratio", percent(report.ideal_cached_token_ratio) + note))
    for name, value in (
        ("wrong texts", report.wrong_texts),
        ("cancelled", report.cancelled),
        ("delayed by the in-flight limit", report.delayed),
        ("answers without usage", report.without_usage),
    ):
        if value:
            rows.append((name, f"{value:,}"))
    if report.interrupted:
        rows.append(("interrupted", "yes: this is what was measured so far"))
    return rows
