"""Engines that run in a server of their own: a row for each kind, as ``--engine`` takes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from poolgrid.server.process.settings import Settings
from poolgrid.server.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine, ServerFollower
from poolgrid.server.workers.engines.server.kinds import ServerKind
from poolgrid.server.workers.engines.server.settings import (
    EngineServerSettings,
    EngineServersSettings,
    FollowedServerSettings,
    FollowedServersSettings,
    FollowerSettings,
)
from poolgrid.server.workers.server_workers import ServerWorkers
from poolgrid.server.workers.settings import StepTimesSettings

DIALECTS = "poolgrid.server.workers.engines.server.dialects"

OTHERS = " Its options are those of `--engine vllm`."


def server_engine(
    name: str, title: str, module: str, about: str, tables: tuple[type[Settings], ...] = ()
) -> EngineDefinition[EngineServerSettings]:
    """Return the engine of servers of one kind, ``KIND`` of a module that is imported when it is needed."""

    def kind() -> ServerKind:
        found: ServerKind = importlib.import_module(module).KIND
        return found

    class_name = "".join(word.capitalize() for word in name.split("-")) + "Settings"
    attributes = {
        "__module__": __name__,
        "__doc__": f"Workers in front of {title}'s servers.",
        "engine_name": name,
        "own_arguments": staticmethod(lambda: kind().launch.own),
    }
    settings = type(class_name, (EngineServerSettings,), attributes)
    return EngineDefinition(
        title=title,
        settings=settings,
        open=partial(_open, kind),
        shortest_timeout_ms=lambda settings: min(settings.health_timeout_ms, settings.progress_timeout_ms),
        about=f"With `--engine {name}`: a worker [in front of {about}](engine_servers.md).{'' if tables else OTHERS}",
        tables=(*tables, settings),
        serves=EngineServerSettings.serves,
        loads=EngineServerSettings.loads,
        with_model=EngineServerSettings.with_model,
        workers=EngineServerSettings.workers,
        server_kind=kind,
    )


def _open(
    kind: Callable[[], ServerKind], settings: EngineServerSettings, around: EngineHost
) -> AbstractAsyncContextManager[OpenedEngine]:
    from poolgrid.server.workers.engines.server.opening import open_server

    return open_server(settings, around, {kind().name: kind()})


def _any_kind() -> ServerKind:
    """Return the kind of all servers that are of none of the others."""
    found: ServerKind = importlib.import_module(f"{DIALECTS}.openai").KIND
    return found


def _open_any(settings: FollowedServerSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    from poolgrid.server.workers.engines.registry import server_kinds
    from poolgrid.server.workers.engines.server.opening import open_server

    return open_server(settings, around, server_kinds())


def _follow(settings: FollowerSettings, workers: ServerWorkers) -> ServerFollower:
    from poolgrid.server.workers.engines.server.follower import EngineServerFollower

    return EngineServerFollower(settings, workers)


SERVER: EngineDefinition[Any] = EngineDefinition(
    title="engine servers of any kind",
    settings=FollowerSettings,
    open=_open_any,
    shortest_timeout_ms=lambda settings: min(settings.health_timeout_ms, settings.progress_timeout_ms),
    about=(
        "With `--engine server`: [follows engine servers](engine_servers.md#following-servers) of any kind, which come "
        "and go while it runs."
    ),
    tables=(FollowerSettings, FollowedServersSettings, FollowedServerSettings),
    serves=FollowedServerSettings.serves,
    server_kind=_any_kind,
    follow=_follow,
)
VLLM = server_engine(
    "vllm",
    "vLLM",
    f"{DIALECTS}.vllm",
    "vLLM's own server",
    (EngineServersSettings, EngineServerSettings, StepTimesSettings),
)
SGLANG = server_engine("sglang", "SGLang", f"{DIALECTS}.sglang", "SGLang's own server")
TRTLLM_SERVE = server_engine("trtllm-serve", "trtllm-serve", f"{DIALECTS}.trtllm_serve", "TensorRT-LLM's own server")
