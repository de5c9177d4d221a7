"""Where media stand among the tokens of a prompt: placeholders found, counted, and replaced by what the engine sees.

The card's ``MediaSpec`` says what is known. A placeholder that is one token is looked for among the tokens; one that is
only text is cut out of the text, and what is between is tokenized by itself. Then the items have their positions. With
a rule for the tokens of an image (``image_tokens``) each placeholder becomes as many filler tokens as the
engine will see, and every block of the prompt can be hashed; without, what comes before the first item still can
(``poolgrid.wire.multimodal.known_tokens``).

How many tokens a model makes of an image, from its size in pixels alone: what a card declares, computed.

Two families, as their published image processors define them (``Qwen2VLImageProcessor``: ``smart_resize``;
``LlavaNextProcessor``: any-resolution tiles without padding). Engines count alike, because they use those processors.
Pure arithmetic; an image costs a few microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from poolgrid.frontend.media.references import MediaRefused
from poolgrid.wire.card import MediaSpec, ResizedGrid, TiledGrid
from poolgrid.wire.hashing import TOKEN_BYTES, pack_tokens
from poolgrid.wire.limits import PROMPT_TOKENS_MAX
from poolgrid.wire.multimodal import MediaItem

ASPECT_MAX = 200
"""Longest side over shortest that the first family takes."""

NOT_KNOWN = 0


def tokens_of_image(spec: MediaSpec, width: int, height: int) -> int:
    """Return how many tokens stand for an image of a size in pixels; 0 = it cannot be told."""
    if spec.tokens_per_image:
        return spec.tokens_per_image
    if not width or not height:
        return NOT_KNOWN
    if spec.resized_grid is not None:
        count = _resized(spec.resized_grid, width, height)
    elif spec.tiled_grid is not None:
        count = _tiled(spec.tiled_grid, width, height)
    else:
        return NOT_KNOWN
    return count if count <= PROMPT_TOKENS_MAX else NOT_KNOWN


def _resized(grid: ResizedGrid, width: int, height: int) -> int:
    """Both sides become multiples of a token's, and the area is brought between its bounds with the aspect kept."""
    if max(width, height) > ASPECT_MAX * min(width, height):
        return NOT_KNOWN
    side = grid.patch_size * grid.merge_size
    high, wide = round(height / side), round(width / side)
    area = high * wide * side * side
    if area > grid.pixels_max:
        shrink = math.sqrt(height * width / grid.pixels_max) if grid.pixels_max else math.inf
        high = max(1, math.floor(height / shrink / side))
        wide = max(1, math.floor(width / shrink / side))
    elif area < grid.pixels_min:
        grow = math.sqrt(grid.pixels_min / (height * width))
        high, wide = math.ceil(height * grow / side), math.ceil(width * grow / side)
    return high * wide


def _tiled(grid: TiledGrid, width: int, height: int) -> int:
    """The whole image as one tile, and the tiles that fit it best, with a token at the end of each of their rows."""
    across = grid.tile_size // grid.patch_size
    best_height, best_width = _fitting(grid, width, height)
    high = best_height // grid.tile_size * across
    wide = best_width // grid.tile_size * across
    if not across or not high or not wide:
        return NOT_KNOWN
    # What does not belong to the image is cut off on both sides, so an odd rest stays.
    if width / height > wide / high:
        high -= (high - int(round(height * (wide / width), 7))) // 2 * 2
    else:
        wide -= (wide - int(round(width * (high / height), 7))) // 2 * 2
    return across * across + high * wide + high


def _fitting(grid: TiledGrid, width: int, height: int) -> tuple[int, int]:
    """Return the resolution that keeps most of the image, and of several the one that wastes least."""

    def merit(resolution: tuple[int, int]) -> tuple[int, int]:
        high, wide = resolution
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - high * wide

    return max(grid.resolutions, key=merit)


Encode = Callable[[str], bytes]
"""Returns the tokens of a text, u32 little-endian."""


def place_media(
    text: str, items: Sequence[MediaItem], spec: MediaSpec, encode: Encode
) -> tuple[bytes, tuple[MediaItem, ...]]:
    """Return the prompt's tokens (u32 little-endian) with placeholders expanded, and the items with their places.

    Raises ``MediaRefused`` when the prompt has not exactly one placeholder per item: a client that writes the
    placeholder into its text would shift every image.
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
