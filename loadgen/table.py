"""The report of a run as a table for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from poolgrid.loadgen.statistics import Report, Summary

WORKERS_SHOWN_MAX = 32
"""Rows of the table by worker; the JSON report has all."""


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def report_table(report: Report) -> RenderableType:
    """Return the tables of a report: totals, latencies, workers, errors."""
    totals = Table(title=f"{report.mode}: {report.model} at {report.url}", title_justify="left", show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    rows = [
        ("requests", f"{report.requests:,}"),
        ("errors", f"{report.errors:,}"),
        ("duration", f"{_number(report.duration_s, 2)} s"),
        ("requests/s", _number(report.requests_per_s, 2)),
        ("output tokens/s", _number(report.output_tokens_per_s)),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("cached tokens", f"{report.cached_tokens:,}"),
        ("cached token ratio", _percent(report.cached_token_ratio)),
    ]
    if report.ideal_cached_token_ratio is not None:
        rows.append(("ideal cached token ratio", _percent(report.ideal_cached_token_ratio)))
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
    for name, text in rows:
        totals.add_row(name, text)

    latencies = Table("milliseconds", title="latency", title_justify="left")
    for heading in ("mean", "p50", "p90", "p99"):
        latencies.add_column(heading, justify="right")
    summaries: list[tuple[str, Summary]] = [
        ("TTFT", report.ttft_ms),
        ("ITL", report.itl_ms),
        ("whole answer", report.latency_ms),
    ]
    for name, found in summaries:
        latencies.add_row(name, *(_number(value, 2) for value in (found.mean, found.p50, found.p90, found.p99)))

    parts: list[RenderableType] = [totals, latencies]
    if report.per_worker:
        title = f"workers: tokens max/mean {_number(report.worker_tokens_max_over_mean, 3)}"
        workers = Table("worker", title=title, title_justify="left")
        for heading in ("requests", "prompt tokens", "cached"):
            workers.add_column(heading, justify="right")
        for name, share in list(report.per_worker.items())[:WORKERS_SHOWN_MAX]:
            cached = share.cached_tokens / share.prompt_tokens if share.prompt_tokens else None
            workers.add_row(Text(name), f"{share.requests:,}", f"{share.prompt_tokens:,}", _percent(cached))
        if len(report.per_worker) > WORKERS_SHOWN_MAX:
            workers.add_row(f"… {len(report.per_worker) - WORKERS_SHOWN_MAX} more", "", "", "")
        parts.append(workers)
    if report.errors_by_kind:
        errors = Table("error", "count", "for example", title="errors", title_justify="left")
        for kind, entry in report.errors_by_kind.items():
            errors.add_row(Text(kind), f"{entry.count:,}", Text(entry.samples[0] if entry.samples else ""))
        parts.append(errors)
    return Group(*parts)
