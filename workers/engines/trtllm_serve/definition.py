"""trtllm-serve, as ``--engine trtllm-serve``."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import ClassVar

from poolgrid.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine
from poolgrid.workers.engines.server.core.launching import Launch
from poolgrid.workers.engines.server.kinds import ServerKind
from poolgrid.workers.engines.server.settings import EngineServerSettings
from poolgrid.workers.engines.trtllm_serve.core.launching import LAUNCH


class TrtllmServeSettings(EngineServerSettings):
    """A worker process in front of trtllm-serve."""

    engine_name: ClassVar[str] = "trtllm-serve"
    launch: ClassVar[Launch] = LAUNCH


def _open(settings: TrtllmServeSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    from poolgrid.workers.engines.trtllm_serve.opening import open_engine

    return open_engine(settings, around)


def _server_kind() -> ServerKind:
    from poolgrid.workers.engines.trtllm_serve.facts import KIND

    return KIND


ENGINE = EngineDefinition(
    title="trtllm-serve",
    settings=TrtllmServeSettings,
    open=_open,
    shortest_timeout_ms=lambda settings: min(settings.health_timeout_ms, settings.progress_timeout_ms),
    about="With `--engine trtllm-serve`: a worker [in front of TensorRT-LLM's own server](stock_engines.md). Its "
    "options are those of `--engine vllm`.",
    tables=(TrtllmServeSettings,),
    serves=EngineServerSettings.serves,
    loads=EngineServerSettings.loads,
    with_model=EngineServerSettings.with_model,
    server_kind=_server_kind,
)
