"""How many tokens a model makes of an image, from its size in pixels alone: what a card says, computed.

Two families, as their published image processors define them (``Qwen2VLImageProcessor``: ``smart_resize``;
``LlavaNextProcessor``: any-resolution tiles without padding). Engines count alike, because they use those processors.
Pure arithmetic; an image costs a few microseconds.
"""

from __future__ import annotations

import math

from poolgrid.wire.card import MediaSpec, ResizedGrid, TiledGrid
from poolgrid.wire.limits import PROMPT_TOKENS_MAX

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
