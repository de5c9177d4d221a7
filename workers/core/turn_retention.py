"""How long the blocks of a request stay cached.

``Generate.retention`` decides where it is given. Without it the prompt stays until its session's next turn is expected
(``SessionTurn.return_ms``), and the part that the client has kept (``keep_tokens``) for the longer of both times.
"""

from __future__ import annotations

from typing import Final

from poolgrid.wire.requests import Generate, KvRetention, RetainedTokens

RETURN_PRIORITY: Final = 50
"""Above blocks of which nothing is asked (35), below the most that a client can ask for (100)."""


def retention_of(request: Generate) -> KvRetention | None:
    """Return what a request asks of its engine; ``None`` = nothing."""
    turn = request.turn
    if request.retention is not None or turn is None or not (turn.return_ms or turn.keep_tokens):
        return request.retention
    kept, return_ms = (turn.keep_tokens if turn.keep_ms > turn.return_ms else 0), turn.return_ms
    ranges = (RetainedTokens(0, kept, RETURN_PRIORITY, turn.keep_ms),) if kept else ()
    if not return_ms:
        return KvRetention(ranges)
    return KvRetention((*ranges, RetainedTokens(kept, None, RETURN_PRIORITY, return_ms)), RETURN_PRIORITY, return_ms)
