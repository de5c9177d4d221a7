"""Tokens of images, against what the models' published processors say of the same sizes (transformers 4.56.2)."""

from __future__ import annotations

import pytest

from poolgrid.kernel.wire.card import MediaSpec, ResizedGrid, TiledGrid
from poolgrid.server.frontend.media.placeholders import tokens_of_image

QWEN_2 = MediaSpec(("image",), resized_grid=ResizedGrid(14, 2, 56 * 56, 14 * 14 * 4 * 1280))
QWEN_2_WIDE = MediaSpec(("image",), resized_grid=ResizedGrid(14, 2, 56 * 56, 12_845_056))
QWEN_3 = MediaSpec(("image",), resized_grid=ResizedGrid(16, 2, 65_536, 16_777_216))
LLAVA = MediaSpec(
    ("image",), tiled_grid=TiledGrid(336, 14, ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)))
)


@pytest.mark.parametrize(
    ("spec", "size", "count"),
    [
        (QWEN_2_WIDE, (504, 504), 324),
        (QWEN_2_WIDE, (1024, 1024), 1369),
        (QWEN_2, (1024, 1024), 1225),
        (QWEN_2, (3, 2), 6),
        (QWEN_2, (56, 56), 4),
        (QWEN_2, (28 * 200 + 1, 28), 0),
        (QWEN_2, (5000, 30), 179),
        (QWEN_2, (4000, 3000), 1230),
        (QWEN_2, (84, 154), 18),
        (QWEN_2, (1, 150), 25),
        (QWEN_3, (1024, 1024), 1024),
        (QWEN_3, (5000, 30), 156),
        (QWEN_3, (64, 64), 64),
        (LLAVA, (336, 336), 1176),
        (LLAVA, (672, 672), 2928),
        (LLAVA, (1100, 808), 2340),
        (LLAVA, (100, 1000), 1224),
        (LLAVA, (1000, 100), 1160),
        (LLAVA, (333, 500), 1476),
        (LLAVA, (17, 2000), 648),
        (MediaSpec(("image",), tokens_per_image=576), (0, 0), 576),
        (MediaSpec(("image",)), (640, 480), 0),
        (QWEN_2, (0, 0), 0),
    ],
)
def test_an_image_has_as_many_tokens_as_its_models_processor_says(
    spec: MediaSpec, size: tuple[int, int], count: int
) -> None:
    assert tokens_of_image(spec, *size) == count


def test_a_count_beyond_any_prompt_is_none() -> None:
    endless = MediaSpec(("image",), resized_grid=ResizedGrid(1, 1, 0, 2**32 - 1))

    assert tokens_of_image(endless, 60_000, 60_000) == 0
