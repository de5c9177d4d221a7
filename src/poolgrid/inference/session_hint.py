"""A client's hint about the session that a request is a turn of."""

from __future__ import annotations

from typing import Final, NamedTuple


class SessionHint(NamedTuple):
    """Names that the client chose, and what its prompt answers."""

    name: str = ""
    """The session; empty = the client names none."""
    parent: str = ""
    """The session that it was begun by."""
    after_tool: bool = False
    """Whether the prompt has the result of a tool behind the last answer in it."""
    answer: int = 0
    """``answer_key`` of the response that it continues by its id; 0 = none is named."""
    keep_ms: int = 0
    """How long to keep its prompt's KV, as far as ``InferenceRequest.kept_tokens_max`` allows; 0 = nothing is asked."""


NO_HINT: Final = SessionHint()
