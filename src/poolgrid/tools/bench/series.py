"""Several runs side by side: endpoints at several concurrencies, in rounds, and how they compare.

Of each round the endpoints are run one after the other on the same prompts, so what the machine does besides falls on
all of them; a ratio is that of two runs of one round, and the median over the rounds is what is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import IO

import msgspec

from poolgrid.tools.bench.runner import RequestLine
from poolgrid.tools.bench.statistics import Report

FIGURES: dict[str, Callable[[Report], float | None]] = {
    "requests_per_s": lambda report: report.requests_per_s,
    "output_tokens_per_s": lambda report: report.output_tokens_per_s,
    "cached_token_ratio": lambda report: report.cached_token_ratio,
    "ttft_ms.mean": lambda report: report.ttft_ms.mean,
    "ttft_ms.p99": lambda report: report.ttft_ms.p99,
    "itl_ms.mean": lambda report: report.itl_ms.mean,
    "latency_ms.mean": lambda report: report.latency_ms.mean,
}
"""Figures of which there are ratios, by their place in a report."""


class Ratio(msgspec.Struct, frozen=True):
    """A figure over that of the first endpoint in the same round: the median, and the extremes, over the rounds."""

    median: float
    low: float
    high: float


class Point(msgspec.Struct, frozen=True):
    """One endpoint at one concurrency, over all rounds."""

    name: str
    concurrency: int | None
    """``None`` where the load is not a closed loop."""
    report: Report
    """Of all rounds together."""
    rounds: list[Report]
    ratios: dict[str, Ratio] | None = None
    """To the first endpoint at the same concurrency; ``None`` for that one itself."""


class Series(msgspec.Struct, frozen=True):
    """Everything that one command measured: the keys of ``--json`` where there is more than one run."""

    points: list[Point]
    interrupted: bool = False


def with_ratios(points: Sequence[Point]) -> list[Point]:
    """Return points with their ratios to the first endpoint at the same concurrency."""
    first: dict[int | None, Point] = {}
    compared = []
    for point in points:
        base = first.setdefault(point.concurrency, point)
        compared.append(point if base is point else msgspec.structs.replace(point, ratios=ratios(point, base)))
    return compared


def ratios(point: Point, base: Point) -> dict[str, Ratio]:
    """Return the ratios of two endpoints, figure by figure; figures that a round lacks are left out."""
    found = {}
    for name, figure in FIGURES.items():
        each = []
        for mine, other in zip(point.rounds, base.rounds, strict=False):
            value, reference = figure(mine), figure(other)
            if value is not None and reference:
                each.append(value / reference)
        if each:
            found[name] = Ratio(median(each), min(each), max(each))
    return found


class RunLogs:
    """Writes into one directory, which is made; files of an earlier run in it are replaced.

    ``settings.json``       what was asked for, without the API key
    ``NAME-cN-rR.jsonl``    a line for each request of endpoint NAME at concurrency N in round R
    ``report.json``         as ``--json``
    ``report.txt``          the table
    """

    def __init__(self, directory: Path, settings: bytes) -> None:
        """Raises ``OSError`` when the directory cannot be written."""
        self._directory = directory
        self._open: IO[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.write("settings.json", settings)

    def write(self, name: str, content: bytes) -> None:
        """Write a file; raises ``OSError``."""
        (self._directory / name).write_bytes(content)

    def begin(self, name: str, concurrency: int | None, round_number: int) -> None:
        """Begin the lines of a run; raises ``OSError``."""
        self.end()
        level = "" if concurrency is None else f"-c{concurrency}"
        plain = re.sub(r"[^\w.-]+", "_", name)
        self._open = (self._directory / f"{plain}{level}-r{round_number}.jsonl").open("wb")

    def add(self, line: RequestLine) -> None:
        """Note a request; raises ``OSError``."""
        assert self._open is not None, "a run has begun"
        self._open.write(msgspec.json.encode(line) + b"\n")

    def end(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
