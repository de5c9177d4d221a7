"""What a model makes of the pictures of a prompt: tokens, their places, and names.

1. A model directory with ``tokenizer.json`` and, in ``config.json``, an ``image_token_id`` is one that sees. Each such
   token of a prompt with pictures becomes as many tokens as its picture has, all of them ``vocab_size + 1``.
2. A picture has a token for each square of ``patch_size * merge_size`` pixels: what Qwen's processor says of sizes that
   need no resizing, and the fake takes no others.
3. A picture's digest covers its name, if it was given one, and its content. Events say the name in place of the digest.
4. Any other model makes nothing of pictures: they only enter the hash of the first block.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3


@dataclass(frozen=True, slots=True)
class Picture:
    """A medium of a prompt."""

    digest: bytes
    uuid: str | None = None
    start: int = 0
    length: int = 0
    """Tokens that stand for it; 0 = none do."""

    @property
    def event_name(self) -> str:
        """What events call it."""
        return self.digest.hex() if self.uuid is None else self.uuid


class ModelTokenizer:
    """The tokenizer of a model directory."""

    eos_token_id = 2
    pad_token_id = 2

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; what is beyond the vocabulary has none."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class SeeingModel:
    """What a model directory says of pictures."""

    image_token_id: int
    vocab_size: int
    square: int

    @property
    def stand_in(self) -> int:
        """The token that stands for a picture in the engine."""
        return self.vocab_size + 1

    def count(self, picture: Any) -> int:
        """Return how many tokens a picture becomes."""
        width, height = picture.size
        if width % self.square or height % self.square:
            raise ValueError(f"the fake does not resize: {width} x {height} are no multiples of {self.square}")
        return int(width // self.square * (height // self.square))


def read_model(model: str | Path) -> tuple[ModelTokenizer | None, SeeingModel | None]:
    """Return the tokenizer and the eyes of a model, where it is a directory that has them."""
    directory = Path(model)
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        return None, None
    config = json.loads((directory / "config.json").read_text())
    eyes = None
    if "image_token_id" in config:
        preprocessor = json.loads((directory / "preprocessor_config.json").read_text())
        square = preprocessor["patch_size"] * preprocessor["merge_size"]
        eyes = SeeingModel(config["image_token_id"], config["vocab_size"], square)
    return ModelTokenizer(tokenizer), eyes


def name_pictures(digests: Sequence[bytes], names: Sequence[str | None] | None) -> list[Picture]:
    """Return media with their names, which enter their digests; raises what TensorRT-LLM raises."""
    if names is None:
        return [Picture(digest) for digest in digests]
    if len(names) != len(digests):
        raise ValueError(f"UUID list length ({len(names)}) doesn't match data items length ({len(digests)})")
    for at, name in enumerate(names):
        if name is not None and not isinstance(name, str):
            raise TypeError(f"multimodal_uuids[{at}] must be a string or None, got {type(name)}")
    return [
        Picture(digest if name is None else blake3(name.encode() + b"\0" + digest).digest(), name)
        for digest, name in zip(digests, names, strict=True)
    ]
