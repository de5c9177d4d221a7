"""A prompt as tokens."""

from __future__ import annotations

from typing import final

from poolgrid.wire.hashing import TOKEN_BYTES
from poolgrid.wire.multimodal import MediaItem, MultimodalInput


@final
class Prompt:
    """One tokenized prompt; ``text`` is what ``echo`` repeats (empty without it), ``end`` the last characters of a chat
    prompt, which say whether it leaves reasoning open."""

    __slots__ = ("end", "multimodal", "text", "token_ids")

    def __init__(
        self, token_ids: bytes, text: str = "", end: str = "", multimodal: MultimodalInput | None = None
    ) -> None:
        self.token_ids = token_ids
        self.text = text
        self.end = end
        self.multimodal = multimodal

    @property
    def isl(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def media_items(self) -> tuple[MediaItem, ...]:
        return () if self.multimodal is None else self.multimodal.items
