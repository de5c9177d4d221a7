"""What TensorRT-LLM's models can do with media, as far as it is known without loading them. Pure.

Source: upstream's decorators and input processors (``@support_multimodal_disaggregated``, ``@register_vision_encoder``,
``multi_modal_embeddings``), by the name of the class in ``config.json``. A model that is not here may be able to do
everything: it is tried.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelAbilities:
    """What a model can do with media."""

    encodes: bool = True
    """It may run in an encode worker, whose embeddings the other engines take."""
    takes_embeddings: bool = True
    """A request may bring embeddings, one tensor each, in place of pictures."""
    takes_media: bool = True
    """A request may have pictures at all."""


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
"""By architecture. Llama 4 takes embeddings only as dictionaries, in its own multimodal-disaggregation mode."""


def abilities_of(architecture: str) -> ModelAbilities:
    """Return what a model of an architecture can do; everything, when nobody knows."""
    return ABILITIES.get(architecture, ModelAbilities())


def model_problem(architecture: str, encodes: bool, takes_media: bool) -> str:
    """Say why a model cannot do what a worker is to do with it; empty = it can, as far as is known.

    ``encodes``: it is to turn pictures into embeddings for others; ``takes_media``: requests may have pictures.
    """
    abilities = abilities_of(architecture)
    if takes_media and not abilities.takes_media:
        return f"TensorRT-LLM's {architecture} takes text only: use modality text"
    if encodes and not abilities.encodes:
        return (
            f"TensorRT-LLM cannot run the vision part of {architecture} by itself: give the prefill workers the "
            "pictures (no encode workers)"
        )
    return ""
