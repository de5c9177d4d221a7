"""What a worker with the simulated engine says of itself."""

from __future__ import annotations

from poolgrid.wire.card import NO_STEP_TIMES, MediaSpec, WorkerCard, WorkerLimits
from poolgrid.workers.core.timing import TimingModel, step_times_of
from poolgrid.workers.engines.simulated.settings import SimulatedWorkerSettings

ENGINE_NAME = "poolgrid-simulated"


def make_card(
    settings: SimulatedWorkerSettings, request_port: int, http_port: int, timing: TimingModel | None = None
) -> WorkerCard:
    """Return what the worker says of itself, with the ports it got; an encode worker has no ``timing``."""
    host = settings.advertised_host
    return WorkerCard(
        model=settings.model,
        role=settings.card_role,
        block_size=settings.block_size,
        limits=WorkerLimits(
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            total_kv_blocks=settings.total_kv_blocks,
            max_sequence_length=settings.max_sequence_length,
            host_kv_blocks=settings.host_kv_blocks,
        ),
        request_endpoint=f"tcp://{host}:{request_port}",
        http_endpoint=f"{settings.http_scheme}://{host}:{http_port}",
        loras=settings.loras,
        engine=ENGINE_NAME,
        eos_token_ids=(settings.eos_token_id,),
        vocabulary_size=settings.token_ids,
        media=media_spec(settings),
        simulated_speedup=settings.speedup,
        step_times=NO_STEP_TIMES if timing is None else step_times_of(timing),
        takes_retention=True,
    )


def media_spec(settings: SimulatedWorkerSettings) -> MediaSpec:
    """Return what the card says of media."""
    if settings.modality == "text":
        return MediaSpec()
    # The simulated engine's own placeholder and filler: no tokenizer needs to know them.
    return MediaSpec(("image", "embeddings"), "<image>", None, settings.tokens_per_image, 0)
