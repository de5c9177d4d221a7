"""Figures that several pages name, computed from the one table that has them: ``python -m lab.website.figures``.

A figure stands between ``<!-- figure: NAME -->`` and ``<!-- /figure -->``. All come from tables of the page of
benchmarks, a comparison from rows of one table; a test fails while a page differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from lab.website.plots import PAGE, first_number, table_rows

ROOT = Path(__file__).parents[2]
LARGE_CACHES = ("light", "heavy", "peak")

_FIGURE = re.compile(r"(<!-- figure: ([a-z0-9-]+) -->)(.*?)(<!-- /figure -->)", re.DOTALL)


def figures() -> Mapping[str, str]:
    """Return each figure by its name."""
    rows: dict[tuple[str, str], list[str]] = {}
    load = ""
    for row in table_rows(PAGE, "load | router"):
        load = row[0] or load
        rows[load, row[1]] = row
    ttft = {key: first_number(row[2]) for key, row in rows.items()}
    cpu = {key: first_number(row[8]) for key, row in rows.items()}
    loads = list(dict.fromkeys(each for each, _ in rows))
    below = {
        peer: {each: 100 * (1 - ttft[each, "poolgrid"] / ttft[each, peer]) for each in loads}
        for peer in ("smg", "vllm-router")
    }
    over = [cpu[each, "poolgrid"] / cpu[each, "smg"] for each in loads]
    cores = [cpu[each, "poolgrid"] for each in loads]
    lowest, highest = (how(below["vllm-router"][each] for each in LARGE_CACHES) for how in (min, max))
    aggregated, by_time = table_rows(PAGE, "setup")[:2]
    met = {row[0]: row[1] for row in table_rows(PAGE, "strategy")}
    single = max((share for name, share in met.items() if name.startswith("one pool")), key=first_number)
    late = [rows["eviction", router][2].replace("*", "").rpartition(" / ")[2] for router in ("poolgrid", "smg")]
    return {
        "ttft-below-vllm-router": f"{lowest:.0f} to {highest:.0f} %",
        "ttft-against-smg": f"{max(abs(below['smg'][each]) for each in LARGE_CACHES):.0f} %",
        "ttft-below-smg-eviction": f"{below['smg']['eviction']:.0f} %",
        "p99-eviction": f"{late[0]} against {late[1]} ms",
        "cpu-over-smg": f"{min(over):.1f} to {max(over):.1f}",
        "cores": f"{min(cores):.2f} to {max(cores):.2f}",
        "gap-disaggregated": f"{by_time[3]} against {aggregated[3]} ms",
        "targets-by-grid": f"{met['four pools, grid']} against {single}",
    }


def pages() -> dict[Path, str]:
    """Return the text of every page that names a figure, as it should be; raises ``KeyError`` for an unknown name."""
    now = figures()
    made = {}
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if _FIGURE.search(text):
            made[path] = _FIGURE.sub(lambda found: found[1] + now[found[2]] + found[4], text)
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
