"""What trtllm-serve takes of a request's part of the caches, its priority and its conversation. Pure.

Chat and text completions refuse a member that they do not know; Responses and Messages pass over it. A salt is known to
chat alone. A priority is a number from 0 to 1, the higher first, which an engine with ``waiting_queue_policy:
priority`` follows. A conversation is named by a header, or by ``conversation_params`` in the body, which wins.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.server.forwarding.headers import Header

KIND: Final = "trtllm-serve"

SALTED_PATH: Final = "/v1/chat/completions"

UNSALTED_PATHS: Final = frozenset(("/v1/completions", "/v1/responses", "/v1/messages"))
"""Requests whose prompts share the caches of all, whatever their salt."""

PRIORITY_PATHS: Final = frozenset((SALTED_PATH, "/v1/completions"))

CONVERSATION_HEADERS: Final = (
    b"x-session-id",
    b"x-correlation-id",
    b"x-session-affinity",
    b"x-multi-turn-session-id",
)
"""Headers that name a conversation; the first of them counts."""

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


def takes_priority(version: str, path: str) -> bool:
    """Return whether a server takes a priority: one of 1.4 or later; some before refuse the member."""
    found = _VERSION.match(version)
    return path in PRIORITY_PATHS and found is not None and (int(found[1]), int(found[2])) >= (1, 4)


def conversation_lines(turn: SessionTurn | None, headers: Collection[bytes]) -> list[Header]:
    """Return the header lines that name a request's conversation; none where the client names one itself."""
    if turn is None or any(name in headers for name in CONVERSATION_HEADERS):
        return []
    return [(CONVERSATION_HEADERS[0], turn.conversation.encode("ascii", "replace"))]
