"""Where media stand among the tokens of a prompt: placeholders found, counted, and replaced by what the engine sees.

The card's ``MediaSpec`` says what is known. A placeholder that is one token is looked for among the tokens; one that is
only text is cut out of the text, and what is between is tokenized by itself. Then the items have their positions. With
a rule for the tokens of an image (``image_tokens``) each placeholder becomes as many filler tokens as the
engine will see, and every block of the prompt can be hashed; without, what comes before the first item still can
(``poolgrid.kernel.wire.multimodal.known_tokens``).

How many tokens a model makes of an image, from its size in pixels alone: what a card declares, computed.

Two families, as their published image processors define them (``Qwen2VLImageProcessor``: ``smart_resize``;
``LlavaNextProcessor``: any-resolution tiles without padding). Engines count alike, because they use those processors.
Pure arithmetic; an image costs a few microseconds.

Files of precomputed embeddings, checked without loading them: ``.safetensors``.

Such a file is a length, a JSON header and raw bytes: the header must describe exactly the bytes that are there.
PyTorch's ``.pt`` is a zip archive around a pickle, and a pickle is a program: such files are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from poolgrid.kernel.wire.card import MediaSpec, ResizedGrid, TiledGrid
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, pack_tokens
from poolgrid.kernel.wire.limits import PROMPT_TOKENS_MAX
from poolgrid.kernel.wire.multimodal import MediaItem
from poolgrid.server.frontend.media.references import MediaRefused

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
    found = np.flatnonzero(np.frombuffer(token_ids, "<u4") == placeholder).tolist()
    starts = [0, *(TOKEN_BYTES * (position + 1) for position in found)]
    ends = [*(TOKEN_BYTES * position for position in found), len(token_ids)]
    return [token_ids[start:end] for start, end in zip(starts, ends, strict=True)]


SAFETENSORS = "application/x-safetensors"

HEADER_BYTES_MAX = 1024 * 1024
"""Header of a safetensors file; embeddings are a handful of tensors of 100 bytes of header each."""

TENSORS_MAX = 256
DIMENSIONS_MAX = 8

_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


def check_embeddings(data: bytes) -> str:
    """Return the media type of a file of embeddings; raises ``MediaRefused``. Nothing in it is executed."""
    if data[:2] == b"PK" or data[:1] == b"\x80":
        raise MediaRefused(
            "media_embeddings_unsafe",
            "the embeddings file is PyTorch's (.pt), which holds a program: allowed is .safetensors, as "
            "safetensors.torch.save_file writes it. Nothing in it was executed",
        )
    _check_safetensors(data)
    return SAFETENSORS


def _check_safetensors(data: bytes) -> None:
    if len(data) < 8:
        raise _broken(f"the file has {len(data)} bytes; a safetensors file begins with 8 bytes of header length")
    length = int.from_bytes(data[:8], "little")
    if length > min(HEADER_BYTES_MAX, len(data) - 8):
        raise _broken(
            f"its header claims {length} bytes; the file has {len(data) - 8} after the length, and allowed are at most "
            f"{HEADER_BYTES_MAX}"
        )
    try:
        header = msgspec.json.decode(data[8 : 8 + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise _broken("its header is not a JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not 1 <= len(tensors) <= TENSORS_MAX:
        raise _broken(f"it holds {len(tensors)} tensors, allowed are 1 to {TENSORS_MAX}")
    spans = sorted(_span(name, entry) for name, entry in tensors.items())
    end = 0
    for begin, until, name in spans:
        if begin != end:
            raise _broken(f"tensor {name[:80]!r} begins at byte {begin} of the data, where {end} is the next free one")
        end = until
    if end != len(data) - 8 - length:
        raise _broken(f"its tensors end at byte {end} of the data, which has {len(data) - 8 - length}")


def _span(name: str, entry: Any) -> tuple[int, int, str]:
    """Return where a tensor's bytes begin and end."""
    where = f"tensor {name[:80]!r}"
    if not isinstance(entry, dict):
        raise _broken(f"{where} is described by no JSON object")
    dtype = entry.get("dtype")
    size = _DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        raise _broken(f"{where} has the dtype {str(dtype)[:40]!r}, allowed are {', '.join(sorted(_DTYPE_BYTES))}")
    shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or len(shape) > DIMENSIONS_MAX:
        raise _broken(f"{where} has the shape {str(entry.get('shape'))[:80]}, allowed are up to {DIMENSIONS_MAX} sizes")
    if offsets is None or len(offsets) != 2:
        raise _broken(
            f"{where} has the data_offsets {str(entry.get('data_offsets'))[:80]}, allowed are two byte positions"
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * size:
        raise _broken(f"{where} has {end - begin} bytes, its shape {shape} of {dtype} needs {math.prod(shape) * size}")
    return begin, end, name


def _counts(value: Any) -> list[int] | None:
    """Return a list of sizes, or ``None`` for anything else."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**48 for item in value):
        return value
    return None


def _broken(detail: str) -> MediaRefused:
    return MediaRefused("media_broken", f"the embeddings file is broken: {detail}")
