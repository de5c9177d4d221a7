"""``ConversationParams``, which came after 1.2."""

from __future__ import annotations

from dataclasses import dataclass

from ._fake.profile import PROFILE

if PROFILE.request_priority:

    @dataclass(slots=True, kw_only=True)
    class ConversationParams:
        """The conversation that a request is a turn of."""

        conversation_id: str

        def __post_init__(self) -> None:
            if not self.conversation_id.strip():
                raise ValueError("conversation_id must be non-empty")
