"""What a worker with TensorRT-LLM says of itself."""

from __future__ import annotations

from poolgrid.wire.card import MediaSpec, WorkerCard, WorkerLimits
from poolgrid.wire.limits import PROMPT_TOKENS_MAX
from poolgrid.wire.multimodal import MediaKind
from poolgrid.workers.engines.trtllm.arguments.engine_arguments import EngineArguments
from poolgrid.workers.engines.trtllm.arguments.engine_rules import look_up
from poolgrid.workers.engines.trtllm.core.model_abilities import abilities_of
from poolgrid.workers.engines.trtllm.core.model_facts import ModelFacts
from poolgrid.workers.engines.trtllm.engine import LoadedEngine
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
        media=MediaSpec(_media_kinds(settings, facts), placeholder_token_id=facts.image_token_id),
        endpoint_name=settings.endpoint_name,
    )


def _media_kinds(settings: TrtllmWorkerSettings, facts: ModelFacts) -> tuple[MediaKind, ...]:
    if settings.modality != "multimodal":
        return ()
    takes_embeddings = abilities_of(facts.architecture).takes_embeddings
    return tuple(kind for kind in MediaKind if kind is not MediaKind.EMBEDDINGS or takes_embeddings)
