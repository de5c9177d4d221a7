"""How long one engine step takes, in milliseconds.

A step that computes prompt tokens and decodes takes the sum of both parts. The default is the polynomial that the
field's published simulator was fitted with; ``TableTiming`` replaces it by measurements of one's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from pydantic import AfterValidator

from poolgrid.kernel.wire.card import StepTimes

SPEEDUP_MAX = 1e6


class TimingModel(Protocol):
    """Step time as a function of the work in the step."""

    def prefill_ms(self, new_tokens: int) -> float:
        """Return the time to compute ``new_tokens`` prompt tokens in one step; 0 for none."""
        ...

    def decode_ms(self, used_share: float) -> float:
        """Return the time of one decode step while ``used_share`` (0 to 1) of the KV blocks is in use."""
        ...


class PolynomialTiming:
    """The polynomials of the field's published simulator (Dynamo's mocker).

    prefill = 4.209989e-7·n² + 1.518344e-2·n + 16.50142 for n new tokens in the batch (0 if none);
    decode = max(1, -25.74·p² + 54.01·p + 5.74) for p, the used share of KV blocks, clamped to 0..1.
    """

    def prefill_ms(self, new_tokens: int) -> float:
        if new_tokens <= 0:
            return 0.0
        return 4.209989e-7 * new_tokens * new_tokens + 1.518344e-2 * new_tokens + 16.50142

    def decode_ms(self, used_share: float) -> float:
        p = min(1.0, max(0.0, used_share))
        return max(1.0, -25.74 * p * p + 54.01 * p + 5.74)


class TableError(ValueError):
    """A timing table cannot be used; the message names the place."""


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    prefill: list[tuple[float, float]]
    decode: list[tuple[float, float]]
    source: str = ""


@dataclass(frozen=True, slots=True)
class _Curve:
    """Straight lines between measured points; beyond the last the last slope continues, before the first its value."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    extrapolates: bool

    def at(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        if x >= xs[-1]:
            if not self.extrapolates or len(xs) == 1:
                return ys[-1]
            right = len(xs) - 1
        else:
            right = bisect_right(xs, x)
        x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
        return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _curve(points: Sequence[tuple[float, float]], where: str, x_name: str, x_max: float, extrapolates: bool) -> _Curve:
    if not points:
        raise TableError(f"reading a timing table: {where} is empty, it needs at least one [{x_name}, ms] pair")
    for index, (x, ms) in enumerate(points):
        if not 0.0 <= x <= x_max:
            raise TableError(f"reading a timing table: {where}[{index}] has {x_name} {x}, allowed are 0 to {x_max:g}")
        if not 0.0 < ms <= 1e9:
            raise TableError(f"reading a timing table: {where}[{index}] has {ms} ms, allowed are above 0 up to 1e9")
    for index, ((before, _), (after, _)) in enumerate(pairwise(points), start=1):
        if after <= before:
            raise TableError(
                f"reading a timing table: {where}[{index}] has {x_name} {after} after {before}, they must increase"
            )
    return _Curve(tuple(x for x, _ in points), tuple(ms for _, ms in points), extrapolates)


class TableTiming:
    """Step times interpolated from measured points.

    The JSON form is ``{"prefill": [[tokens, ms], ...], "decode": [[used_share, ms], ...]}``, each list by increasing
    first value, and ``source``, which is free text. Prefill beyond the last point continues its last slope;
    decode outside keeps the nearest value.
    """

    def __init__(
        self,
        prefill: Sequence[tuple[float, float]],
        decode: Sequence[tuple[float, float]],
        where: str = "the table",
        source: str = "",
    ) -> None:
        self.source = source
        """What was measured, and how; empty = not in the table."""
        self._prefill = _curve(prefill, f"{where}: prefill", "tokens", 1e9, extrapolates=True)
        self._decode = _curve(decode, f"{where}: decode", "used_share", 1.0, extrapolates=False)

    @classmethod
    def from_json(cls, data: bytes, where: str = "the table") -> TableTiming:
        """Return the timing of a JSON table; raise ``TableError`` naming the place that is wrong."""
        try:
            table = msgspec.json.decode(data, type=_Table)
        except msgspec.MsgspecError as error:
            raise TableError(f"reading a timing table: {where}: {error}") from None
        return cls(table.prefill, table.decode, where, table.source)

    @classmethod
    def from_file(cls, path: Path) -> TableTiming:
        """Return the timing of a JSON file; raise ``TableError`` naming the file and the place."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TableError(f"reading a timing table: {path}: {error.strerror}") from error
        return cls.from_json(data, str(path))

    def prefill_ms(self, new_tokens: int) -> float:
        return self._prefill.at(new_tokens) if new_tokens > 0 else 0.0

    def decode_ms(self, used_share: float) -> float:
        return self._decode.at(used_share)


PREFILL_POINTS = (1, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
DECODE_POINTS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Where a worker's card has the times of its steps."""


def step_times_of(timing: TimingModel) -> StepTimes:
    """Return these times as a card has them."""
    return StepTimes(
        tuple((tokens, timing.prefill_ms(tokens)) for tokens in PREFILL_POINTS),
        tuple((share, timing.decode_ms(share)) for share in DECODE_POINTS),
    )


class ScaledTiming:
    """Another model's times divided by a speed-up factor."""

    def __init__(self, model: TimingModel, speedup: float) -> None:
        if not 0.0 < speedup <= SPEEDUP_MAX:
            raise ValueError(f"scaling step times: speedup is {speedup}, allowed are above 0 up to {SPEEDUP_MAX:g}")
        self._model = model
        self._speedup = speedup

    def prefill_ms(self, new_tokens: int) -> float:
        """Return the shortened time to compute ``new_tokens`` prompt tokens."""
        return self._model.prefill_ms(new_tokens) / self._speedup

    def decode_ms(self, used_share: float) -> float:
        return self._model.decode_ms(used_share) / self._speedup


TIMINGS = ("published", "h100-qwen3-8b", "h200-qwen3-8b")
"""The names there are; ``published`` are the formulas, every other is a file of ours."""

DIRECTORY = Path(__file__).parent / "timings"

PUBLISHED = "published"
MEASURED: tuple[str, ...] = TIMINGS[1:]


def timing_model(timing: str = PUBLISHED) -> TimingModel:
    """Return the step times of a name, or of a file of one's own; raises ``TableError`` for a file that is no table."""
    if timing == PUBLISHED:
        return PolynomialTiming()
    return shipped_timing(timing) if timing in MEASURED else TableTiming.from_file(Path(timing))


def checked_timing(timing: str) -> str:
    """Return what names step times; raises ``ValueError`` for no name and no file."""
    if timing not in TIMINGS and not Path(timing).is_file():
        raise ValueError(f"must be {', '.join(TIMINGS)} or a JSON file of step times, and there is no such file")
    return timing


Timing = Annotated[str, AfterValidator(checked_timing)]
"""A setting that chooses step times."""


def shipped_timing(name: str) -> TableTiming:
    """Return a measurement that comes with the package; raises ``TableError`` naming those that there are."""
    if name not in MEASURED:
        raise TableError(f"choosing step times: {name!r} is unknown, there are {', '.join(TIMINGS)}")
    return TableTiming.from_file(DIRECTORY / f"{name}.json")
