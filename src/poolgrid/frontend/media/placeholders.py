"""Where media stand among the tokens of a prompt: placeholders found, counted, and replaced by what the engine sees.

The card's ``MediaSpec`` says what is known. A placeholder that is one token is looked for among the tokens; one that is
only text is cut out of the text, and what is between is tokenized by itself. Then the items have their positions. With
a rule for the tokens of an image (``image_tokens``) each placeholder becomes as many filler tokens as the
engine will see, and every block of the prompt can be hashed; without, what comes before the first item still can
(``poolgrid.wire.multimodal.known_tokens``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from poolgrid.frontend.media.image_tokens import tokens_of_image
from poolgrid.frontend.media.refusals import MediaRefused
from poolgrid.wire.card import MediaSpec
from poolgrid.wire.hashing import TOKEN_BYTES, pack_tokens
from poolgrid.wire.multimodal import MediaItem

Encode = Callable[[str], bytes]
"""Returns the tokens of a text, u32 little-endian."""


def place_media(
    text: str, items: Sequence[MediaItem], spec: MediaSpec, encode: Encode
) -> tuple[bytes, tuple[MediaItem, ...]]:
    """Return the prompt's tokens (u32 little-endian) with placeholders expanded, and the items with their places.

    Raises ``MediaRefused`` when the prompt has not exactly one placeholder per item: a client that writes the
    placeholder into its text would shift every picture.
    """
    if spec.placeholder_token_id is not None:
        pieces = _between_tokens(encode(text), spec.placeholder_token_id)
        stand_in = pack_tokens([spec.placeholder_token_id])
    elif spec.placeholder:
        pieces = [encode(piece) if piece else b"" for piece in text.split(spec.placeholder)]
        stand_in = encode(spec.placeholder)
    else:
        # Nothing is known: the engine finds the places by itself, and no token before its work is sure.
        return encode(text), tuple(items)
    found = len(pieces) - 1
    if found != len(items):
        shown = f" {spec.placeholder!r}" if spec.placeholder else ""
        why = (
            f"text must not contain the placeholder{shown}"
            if found > len(items)
            else f"the chat template does not write the placeholder{shown} that the model's workers name"
        )
        raise MediaRefused(
            "media_placeholder_mismatch", f"the prompt has {found} placeholders for {len(items)} media: {why}"
        )
    filler = spec.filler_token_id if spec.filler_token_id is not None else spec.placeholder_token_id
    tokens = bytearray(pieces[0])
    placed: list[MediaItem] = []
    for item, piece in zip(items, pieces[1:], strict=True):
        count = 0 if filler is None else tokens_of_image(spec, item.width, item.height)
        placed.append(msgspec.structs.replace(item, first_token=len(tokens) // TOKEN_BYTES, token_count=count))
        tokens += pack_tokens([filler]) * count if count and filler is not None else stand_in
        tokens += piece
    return bytes(tokens), tuple(placed)


def _between_tokens(token_ids: bytes, placeholder: int) -> list[bytes]:
    """Cut tokens at every occurrence of one of them."""
    found = np.flatnonzero(np.frombuffer(token_ids, "<u4") == placeholder).tolist()
    starts = [0, *(TOKEN_BYTES * (position + 1) for position in found)]
    ends = [*(TOKEN_BYTES * position for position in found), len(token_ids)]
    return [token_ids[start:end] for start, end in zip(starts, ends, strict=True)]
