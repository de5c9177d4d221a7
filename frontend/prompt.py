"""A prompt as tokens."""

from __future__ import annotations

import msgspec

from poolgrid.wire.hashing import TOKEN_BYTES
from poolgrid.wire.multimodal import MediaItem, MultimodalInput


class Prompt(msgspec.Struct, frozen=True):
    """One tokenized prompt; ``text`` is what ``echo`` repeats (empty without it), ``end`` the last characters of a chat
    prompt, which say whether it leaves reasoning open."""

    token_ids: bytes
    text: str = ""
    end: str = ""
    multimodal: MultimodalInput | None = None

    @property
    def isl(self) -> int:
        """Return its length in tokens."""
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def media_items(self) -> tuple[MediaItem, ...]:
        """Return its media, each with its place."""
        return () if self.multimodal is None else self.multimodal.items
