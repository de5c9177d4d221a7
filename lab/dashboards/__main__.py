"""Write the dashboards, or with ``--check`` say whether what is written is what the code says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from lab.dashboards.boards import BOARDS
from lab.dashboards.checking import Known, problems
from lab.dashboards.foreign import FOREIGN, RECORDED
from lab.dashboards.model import Board

ROOT = Path(__file__).resolve().parents[2]
METRICS_PAGE = ROOT / "docs" / "metrics.md"
WRITTEN = ROOT / "deploy" / "grafana" / "dashboards"


_METRIC = re.compile(r"^\| `(poolgrid_\w+)(?:\{([a-z_,]+)\})?` \| (Histogram\.)?", re.MULTILINE)


def known_series() -> Known:
    """Return the labels of every series: of our processes, and of others.

    Ours are those of the page of metrics, whose tables are written from what processes register; a test fails while
    they differ (``lab/website/metrics_tables.py``).
    """
    known: dict[str, frozenset[str]] = {**FOREIGN, **RECORDED}
    for name, named, is_histogram in _METRIC.findall(METRICS_PAGE.read_text(encoding="utf-8")):
        labels = frozenset(named.split(",") if named else ())
        if is_histogram:
            known |= {f"{name}_{ending}": labels for ending in ("sum", "count")}
            known[f"{name}_bucket"] = labels | {"le"}
        else:
            known[name] = labels
    return known


def text(board: Board) -> str:
    """Return the file of a board."""
    return json.dumps(board.classic(), indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def stale(directory: Path) -> list[str]:
    """Return which files are not what the code says."""
    wanted = {f"{board.uid}.json": text(board) for board in BOARDS}
    there = {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.json")}
    return sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))


def main(arguments: list[str]) -> int:
    """Run the command; 0 when all is well."""
    wrong = [each for board in BOARDS for each in problems(board, known_series())]
    if wrong:
        sys.stderr.write("\n".join(wrong) + "\nnothing is written\n")
        return 1
    if arguments == ["--check"]:
        old = stale(WRITTEN)
        if old:
            sys.stderr.write(f"{', '.join(old)} in {WRITTEN}: not what the code says; write them with make boards\n")
        return 1 if old else 0
    if arguments:
        sys.stderr.write("usage: python -m lab.dashboards [--check]\n")
        return 2
    WRITTEN.mkdir(parents=True, exist_ok=True)
    for path in WRITTEN.glob("*.json"):
        path.unlink()
    for board in BOARDS:
        (WRITTEN / f"{board.uid}.json").write_text(text(board), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
