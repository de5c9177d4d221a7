"""How long the blocks of a request stay cached: as its client asks, or until its session's next turn is expected."""

from __future__ import annotations

from typing import Final

from poolgrid.wire.requests import Generate, KvRetention, RetainedTokens

RETURN_PRIORITY: Final = 50
"""Above blocks of which nothing is asked (35), below the most that a client can ask for (100)."""


def retention_of(request: Generate) -> KvRetention | None:
    """Return what the client asks; without that, what ``SessionTurn.return_ms`` asks, and ``None`` without both."""
    turn = request.turn
    if request.retention is not None or turn is None or not turn.return_ms:
        return request.retention
    prompt = RetainedTokens(0, None, RETURN_PRIORITY, turn.return_ms)
    return KvRetention((prompt,), RETURN_PRIORITY, turn.return_ms)
