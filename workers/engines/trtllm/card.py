"""What a worker with TensorRT-LLM says of itself."""

from __future__ import annotations

import msgspec

from poolgrid.wire.card import MediaSpec, ResizedGrid, WorkerCard, WorkerLimits
from poolgrid.wire.limits import PROMPT_TOKENS_MAX
from poolgrid.wire.multimodal import MediaKind
from poolgrid.workers.engines.trtllm.arguments.contract import look_up
from poolgrid.workers.engines.trtllm.arguments.engine_arguments import EngineArguments
from poolgrid.workers.engines.trtllm.core.model_abilities import abilities_of
from poolgrid.workers.engines.trtllm.core.model_facts import ModelFacts
from poolgrid.workers.engines.trtllm.loading import LoadedEngine
from poolgrid.workers.engines.trtllm.settings import TrtllmWorkerSettings


def make_card(
    settings: TrtllmWorkerSettings,
    arguments: EngineArguments,
    loaded: LoadedEngine,
    request_port: int,
    http_port: int,
) -> WorkerCard:
    """Return what a worker with TensorRT-LLM says of itself."""
    values = arguments.values
    facts = loaded.facts
    return WorkerCard(
        model=settings.model_name,
        role=settings.role,
        block_size=arguments.block_size,
        limits=WorkerLimits(
            max_batch_size=look_up(values, "max_batch_size") or settings.max_batch_size,
            max_num_tokens=look_up(values, "max_num_tokens") or settings.max_num_tokens,
            total_kv_blocks=loaded.engine.total_blocks,
            # Where nobody says, the engine itself refuses what is too long for it.
            max_sequence_length=values.get("max_seq_len") or facts.max_sequence_length or PROMPT_TOKENS_MAX,
        ),
        request_endpoint=f"tcp://{settings.advertised_host}:{request_port}",
        http_endpoint=f"{settings.http_scheme}://{settings.advertised_host}:{http_port}",
        loras=loaded.engine.loras,
        dp_size=loaded.engine.dp_size,
        engine=f"TensorRT-LLM {loaded.version}",
        eos_token_ids=facts.eos_token_ids,
        vocabulary_size=facts.vocabulary_size,
        media=_media(settings, loaded),
        endpoint_name=settings.endpoint_name,
        takes_retention=loaded.takes_retention,
        step_times=settings.step_times(),
    )


def _media(settings: TrtllmWorkerSettings, loaded: LoadedEngine) -> MediaSpec:
    facts = loaded.facts
    kinds = _media_kinds(settings, facts)
    if not kinds:
        return MediaSpec()
    spec = MediaSpec(kinds, placeholder_token_id=facts.image_token_id, adds_special_tokens=True)
    if not loaded.names_media:
        # Where events do not say which picture a block depends on, a router that could count its tokens would look for
        # blocks that nobody can tell it of.
        return spec
    if settings.tokens_per_image:
        return msgspec.structs.replace(spec, tokens_per_image=settings.tokens_per_image)
    rule = facts.image_rule
    if isinstance(rule, ResizedGrid):
        return msgspec.structs.replace(spec, resized_grid=rule)
    return msgspec.structs.replace(spec, tiled_grid=rule)


def _media_kinds(settings: TrtllmWorkerSettings, facts: ModelFacts) -> tuple[MediaKind, ...]:
    if settings.modality != "multimodal":
        return ()
    takes_embeddings = abilities_of(facts.architecture).takes_embeddings
    return tuple(kind for kind in MediaKind if kind is not MediaKind.EMBEDDINGS or takes_embeddings)
