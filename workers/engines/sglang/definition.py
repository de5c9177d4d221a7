"""SGLang's server, as ``--engine sglang``."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import ClassVar

from poolgrid.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine
from poolgrid.workers.engines.server.core.launching import Launch
from poolgrid.workers.engines.server.kinds import ServerKind
from poolgrid.workers.engines.server.settings import EngineServerSettings
from poolgrid.workers.engines.sglang.core.launching import LAUNCH


class SglangSettings(EngineServerSettings):
    """A worker process in front of SGLang's server."""

    engine_name: ClassVar[str] = "sglang"
    launch: ClassVar[Launch] = LAUNCH


def _open(settings: SglangSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    from poolgrid.workers.engines.sglang.opening import open_engine

    return open_engine(settings, around)


def _server_kind() -> ServerKind:
    from poolgrid.workers.engines.sglang.facts import KIND

    return KIND


ENGINE = EngineDefinition(
    title="SGLang",
    settings=SglangSettings,
    open=_open,
    shortest_timeout_ms=lambda settings: min(settings.health_timeout_ms, settings.progress_timeout_ms),
    about="With `--engine sglang`: a worker [in front of SGLang's own server](stock_engines.md). Its options are those "
    "of `--engine vllm`.",
    tables=(SglangSettings,),
    serves=EngineServerSettings.serves,
    loads=EngineServerSettings.loads,
    with_model=EngineServerSettings.with_model,
    server_kind=_server_kind,
)
