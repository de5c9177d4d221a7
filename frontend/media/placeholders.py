"""Where media stand among the tokens of a prompt: placeholders found, counted, and replaced by what the engine sees.

The card's ``MediaSpec`` says what is known. With ``placeholder_token_id`` the items have their positions; with
``tokens_per_image`` too, each placeholder becomes as many filler tokens as the engine will see, and every block of the
prompt can be hashed. Without, what comes before the first item still can (``wire.multimodal.known_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from frontend.media.refusals import MediaRefused
from wire.card import MediaSpec
from wire.multimodal import MediaItem


def place_media(token_ids: bytes, items: Sequence[MediaItem], spec: MediaSpec) -> tuple[bytes, tuple[MediaItem, ...]]:
    """Return the prompt's tokens (u32 little-endian) with placeholders expanded, and the items with their places.

    Raises ``MediaRefused`` when the prompt has not exactly one placeholder per item: a client that writes the
    placeholder into its text would shift every picture.
    """
    placeholder = spec.placeholder_token_id
    if placeholder is None:
        return token_ids, tuple(items)
    tokens = np.frombuffer(token_ids, "<u4")
    found = np.flatnonzero(tokens == placeholder)
    if len(found) != len(items):
        raise MediaRefused(
            "media_placeholder_mismatch",
            f"the prompt has {len(found)} placeholders of media (token {placeholder}) for {len(items)} media: "
            "text must not contain the placeholder",
        )
    if not spec.tokens_per_image:
        return token_ids, tuple(
            msgspec.structs.replace(item, first_token=position)
            for item, position in zip(items, found.tolist(), strict=True)
        )
    filler = placeholder if spec.filler_token_id is None else spec.filler_token_id
    span = np.full(spec.tokens_per_image, filler, "<u4")
    pieces: list[np.ndarray[tuple[int], np.dtype[np.uint32]]] = []
    placed: list[MediaItem] = []
    end = 0
    grown = 0
    for item, position in zip(items, found.tolist(), strict=True):
        pieces += [tokens[end:position], span]
        placed.append(msgspec.structs.replace(item, first_token=position + grown, token_count=spec.tokens_per_image))
        end = position + 1
        grown += spec.tokens_per_image - 1
    pieces.append(tokens[end:])
    return np.concatenate(pieces).astype("<u4", copy=False).tobytes(), tuple(placed)
