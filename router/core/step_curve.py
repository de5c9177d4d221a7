"""How long an engine's steps take, as its card says or as engines of its kind do: what predictions start from.

Whatever is wrong with it by a factor is learned (``poolgrid.router.core.paces``). So what counts here is the shape: how
much dearer a long prompt is than a short one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class StepCurve:
    """Straight lines between points; beyond the last prompt point its slope goes on, before the first its value."""

    __slots__ = ("_decode_ms", "_prefill_ms", "_shares", "_slope", "_tokens")

    def __init__(self, prefill: tuple[tuple[float, float], ...], decode: tuple[tuple[float, float], ...]) -> None:
        """``prefill`` are prompt tokens of a step and milliseconds, ``decode`` used shares of KV and milliseconds.

        At least one point each, by increasing first value.
        """
        self._tokens = np.array([x for x, _ in prefill], np.float64)
        self._prefill_ms = np.array([ms for _, ms in prefill], np.float64)
        self._shares = np.array([x for x, _ in decode], np.float64)
        self._decode_ms = np.array([ms for _, ms in decode], np.float64)
        self._slope = 0.0
        if len(prefill) > 1:
            (x0, y0), (x1, y1) = prefill[-2:]
            self._slope = max(0.0, (y1 - y0) / (x1 - x0))

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


def _published_prefill(tokens: int) -> float:
    return 4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142


PUBLISHED = StepCurve(
    tuple((tokens, _published_prefill(tokens)) for tokens in (1, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)),
    tuple((p, -25.74 * p * p + 54.01 * p + 5.74) for p in (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)),
)
"""For workers whose card says nothing: the polynomials of the field's published simulator (Dynamo's mocker)."""
