"""What is new in a TensorRT-LLM result, which is one object that grows. Pure.

A result's iterator yields the same object at every step; its ``*_diff`` properties are about the last step only. A
cursor therefore remembers how much of the cumulative lists was taken, and may be asked at any time, after any number of
steps: nothing is lost and nothing comes twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import FinishReason, TokenLogprobs
from poolgrid.kernel.worker_protocol.engine_numbers import UNLIKELY, logprob_of, token_of

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "not_finished": FinishReason.LENGTH,
    "cancelled": FinishReason.CANCELLED,
}
"""The engine's finish reasons as the wire has them; every other one is an error."""

GOES_ON = frozenset({"length", "not_finished"})
"""Finish reasons of a context request after which a decode worker must continue. Anything else is the request's end."""


class OutputCursor:
    """How much of one output was taken."""

    __slots__ = ("_alternatives", "_missing", "taken")

    def __init__(self, alternatives: int | None) -> None:
        self._alternatives = alternatives
        self._missing: int | None = None
        self.taken = 0
        """Tokens taken so far."""

    def take(self, output: Any) -> tuple[bytes, tuple[TokenLogprobs, ...] | None]:
        """Return the tokens (u32 little-endian) since the last call, and their log probabilities if asked for.

        A decode engine may have none for the first token, which the prefill engine made: such a token gets 0, and the
        router, which has the real one, swallows it.
        """
        token_ids: Sequence[int] = output.token_ids or ()
        start = self.taken
        fresh = list(token_ids[start:])
        self.taken += len(fresh)
        if self._alternatives is None or not fresh:
            return pack_tokens(fresh), None
        logprobs: Sequence[Any] = output.logprobs or ()
        if self._missing is None:
            self._missing = max(0, len(token_ids) - len(logprobs))
        report = []
        for at, token_id in enumerate(fresh, start - self._missing):
            known = 0 <= at < len(logprobs)
            report.append(
                token_logprobs(token_id, logprobs[at], self._alternatives) if known else TokenLogprobs(token_id, 0.0)
            )
        return pack_tokens(fresh), tuple(report)


def token_logprobs(
    token_id: int, entry: Mapping[int, Any] | float, alternatives: int, absent: float = 0.0
) -> TokenLogprobs:
    """Return one token's log probabilities: its own, and the best ``alternatives`` of those that were reported."""
    if not isinstance(entry, Mapping):
        return TokenLogprobs(token_id, logprob_of(float(entry)))
    own = entry.get(token_id)
    values = [(token_of(other), logprob_of(float(each.logprob))) for other, each in entry.items()]
    best = sorted(values, key=lambda pair: -pair[1])
    value = absent if own is None else logprob_of(float(own.logprob))
    return TokenLogprobs(token_id, value, tuple(best[:alternatives]))


def prompt_logprobs(
    prompt: Sequence[int], entries: Sequence[Mapping[int, Any] | float], alternatives: int
) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of the prompt's tokens from the second on.

    The engine has a row for each token that it computed, and row t is about the token at t + 1: the first row of n is
    about the second token, the last about the first that is generated. Where a prefix was reused rows are missing at
    the beginning, and so are the values of its tokens.
    """
    rows = entries[max(0, len(entries) - len(prompt)) : len(entries) - 1] if entries else ()
    tokens = prompt[len(prompt) - len(rows) :]
    return tuple(
        token_logprobs(token_id, row, alternatives, UNLIKELY) for token_id, row in zip(tokens, rows, strict=True)
    )
