"""Processors that forbid tokens: those of a list, or all that are not on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.workers.logits.arguments import no_others, token_list
from poolgrid.workers.logits.processor import LogitsProcessor, LogitsRow, RequestFacts

NEVER = float("-inf")


class BannedTokens:
    """None of these tokens is ever chosen."""

    def __init__(self, banned: Sequence[int]) -> None:
        self._banned = list(banned)

    def __call__(self, token_ids: Sequence[int], logits: LogitsRow) -> None:
        logits[self._banned] = NEVER


class AllowedTokens:
    """Only these tokens are ever chosen."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self._allowed = list(allowed)

    def __call__(self, token_ids: Sequence[int], logits: LogitsRow) -> None:
        """Forbid all other tokens."""
        kept = logits[self._allowed]
        logits[:] = NEVER
        logits[self._allowed] = kept


def banned_tokens(arguments: Mapping[str, Any], facts: RequestFacts) -> LogitsProcessor:
    """Make a processor from ``{"token_ids": [...]}``."""
    no_others(arguments, ("token_ids",))
    return BannedTokens(token_list(arguments, "token_ids", facts.vocabulary_size))


def allowed_tokens(arguments: Mapping[str, Any], facts: RequestFacts) -> LogitsProcessor:
    """Make a processor from ``{"token_ids": [...]}``."""
    no_others(arguments, ("token_ids",))
    return AllowedTokens(token_list(arguments, "token_ids", facts.vocabulary_size))
