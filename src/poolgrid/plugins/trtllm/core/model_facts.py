"""What a model's own files say that a worker's card needs: end-of-sequence ids, vocabulary, longest sequence; and
what TensorRT-LLM can do with its media. Pure.

The LoRA adapters that an engine is configured with: their names, numbers and places. Pure.

An adapter is called like its directory. Its number enters the engine's block hashes, so it must be the same in every
life and on every worker: it is made of the name, and two names with one number are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import msgspec

from poolgrid.kernel.wire.card import ResizedGrid, TiledGrid
from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX, LORAS_PER_WORKER_MAX, STOP_TOKENS_MAX, U32_MAX

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

IMAGE_TOKEN_KEYS = ("image_token_index", "image_token_id")
"""What configurations of different models call it."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model; empty and 0 = not known."""

    eos_token_ids: tuple[int, ...] = ()
    vocabulary_size: int = 0
    max_sequence_length: int = 0
    image_token_id: int | None = None
    """The token that stands for an image in the prompt's text."""
    architecture: str = ""
    """Class of the model, as its files name it."""
    image_rule: ImageRule | None = None
    """How many tokens an image becomes."""


def model_facts(
    config: Mapping[str, Any], generation: Mapping[str, Any], preprocessor: Mapping[str, Any] | None = None
) -> ModelFacts:
    """Return the facts in ``config.json``, ``generation_config.json`` and ``preprocessor_config.json``.

    What has a wrong type is not known.

    Multimodal models keep the language model's values in ``text_config``.
    """
    text = config.get("text_config")
    places = [config, *([text] if isinstance(text, Mapping) else [])]

    def number(key: str) -> int:
        found = [place[key] for place in places if _is_u32(place.get(key))]
        return int(found[0]) if found else 0

    ids: list[int] = []
    for place in (generation, *places):
        given = place.get("eos_token_id")
        each: Any
        for each in given if isinstance(given, list) else [given]:
            if _is_u32(each) and each not in ids:
                ids.append(int(each))
    architecture = _architecture(config)
    images = [config[key] for key in IMAGE_TOKEN_KEYS if _is_u32(config.get(key))]
    return ModelFacts(
        tuple(ids[:STOP_TOKENS_MAX]),
        number("vocab_size"),
        number("max_position_embeddings"),
        int(images[0]) if images else None,
        architecture,
        image_rule(architecture, config, preprocessor or {}),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return first if isinstance(first, str) else ""


def _is_u32(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= U32_MAX


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
    """Return how many tokens a model makes of an image, by its class and its files; ``None`` = not known.

    Where a number is missing nothing is said: a wrong count would shift every block behind the image.
    """
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


@dataclass(frozen=True, slots=True)
class ModelAbilities:
    """What a model can do with media."""

    encodes: bool = True
    """It may run in an encode worker, whose embeddings the other engines take."""
    takes_embeddings: bool = True
    """A request may bring embeddings, one tensor each, in place of images."""
    takes_media: bool = True
    """A request may have images at all."""


TEXT_ONLY = ModelAbilities(encodes=False, takes_embeddings=False, takes_media=False)

ABILITIES = {
    **dict.fromkeys(
        (
            "DeepseekV3ForCausalLM",
            "Gemma3ForCausalLM",
            "GptOssForCausalLM",
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "NemotronForCausalLM",
            "Phi3ForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
        ),
        TEXT_ONLY,
    ),
    "Llama4ForConditionalGeneration": ModelAbilities(encodes=False, takes_embeddings=False),
    "LlavaNextForConditionalGeneration": ModelAbilities(),
    "Qwen2VLForConditionalGeneration": ModelAbilities(takes_embeddings=False),
    "Qwen2_5_VLForConditionalGeneration": ModelAbilities(takes_embeddings=False),
    "Qwen3VLForConditionalGeneration": ModelAbilities(takes_embeddings=False),
    "Qwen3VLMoeForConditionalGeneration": ModelAbilities(takes_embeddings=False),
    "KimiK25ForConditionalGeneration": ModelAbilities(),
}
"""By architecture, from upstream's decorators and input processors; a model that is not here is tried. Llama 4 takes
embeddings only as dictionaries, in its own multimodal-disaggregation mode."""


def abilities_of(architecture: str) -> ModelAbilities:
    """Return what a model of an architecture can do; everything, when that is unknown."""
    return ABILITIES.get(architecture, ModelAbilities())


def model_problem(architecture: str, encodes: bool, takes_media: bool) -> str:
    """Say why a model cannot do what a worker is to do with it; empty = it can, as far as is known.

    ``encodes``: it is to turn images into embeddings for others; ``takes_media``: requests may have images.
    """
    abilities = abilities_of(architecture)
    if takes_media and not abilities.takes_media:
        return f"TensorRT-LLM's {architecture} takes text only: use modality text"
    if encodes and not abilities.encodes:
        return (
            f"TensorRT-LLM cannot run the vision part of {architecture} by itself: give the prefill workers the "
            "images (no encode workers)"
        )
    return ""


NUMBER_MAX = 2**31 - 1
"""Adapter numbers are signed 32-bit in the engine's caches."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter."""

    name: str
    number: int
    """The engine's ``lora_int_id``."""
    path: str
    checkpoint_source: str = "hf"


def adapter_number(name: str) -> int:
    """Return the number of an adapter, from 1."""
    return 1 + stable_u64(name) % NUMBER_MAX


def adapters(arguments: Mapping[str, Any]) -> dict[str, Adapter]:
    """Return the adapters of ``lora_config.lora_dir`` by name; raise ``ValueError`` for two with one name."""
    config = arguments.get("lora_config") or {}
    directories = config.get("lora_dir") or ()
    if len(directories) > LORAS_PER_WORKER_MAX:
        raise ValueError(
            f"reading lora_config.lora_dir: {len(directories)} adapters, allowed are at most {LORAS_PER_WORKER_MAX}"
        )
    found: dict[str, Adapter] = {}
    numbers: dict[int, str] = {}
    for directory in directories:
        name = PurePath(directory).name
        if not name or len(name) > IDENTIFIER_BYTES_MAX:
            raise ValueError(
                f"reading lora_config.lora_dir: {directory!r} ends in no name of 1 to {IDENTIFIER_BYTES_MAX} characters"
            )
        if name in found:
            raise ValueError(
                f"reading lora_config.lora_dir: {directory} and {found[name].path} are both called {name!r}; "
                "adapters are distinguished by the last part of their path"
            )
        number = adapter_number(name)
        if number in numbers:
            raise ValueError(
                f"reading lora_config.lora_dir: adapters {name!r} and {numbers[number]!r} would have the same number, "
                "rename one of them"
            )
        numbers[number] = name
        found[name] = Adapter(name, number, str(directory), config.get("lora_ckpt_source") or "hf")
    return found
