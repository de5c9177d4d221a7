"""Variants side by side as bars: as one HTML file that needs nothing, or as PNG with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

PANELS: tuple[tuple[str, str, float, tuple[str, ...]], ...] = (
    ("prompt tokens reused", "%", 100.0, ("cached_token_ratio",)),
    ("TTFT mean", "ms", 1.0, ("ttft_ms", "mean")),
    ("TTFT p99", "ms", 1.0, ("ttft_ms", "p99")),
    ("ITL mean", "ms", 1.0, ("itl_ms", "mean")),
    ("ITL p99", "ms", 1.0, ("itl_ms", "p99")),
    ("busiest worker / mean", "×", 1.0, ("worker_tokens_max_over_mean",)),
)
"""Heading, unit, factor, and where the figure is in a report."""

_BAR, _ROW, _LABELS, _WIDTH = 16, 24, 240, 360


class PlottingUnavailable(ImportError):
    """matplotlib is not installed."""


def figures(report: Mapping[str, Any], keys: tuple[str, ...]) -> float:
    """Return the figure at a place of a report."""
    value: Any = report
    for key in keys:
        value = value[key]
    return float(value)


def write_plot(title: str, policies: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    """Draw to ``out``; its ending says how. Raises ``ValueError``, ``PlottingUnavailable``, ``OSError``."""
    if out.suffix == ".html":
        out.write_text(html(title, policies), encoding="utf-8")
    elif out.suffix == ".png":
        _write_png(title, policies, out)
    else:
        raise ValueError(f"drawing to {out}: its ending is {out.suffix!r}, allowed are .html and .png")


def html(title: str, policies: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page with one panel of bars per figure."""
    panels = []
    for heading, unit, factor, keys in PANELS:
        values = {name: factor * figures(report, keys) for name, report in policies.items()}
        top = max(values.values()) or 1.0
        bars = []
        for number, (name, value) in enumerate(values.items()):
            y = number * _ROW
            width = _WIDTH * value / top
            colour = "#888" if number == 0 else "#3b7dd8"
            bars.append(
                f'<text x="{_LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
                f'<rect x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'
                f'<text x="{_LABELS + width + 6:.1f}" y="{y + 13}">{value:,.1f} {unit}</text>'
            )
        height = len(values) * _ROW
        panels.append(
            f"<h2>{escape(heading)}</h2>"
            f'<svg width="{_LABELS + _WIDTH + 120}" height="{height}" role="img">{"".join(bars)}</svg>'
        )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>'
        "body{font:14px sans-serif;margin:2em}h2{font-size:14px;margin:1.2em 0 .4em}svg text{font-size:12px}"
        f"</style></head><body><h1>{escape(title)}</h1>{''.join(panels)}</body></html>\n"
    )


def _write_png(title: str, policies: Mapping[str, Mapping[str, Any]], out: Path) -> None:
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]

        matplotlib.use("Agg")
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise PlottingUnavailable(
            "drawing a PNG: matplotlib is not installed; pip install matplotlib (or the extra `plots`), or use .html"
        ) from None
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 2.5 + 0.5 * len(policies)))
    names = list(policies)
    for axis, (heading, unit, factor, keys) in zip(axes.flat, PANELS, strict=True):
        values = [factor * figures(policies[name], keys) for name in names]
        bars = axis.barh(names, values, color=["#888888"] + ["#3b7dd8"] * (len(names) - 1))
        axis.bar_label(bars, [f"{value:,.1f}" for value in values], padding=3)
        axis.set_title(f"{heading} [{unit}]")
        axis.invert_yaxis()
        axis.margins(x=0.15)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
