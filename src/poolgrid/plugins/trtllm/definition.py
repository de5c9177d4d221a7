"""TensorRT-LLM, as ``--engine trtllm``."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from poolgrid.kernel.wire.tasks import MODALITIES
from poolgrid.plugins.trtllm.settings import TrtllmSettings, TrtllmWorkerSettings
from poolgrid.server.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine, StartPlan
from poolgrid.server.workers.settings import StepTimesSettings
from poolgrid.server.workers.tensor_transfer.settings import TensorSettings


def _open(settings: TrtllmWorkerSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    if settings.modality in MODALITIES:
        from poolgrid.plugins.trtllm.visual import open_visual

        return open_visual(settings, around)
    from poolgrid.plugins.trtllm.opening import open_engine

    return open_engine(settings, around)


def _check_library() -> None:
    from poolgrid.plugins.trtllm.library import check_library

    check_library()


def _shortest_timeout_ms(settings: TrtllmWorkerSettings) -> float:
    own = min(settings.health_timeout_ms, settings.progress_timeout_ms, settings.answer_timeout_ms)
    if settings.tensor_transport == "none":
        return own
    return min(own, settings.tensor_lease_ms, settings.tensor_fetch_timeout_ms)


def _start_plan(settings: TrtllmWorkerSettings) -> StartPlan:
    if settings.modality in MODALITIES:
        from poolgrid.plugins.trtllm.visual import plan_visual

        return plan_visual(settings)
    from poolgrid.plugins.trtllm.arguments.engine_arguments import render, resolve_files

    arguments = resolve_files(settings)
    return StartPlan(render(arguments), arguments.warnings, *arguments.gpus)


def _with_model(settings: TrtllmWorkerSettings, path: Path) -> TrtllmWorkerSettings:
    return settings.model_copy(update={"model_path": str(path), "served_model_name": settings.model_name})


def _read_limits(path: Path) -> dict[str, int]:
    from poolgrid.plugins.trtllm.arguments.contract import look_up
    from poolgrid.plugins.trtllm.arguments.engine_config import read_yaml

    values = read_yaml(path)
    found = {
        "kv-block-size": look_up(values, "kv_cache_config.tokens_per_block"),
        "max-batch-size": look_up(values, "max_batch_size"),
        "max-num-tokens": look_up(values, "max_num_tokens"),
        "max-seq-len": look_up(values, "max_seq_len"),
    }
    return {option: value for option, value in found.items() if value is not None}


ENGINE = EngineDefinition(
    title="TensorRT-LLM",
    settings=TrtllmWorkerSettings,
    open=_open,
    shortest_timeout_ms=_shortest_timeout_ms,
    check_library=_check_library,
    about="With `--engine trtllm`. `--print-engine-args` prints what the engine would get and where each value came "
    "from ([what wins](trtllm_configuration.md#precedence)), and starts nothing.",
    tables=(TrtllmSettings, TrtllmWorkerSettings, TensorSettings, StepTimesSettings),
    serves=lambda settings: (settings.model_name, settings.role.name.lower()),
    loads=lambda settings: settings.model_path,
    with_model=_with_model,
    read_limits=_read_limits,
    start_plan=_start_plan,
)
