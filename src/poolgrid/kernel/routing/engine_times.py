"""Step times of an engine, from its card or from engines of its kind: where predictions start.

Whatever is wrong with it by a factor is learned (``LearnedSpeeds``). So what counts here is the shape: how
much dearer a long prompt is than a short one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from poolgrid.kernel.decision.policy import Candidates, FloatArray, IndexArray, RoutingRequest
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.wire.card import StepTimes, WorkerCard
from poolgrid.kernel.wire.identifiers import WorkerKey

HOST_WORTH, DISK_WORTH = 0.75, 0.25
"""What a block on a lower tier spares of its computation: it must be brought back first."""


class StepCurve:
    """Straight lines between points; beyond the last prompt point its slope holds, before the first its value."""

    __slots__ = (
        "_decode", "_decode_ms", "_prefill", "_prefill_ms", "_shares", "_slope", "_tokens", "least_ms", "one_token_ms",
    )  # fmt: skip

    def __init__(self, prefill: tuple[tuple[float, float], ...], decode: tuple[tuple[float, float], ...]) -> None:
        """``prefill`` are prompt tokens of a step and milliseconds, ``decode`` used shares of KV and milliseconds.

        At least one point each, by increasing first value.
        """
        self._prefill, self._decode = _lines(prefill), _lines(decode)
        (tokens, ms, slopes), (shares, decode_ms, _) = self._prefill, self._decode
        self._tokens, self._prefill_ms, self._shares, self._decode_ms = map(np.array, (tokens, ms, shares, decode_ms))
        self._slope = max(0.0, slopes[-1]) if slopes else 0.0
        self.least_ms = float(prefill[0][1])
        """What the smallest step takes that is known."""
        self.one_token_ms = self.one_step_ms(1.0)

    def one_prompt_ms(self, tokens: float, step_tokens: float) -> float:
        if tokens < step_tokens:
            return self.one_step_ms(tokens)
        steps = tokens // step_tokens
        return steps * self.one_step_ms(step_tokens) + self.one_step_ms(tokens - steps * step_tokens)

    def one_step_ms(self, tokens: float) -> float:
        if tokens <= 0.0:
            return 0.0
        xs, ys, slopes = self._prefill
        place = bisect_right(xs, tokens)
        if not place:
            return ys[0]
        if place == len(xs):
            return ys[-1] + self._slope * (tokens - xs[-1])
        return slopes[place - 1] * (tokens - xs[place - 1]) + ys[place - 1]

    def one_decode_ms(self, share: float) -> float:
        """Return what ``decode_ms`` does, of one worker and to the bit."""
        xs, ys, slopes = self._decode
        place = bisect_right(xs, share)
        if not place or place == len(xs):
            return ys[place and -1]
        return slopes[place - 1] * (share - xs[place - 1]) + ys[place - 1]

    def step_ms(self, tokens: FloatArray) -> FloatArray:
        """Return the time of a step that computes so many prompt tokens each; 0 for none."""
        beyond = np.maximum(0.0, tokens - self._tokens[-1])
        times: FloatArray = np.interp(tokens, self._tokens, self._prefill_ms) + self._slope * beyond
        return np.where(tokens > 0.0, times, 0.0)

    def prompt_ms(self, tokens: FloatArray, step_tokens: FloatArray) -> FloatArray:
        """Return the time to compute prompts of so many tokens, in steps of at most ``step_tokens``."""
        steps = np.floor(tokens / step_tokens)
        return steps * self.step_ms(step_tokens) + self.step_ms(tokens - steps * step_tokens)

    def decode_ms(self, share: FloatArray) -> FloatArray:
        """Return the time of a decode step while such shares of the KV blocks are in use."""
        times: FloatArray = np.interp(share, self._shares, self._decode_ms)
        return times


def _lines(points: tuple[tuple[float, float], ...]) -> tuple[list[float], list[float], list[float]]:
    """Return the places of points, their values, and the slopes between them: ``np.interp`` in plain numbers."""
    return (
        [float(x) for x, _ in points],
        [float(y) for _, y in points],
        [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)],
    )


def _published_prefill(tokens: int) -> float:
    return 4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142


PUBLISHED = StepCurve(
    tuple((tokens, _published_prefill(tokens)) for tokens in (1, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)),
    tuple((p, -25.74 * p * p + 54.01 * p + 5.74) for p in (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)),
)
"""For workers whose card has no times: the polynomials of Dynamo's published simulator (its mocker)."""


@lru_cache(maxsize=64)
def _curve_of(times: StepTimes) -> StepCurve:
    return StepCurve(times.prefill, times.decode) if times.prefill and times.decode else PUBLISHED


def card_prompt_ms(card: WorkerCard, tokens: float) -> float:
    """Return how long a worker takes to compute so many prompt tokens by its card, at pace 1."""
    return _curve_of(card.step_times).one_prompt_ms(tokens, float(max(1, card.limits.max_num_tokens)))


def refill_ms(card: WorkerCard) -> float:
    """Return how long a worker takes to compute as many tokens as its cache holds, in full steps, at pace 1."""
    step_tokens = max(1, card.limits.max_num_tokens)
    tokens = card.limits.total_kv_blocks * card.block_size
    return _curve_of(card.step_times).one_step_ms(step_tokens) / step_tokens * tokens


class EngineKind(NamedTuple):
    """What a worker's card has about its engine."""

    curve: StepCurve
    """Step times, at pace 1."""
    step_tokens: float
    """Prompt tokens of one step."""
    total_blocks: float


