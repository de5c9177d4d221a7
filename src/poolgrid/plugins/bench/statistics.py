"""What a run measured: distributions in bounded memory, counts by worker, errors by kind, and the report of it all.

A ``Distribution`` counts values in buckets that grow by half a percent, so a percentile is within 0.25 % of a value
that was measured, two distributions merge exactly, and memory does not grow with the length of a run. Mean, count,
smallest and largest are exact.

Several runs side by side: endpoints at several concurrencies, in rounds, and how they compare.

Of each round the endpoints are run one after the other on the same prompts, so what the machine does besides falls on
all of them; a ratio is that of two runs of one round, and the median over the rounds is what is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec

ERROR_SAMPLES_MAX = 3
"""Messages kept per kind of error: enough to see what it is."""

ERROR_KINDS_MAX = 64
"""Kinds of errors that are counted; further ones count as ``other``."""

WORKERS_MAX = 65_536
"""Workers counted by name; further ones count as ``other``."""

GROWTH = 1.005
"""Ratio of one bucket's limits."""

_SCALE = 1 / math.log(GROWTH)
_SMALLEST = 1e-6
"""Values up to this (ms: a nanosecond) count as zero."""


class Distribution:
    """Values of one kind, e.g. milliseconds to the first token."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.smallest = math.inf
        self.largest = -math.inf
        self._zeros = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: float, count: int = 1) -> None:
        self.count += count
        self.total += value * count
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)
        if value <= _SMALLEST:
            self._zeros += count
        else:
            bucket = math.floor(math.log(value) * _SCALE)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def merge(self, other: Distribution) -> None:
        """Count everything that ``other`` counted, too."""
        self.count += other.count
        self.total += other.total
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        self._zeros += other._zeros
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Return the value that ``percent`` of the values do not exceed (nearest rank); ``None`` without values."""
        if not 0 <= percent <= 100:
            raise ValueError(f"percentile: {percent}, allowed are values from 0 to 100")
        if not self.count:
            return None
        rank = max(1, math.ceil(percent / 100 * self.count))
        passed = self._zeros
        if rank <= passed:
            return min(_SMALLEST, max(0.0, self.smallest)) if self._zeros else 0.0
        for bucket in sorted(self._buckets):
            passed += self._buckets[bucket]
            if passed >= rank:
                middle = math.exp((bucket + 0.5) / _SCALE)
                return min(self.largest, max(self.smallest, middle))
        return self.largest

    def summary(self) -> Summary:
        return Summary(self.mean, self.percentile(50), self.percentile(90), self.percentile(99))


class Summary(msgspec.Struct, frozen=True):
    """Mean and percentiles of a distribution; ``None`` where nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class WorkerShare(msgspec.Struct):
    """What one worker was given."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class ErrorKind(msgspec.Struct):
    """How often one kind of error occurred, and the first few messages."""

    count: int = 0
    samples: list[str] = []


