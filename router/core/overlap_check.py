"""A live cross-check of one worker's event stream: what the index says it holds against what it really reuses.

Rules
    1. When the worker starts a request, the prompt tokens that it reports as reused are compared with what the index
       said of the prompt between the choice and the start, whichever is nearest. A block more or less is no
       disagreement, because engines compute the last tokens anew.
    2. The last ``WINDOW`` requests for which either number is above zero count, weighed by tokens.
    3. From ``LEAST_REQUESTS`` of them on, a share of disagreeing tokens above ``SUSPECT_ABOVE`` makes the stream
       suspect; it stays so until the share falls below ``TRUSTED_BELOW``.

This is how a stream that never fills is found: the engine reuses what the index has never heard of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

WINDOW: Final = 64
"""Requests that count: a few seconds of a busy worker, so that the verdict follows a stream that breaks or heals."""

LEAST_REQUESTS: Final = 16
"""Fewer could be chance: a burst of equal prompts, an eviction under way."""

SUSPECT_ABOVE: Final = 0.5
"""More wrong than right. Evictions between choice and start, the usual disagreement, stay far below."""

TRUSTED_BELOW: Final = 0.25


class OverlapCheck:
    """Predicted against realised overlap of one worker."""

    __slots__ = ("_window", "disagreeing_tokens", "is_suspect", "predicted_tokens", "realised_tokens", "weight_tokens")

    def __init__(self, window: Iterable[tuple[int, int, int]] = (), is_suspect: bool = False) -> None:
        self._window: deque[tuple[int, int, int]] = deque()
        self.predicted_tokens = 0
        """Sum over the window."""
        self.realised_tokens = 0
        self.disagreeing_tokens = 0
        self.weight_tokens = 0
        self.is_suspect = is_suspect
        for predicted, realised, disagreeing in window:
            self._enter(predicted, realised, disagreeing)

    def window(self) -> list[tuple[int, int, int]]:
        """Return what counts: predicted, realised and disagreeing tokens of each request, oldest first."""
        return list(self._window)

    def __len__(self) -> int:
        return len(self._window)

    @property
    def disagreement(self) -> float:
        """Return the share of tokens that the index and the worker disagree about, 0 to 1."""
        return self.disagreeing_tokens / self.weight_tokens if self.weight_tokens else 0.0

    def add(self, predicted_tokens: int, realised_tokens: int, block_size: int) -> bool:
        """Count a request; return whether the verdict changed."""
        if predicted_tokens == 0 and realised_tokens == 0:
            return False
        difference = abs(predicted_tokens - realised_tokens)
        self._enter(predicted_tokens, realised_tokens, 0 if difference <= block_size else difference)
        if len(self._window) < LEAST_REQUESTS:
            return False
        before = self.is_suspect
        disagreement = self.disagreement
        if disagreement > SUSPECT_ABOVE:
            self.is_suspect = True
        elif disagreement < TRUSTED_BELOW:
            self.is_suspect = False
        return self.is_suspect is not before

    def _enter(self, predicted: int, realised: int, disagreeing: int) -> None:
        window = self._window
        window.append((predicted, realised, disagreeing))
        self.predicted_tokens += predicted
        self.realised_tokens += realised
        self.disagreeing_tokens += disagreeing
        self.weight_tokens += predicted if predicted > realised else realised
        if len(window) > WINDOW:
            predicted, realised, disagreeing = window.popleft()
            self.predicted_tokens -= predicted
            self.realised_tokens -= realised
            self.disagreeing_tokens -= disagreeing
            self.weight_tokens -= predicted if predicted > realised else realised

    def says(self) -> str:
        return (
            f"over {len(self._window)} requests the index predicted {self.predicted_tokens} cached tokens and the "
            f"worker reused {self.realised_tokens}; they disagree about {self.disagreement:.0%}"
        )
