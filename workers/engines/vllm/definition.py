"""vLLM's server, as ``--engine vllm``."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import ClassVar

from poolgrid.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine
from poolgrid.workers.engines.server.core.launching import Launch
from poolgrid.workers.engines.server.kinds import ServerKind
from poolgrid.workers.engines.server.settings import EngineServerSettings
from poolgrid.workers.engines.vllm.core.launching import LAUNCH
from poolgrid.workers.step_times import StepTimesSettings


class VllmSettings(EngineServerSettings):
    """A worker process in front of vLLM's server."""

    engine_name: ClassVar[str] = "vllm"
    launch: ClassVar[Launch] = LAUNCH


def _open(settings: VllmSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    from poolgrid.workers.engines.vllm.opening import open_engine

    return open_engine(settings, around)


def _server_kind() -> ServerKind:
    from poolgrid.workers.engines.vllm.facts import KIND

    return KIND


ENGINE = EngineDefinition(
    title="vLLM",
    settings=VllmSettings,
    open=_open,
    shortest_timeout_ms=lambda settings: min(settings.health_timeout_ms, settings.progress_timeout_ms),
    about="With `--engine vllm`: a worker [in front of vLLM's own server](stock_engines.md).",
    tables=(EngineServerSettings, StepTimesSettings, VllmSettings),
    serves=EngineServerSettings.serves,
    loads=EngineServerSettings.loads,
    with_model=EngineServerSettings.with_model,
    server_kind=_server_kind,
)
