"""A processor that makes an answer begin with given tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.workers.logits.arguments import no_others, token_list
from poolgrid.workers.logits.processor import LogitsProcessor, LogitsRow, RequestFacts
from poolgrid.workers.logits.token_sets import NEVER


class ForcedPrefix:
    """The first output tokens are these; what follows is free."""

    def __init__(self, prefix: Sequence[int], isl: int) -> None:
        self._prefix = tuple(prefix)
        self._isl = isl

    def __call__(self, token_ids: Sequence[int], logits: LogitsRow) -> None:
        """Forbid all but the next token of the prefix."""
        position = len(token_ids) - self._isl
        if 0 <= position < len(self._prefix):
            logits[:] = NEVER
            logits[self._prefix[position]] = 0.0


def forced_prefix(arguments: Mapping[str, Any], facts: RequestFacts) -> LogitsProcessor:
    """Make a processor from ``{"token_ids": [...]}``."""
    no_others(arguments, ("token_ids",))
    return ForcedPrefix(token_list(arguments, "token_ids", facts.vocabulary_size), facts.isl)
