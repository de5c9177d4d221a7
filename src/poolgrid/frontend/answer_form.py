"""The form of an answer where it is not chat's own: what another API makes of a request that went chat's way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from poolgrid.frontend.call_ids import CallIds
from poolgrid.frontend.parsers.pieces import OutputParser
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.frontend.responses import AnswerEncoder


class AnswerForm(Protocol):
    """Makes what turns the output of one request into the bytes of its answer."""

    @property
    def counts_reasoning(self) -> bool:
        """Return whether the end of an answer counts the tokens of its reasoning, which takes time for a long one."""
        ...

    def encoder(
        self,
        request_ids: Sequence[str],
        created_s: int,
        isl: int,
        model: PromptModel,
        parser: OutputParser | None,
        call_ids: CallIds,
    ) -> AnswerEncoder:
        """Return the encoder. ``isl`` is the prompt's length in tokens; ``parser`` takes the output's text apart,
        ``None`` = all of it is content."""
        ...

    async def keep(self, encoder: AnswerEncoder) -> None:
        """Keep a complete answer, if it is to be found again; called before its last byte is sent, and never fails."""
        ...