@dataclass(frozen=True, slots=True)
class EngineColumns:
    """Step times on the workers' cards."""

    curves: tuple[StepCurve, ...]
    curve: IndexArray
    step_tokens: FloatArray
    total_blocks: FloatArray
    kinds: tuple[EngineKind, ...]
    """The same by worker, in plain numbers; one object for all of a kind."""
    keys: tuple[WorkerKey, ...]

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> EngineColumns:
        places: dict[StepTimes, int] = {}
        curve = [places.setdefault(worker.card.step_times, len(places)) for worker in workers]
        curves = tuple(map(_curve_of, places))
        limits = [worker.card.limits for worker in workers]
        step_tokens = [float(max(1, each.max_num_tokens)) for each in limits]
        total_blocks = [float(max(1, each.total_kv_blocks)) for each in limits]
        kinds = list(map(EngineKind, [curves[place] for place in curve], step_tokens, total_blocks))
        same = {kind: kind for kind in kinds}
        return cls(
            curves,
            np.array(curve, np.intp),
            np.array(step_tokens, np.float64),
            np.array(total_blocks, np.float64),
            tuple(same[kind] for kind in kinds),
            tuple(worker.key for worker in workers),
        )


class Engines(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What is known of the candidates' engines; rows as in ``Candidates``."""

    curves: tuple[StepCurve, ...]
    """The different step times that there are."""
    curve: IndexArray
    """Whose place in ``curves`` is each worker's."""
    step_tokens: FloatArray
    """Prompt tokens of one step."""
    total_blocks: FloatArray
    paces: FloatArray
    """Speed factor of each: real times over those of its curve."""
    done_ms: FloatArray
    """Milliseconds at pace 1 by which its queue is shorter than by its tokens, since part of it is computed."""
    waiting: FloatArray
    """Requests that wait for their first token there."""
    choices_per_ms: float
    """Requests that come, of late."""
    typical_ms: float
    """What a prompt took of them at pace 1, on average."""
    loads: FloatArray
    """Requests that each was sent per millisecond of late, times its pace."""
    idle_paces: FloatArray
    """Speed factor of each while it has nothing to do."""

    def paces_at(self, requests: FloatArray) -> FloatArray:
        """Return the speed factor of each, which has so many requests."""
        return np.where(requests > 0.0, self.paces, self.idle_paces)

    def prompt_ms(self, tokens: FloatArray) -> FloatArray:
        """Return how long each would take at pace 1 to compute so many prompt tokens: one number a worker, or a row
        of them for each of several prompts."""
        if len(self.curves) == 1:
            return self.curves[0].prompt_ms(tokens, self.step_tokens)
        times = np.zeros(tokens.shape)
        for place, curve in enumerate(self.curves):
            rows = self.curve == place
            times[..., rows] = curve.prompt_ms(tokens[..., rows], self.step_tokens[rows])
        return times

    def least_ms(self) -> FloatArray:
        """Return what the smallest step of each takes at pace 1."""
        return np.array([curve.least_ms for curve in self.curves], np.float64)[self.curve]

    def step_of(self, row: int) -> tuple[float, StepCurve]:
        """Return how many prompt tokens a step of one of them may have, and how long it takes at pace 1."""
        return float(self.step_tokens[row]), self.curves[self.curve[row]]

    def joined_ms(self, queued: FloatArray, tokens: FloatArray) -> FloatArray:
        """Return how much longer at pace 1 the last step of so many queued tokens takes when others join it.

        A step has room for ``step_tokens``, and all that is in it is there when it ends.
        """
        last = queued - np.floor(queued / self.step_tokens) * self.step_tokens
        full = np.minimum(self.step_tokens, last + tokens)
        return np.where(last > 0.0, self.prompt_ms(full) - self.prompt_ms(last), 0.0)

    def decode_ms(self, active_blocks: FloatArray) -> FloatArray:
        """Return how long a decode step of each takes at pace 1 while so many blocks are active."""
        shares = active_blocks / self.total_blocks
        if len(self.curves) == 1:
            return self.curves[0].decode_ms(shares)
        times = np.zeros(len(shares))
        for place, curve in enumerate(self.curves):
            rows = self.curve == place
            times[rows] = curve.decode_ms(shares[rows])
        return times


class FewEngines(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The same of a few candidates, in plain numbers."""

    kinds: tuple[EngineKind, ...]
    learned: tuple[tuple[float, float, float, float, float], ...]
    """Of each its pace, milliseconds done, waiting requests, load and pace while it has nothing to do."""
    choices_per_ms: float
    typical_ms: float

    def step_of(self, row: int) -> tuple[float, StepCurve]:
        kind = self.kinds[row]
        return kind.step_tokens, kind.curve


def uncached_of_few(request: RoutingRequest, candidates: Candidates) -> list[float]:
    """Return what ``uncached_tokens`` does, of a few workers and to the bit."""
    isl, block_size = request.isl, request.block_size
    device, host, disk = candidates.device_overlap, candidates.host_overlap, candidates.disk_overlap
    if not (any(device) or any(host) or any(disk)):
        return [max(1.0, float(isl))] * len(device)
    return [
        max(1.0, isl - (on_device + HOST_WORTH * on_host + DISK_WORTH * on_disk) * block_size)
        for on_device, on_host, on_disk in zip(device, host, disk, strict=True)
    ]


def uncached_tokens(request: RoutingRequest, device: FloatArray, host: FloatArray, disk: FloatArray) -> FloatArray:
    """Return the tokens of a prompt that each worker would compute, which holds so many of its blocks on each tier."""
    held = device + HOST_WORTH * host + DISK_WORTH * disk
    # Engines compute at least one token, or there would be no next one.
    tokens: FloatArray = np.maximum(1.0, request.isl - held * request.block_size)
    return tokens
