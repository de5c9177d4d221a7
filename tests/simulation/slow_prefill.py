"""Engines whose tokens stand for sixteen each, so that prompts of real length are quick to simulate."""

from __future__ import annotations

from poolgrid.server.workers.timing import timing_model

SCALE = 1 / 16
"""Lengths and step times are divided by this: the blocks of one full-size block of 256 tokens."""


class SlowPrefill:
    """Step times of an H100 for tokens that stand for sixteen each."""

    def __init__(self) -> None:
        self._model = timing_model("h100-qwen3-8b")

    def prefill_ms(self, new_tokens: int) -> float:
        return self._model.prefill_ms(round(new_tokens / SCALE))

    def decode_ms(self, used_share: float) -> float:
        return self._model.decode_ms(used_share) / SCALE
