"""How many tokens a model makes of a picture, as its own files say: the part of a card that routers count by. Pure.

Which rule a model has is known by the class in ``config.json``; its numbers are in ``preprocessor_config.json``. Where
one is missing nothing is said: a wrong count would shift every block behind the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from poolgrid.wire.card import ResizedGrid, TiledGrid

PREPROCESSOR_FILE = "preprocessor_config.json"

RESIZED = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
TILED = frozenset({"LlavaNextForConditionalGeneration"})

ImageRule = ResizedGrid | TiledGrid


def image_rule(architecture: str, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> ImageRule | None:
    """Return the rule of a model; ``None`` = not known."""
    try:
        if architecture in RESIZED:
            return _resized(preprocessor)
        if architecture in TILED:
            return _tiled(config)
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError):
        return None
    return None


def _resized(preprocessor: Mapping[str, Any]) -> ResizedGrid:
    size = preprocessor.get("size") or {}
    # Older files have the bounds by themselves, newer ones as edges that are counts of pixels all the same.
    smallest = preprocessor.get("min_pixels") or size.get("min_pixels") or size["shortest_edge"]
    largest = preprocessor.get("max_pixels") or size.get("max_pixels") or size["longest_edge"]
    given = (preprocessor["patch_size"], preprocessor["merge_size"], smallest, largest)
    return msgspec.convert(given, ResizedGrid)


def _tiled(config: Mapping[str, Any]) -> TiledGrid | None:
    vision = config["vision_config"]
    if config.get("vision_feature_select_strategy", "default") != "default":
        return None  # then the class token is counted too
    resolutions = [tuple(each) for each in config["image_grid_pinpoints"]]
    return msgspec.convert((vision["image_size"], vision["patch_size"], resolutions), TiledGrid)
