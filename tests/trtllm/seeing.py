"""A model directory that sees, as Qwen2-VL's is: the tiny tokenizer with a token for pictures, no weights."""

from __future__ import annotations

import io
import json
from pathlib import Path

from PIL import Image
from tokenizers import AddedToken, Tokenizer

from poolgrid.server.frontend.models import TINY_MODEL_PATH

IMAGE_TOKEN = "<|image_pad|>"
IMAGE_TOKEN_ID = 4096
VOCABULARY_SIZE = 4200
STAND_IN = VOCABULARY_SIZE + 1
"""What the engine has in place of a picture's tokens."""

SQUARE = 28
"""Pixels along a side of one token."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_model(directory: Path) -> Path:
    """Write the model's files into a directory; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(TINY_MODEL_PATH / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)])
    assert tokenizer.token_to_id(IMAGE_TOKEN) == IMAGE_TOKEN_ID
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    of_tiny = json.loads((TINY_MODEL_PATH / "tokenizer_config.json").read_text())
    config = json.loads((TINY_MODEL_PATH / "config.json").read_text())
    written = {
        "tokenizer_config.json": {**of_tiny, "chat_template": CHAT_TEMPLATE},
        "config.json": {
            **config,
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "vocab_size": VOCABULARY_SIZE,
            "image_token_id": IMAGE_TOKEN_ID,
            "vision_config": {},
        },
        "preprocessor_config.json": {
            "patch_size": 14,
            "merge_size": 2,
            "min_pixels": SQUARE * SQUARE,
            "max_pixels": 12_845_056,
        },
    }
    for name, value in written.items():
        (directory / name).write_text(json.dumps(value))
    return directory


def picture(colour: str = "red", wide: int = 4, high: int = 3) -> bytes:
    """Return a picture that is so many tokens wide and high."""
    data = io.BytesIO()
    Image.new("RGB", (wide * SQUARE, high * SQUARE), colour).save(data, "PNG")
    return data.getvalue()
