"""The engine that follows servers of any kind."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from poolgrid.server.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine, ServerFollower
from poolgrid.server.workers.engines.server import openai
from poolgrid.server.workers.engines.server.settings import (
    FollowedServerSettings,
    FollowedServersSettings,
    FollowerSettings,
)
from poolgrid.server.workers.server_workers import ServerWorkers


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
    server_kind=openai.KIND,
    follow=_follow,
)
