"""A sweep as a picture: what grows with the concurrency, one line for each endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from poolgrid.tools.bench.series import Point
from poolgrid.tools.bench.statistics import Report

PANELS: tuple[tuple[str, Callable[[Report], float | None]], ...] = (
    ("TTFT, mean [ms]", lambda report: report.ttft_ms.mean),
    ("TTFT, p99 [ms]", lambda report: report.ttft_ms.p99),
    ("ITL, mean [ms]", lambda report: report.itl_ms.mean),
    ("output tokens per second", lambda report: report.output_tokens_per_s),
    ("requests per second", lambda report: report.requests_per_s),
    (
        "prompt tokens reused [%]",
        lambda report: None if report.cached_token_ratio is None else 100 * report.cached_token_ratio,
    ),
)
"""Heading and figure of each panel."""


class PlottingUnavailable(ImportError):
    """matplotlib is not installed."""


def check_plotting(out: Path) -> None:
    """Raise ``PlottingUnavailable`` where nothing can be drawn."""
    _pyplot(out)


def write_sweep_plot(title: str, points: Sequence[Point], out: Path) -> None:
    """Draw points to ``out``, whose ending says in which format; raises ``PlottingUnavailable``, ``OSError``."""
    pyplot = _pyplot(out)
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7))
    levels = sorted({point.concurrency or 1 for point in points})
    for axis, (heading, value_of) in zip(axes.flat, PANELS, strict=True):
        for name in dict.fromkeys(point.name for point in points):
            line = [(point.concurrency or 1, value_of(point.report)) for point in points if point.name == name]
            known = [(level, value) for level, value in line if value is not None]
            axis.plot([level for level, _ in known], [value for _, value in known], marker="o", label=name)
        axis.set_title(heading, fontsize=10)
        axis.set_xlabel("concurrency")
        axis.set_xscale("log", base=2)
        axis.set_xticks(levels, [str(level) for level in levels])
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
    axes.flat[0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    try:
        figure.savefig(out, dpi=110)
    finally:
        pyplot.close(figure)


def _pyplot(out: Path) -> Any:
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]

        matplotlib.use("Agg")
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise PlottingUnavailable(
            f"drawing {out}: matplotlib is not installed; pip install matplotlib (or the extra `plots`)"
        ) from None
    return pyplot