class Outcome(msgspec.Struct):
    """What one successful request measured; times in milliseconds."""

    ttft_ms: float
    """From the scheduled time (open loop, replay) or from sending (closed loop) to the first text."""
    latency_ms: float
    """From the same moment to the end of the stream."""
    gaps_ms: list[tuple[float, int]]
    """Times between chunks: (gap, how many chunks had it)."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    usage_reported: bool = True
    worker: str | None = None
    reusable_tokens: int | None = None
    """Prompt tokens that were sent or generated before, in its conversation or as its system prompt; ``None`` = not
    known."""


class Measurements:
    """Everything measured so far; ``add`` and ``add_error`` take one finished request each."""

    def __init__(self) -> None:
        self.succeeded = 0
        self.errors = 0
        self.wrong_texts = 0
        self.cancelled = 0
        self.delayed = 0
        """Requests that were due and had to wait for the in-flight limit."""
        self.without_usage = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.reusable_tokens: int | None = None
        """Sum over the requests of which it is known; ``None`` where it is of none."""
        self.ttft_ms = Distribution()
        self.itl_ms = Distribution()
        self.latency_ms = Distribution()
        self.per_worker: dict[str, WorkerShare] = {}
        self.errors_by_kind: dict[str, ErrorKind] = {}

    @property
    def requests(self) -> int:
        return self.succeeded + self.errors

    def add(self, outcome: Outcome) -> None:
        """Count a request that succeeded."""
        self.succeeded += 1
        self.ttft_ms.add(outcome.ttft_ms)
        self.latency_ms.add(outcome.latency_ms)
        for gap_ms, count in outcome.gaps_ms:
            self.itl_ms.add(gap_ms, count)
        self.prompt_tokens += outcome.prompt_tokens
        self.cached_tokens += outcome.cached_tokens
        self.output_tokens += outcome.output_tokens
        self.without_usage += not outcome.usage_reported
        if outcome.reusable_tokens is not None:
            self.reusable_tokens = (self.reusable_tokens or 0) + outcome.reusable_tokens
        if outcome.worker is not None:
            share = self._share(outcome.worker)
            share.requests += 1
            share.prompt_tokens += outcome.prompt_tokens
            share.cached_tokens += outcome.cached_tokens

    def add_error(self, kind: str, message: str) -> None:
        self.errors += 1
        entry = self._kind(kind)
        entry.count += 1
        if len(entry.samples) < ERROR_SAMPLES_MAX and message not in entry.samples:
            entry.samples.append(message)

    def merge(self, other: Measurements) -> None:
        """Count everything that ``other`` counted, too (another process of the same run)."""
        for name in (
            "succeeded", "errors", "wrong_texts", "cancelled", "delayed", "without_usage",
            "prompt_tokens", "cached_tokens", "output_tokens",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.reusable_tokens is not None:
            self.reusable_tokens = (self.reusable_tokens or 0) + other.reusable_tokens
        self.ttft_ms.merge(other.ttft_ms)
        self.itl_ms.merge(other.itl_ms)
        self.latency_ms.merge(other.latency_ms)
        for name, share in other.per_worker.items():
            mine = self._share(name)
            mine.requests += share.requests
            mine.prompt_tokens += share.prompt_tokens
            mine.cached_tokens += share.cached_tokens
        for kind, error in other.errors_by_kind.items():
            entry = self._kind(kind)
            entry.count += error.count
            entry.samples = (entry.samples + [text for text in error.samples if text not in entry.samples])[
                :ERROR_SAMPLES_MAX
            ]

    def _share(self, worker: str) -> WorkerShare:
        if worker not in self.per_worker and len(self.per_worker) >= WORKERS_MAX:
            worker = "other"
        return self.per_worker.setdefault(worker, WorkerShare())

    def _kind(self, kind: str) -> ErrorKind:
        if kind not in self.errors_by_kind and len(self.errors_by_kind) >= ERROR_KINDS_MAX:
            kind = "other"
        return self.errors_by_kind.setdefault(kind, ErrorKind())


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: the keys of ``--json``."""

    mode: str
    url: str
    model: str
    requests: int
    errors: int
    errors_by_kind: dict[str, ErrorKind]
    wrong_texts: int
    cancelled: int
    delayed: int
    without_usage: int
    interrupted: bool
    duration_s: float
    ttft_ms: Summary
    itl_ms: Summary
    latency_ms: Summary
    prompt_tokens: int
    cached_tokens: int
    cached_token_ratio: float | None
    ideal_cached_token_ratio: float | None
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    per_worker: dict[str, WorkerShare]
    worker_tokens_max_over_mean: float | None
    worker_requests_max_over_mean: float | None


def max_over_mean(values: Iterable[float]) -> float | None:
    """Return the largest value over the mean, 1 for perfect balance; ``None`` without values or when all are 0."""
    found = list(values)
    total = sum(found)
    return max(found) * len(found) / total if total else None


def report(
    measured: Measurements,
    *,
    mode: str,
    url: str,
    model: str,
    duration_s: float,
    ideal_cached_token_ratio: float | None,
    interrupted: bool,
) -> Report:
    """Sum up a run."""
    workers = dict(sorted(measured.per_worker.items()))
    return Report(
        mode=mode,
        url=url,
        model=model,
        requests=measured.requests,
        errors=measured.errors,
        errors_by_kind=dict(sorted(measured.errors_by_kind.items())),
        wrong_texts=measured.wrong_texts,
        cancelled=measured.cancelled,
        delayed=measured.delayed,
        without_usage=measured.without_usage,
        interrupted=interrupted,
        duration_s=duration_s,
        ttft_ms=measured.ttft_ms.summary(),
        itl_ms=measured.itl_ms.summary(),
        latency_ms=measured.latency_ms.summary(),
        prompt_tokens=measured.prompt_tokens,
        cached_tokens=measured.cached_tokens,
        cached_token_ratio=measured.cached_tokens / measured.prompt_tokens if measured.prompt_tokens else None,
        ideal_cached_token_ratio=ideal_cached_token_ratio,
        output_tokens=measured.output_tokens,
        output_tokens_per_s=measured.output_tokens / duration_s if duration_s else 0.0,
        requests_per_s=measured.succeeded / duration_s if duration_s else 0.0,
        per_worker=workers,
        worker_tokens_max_over_mean=max_over_mean(share.prompt_tokens for share in workers.values()),
        worker_requests_max_over_mean=max_over_mean(share.requests for share in workers.values()),
    )


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
