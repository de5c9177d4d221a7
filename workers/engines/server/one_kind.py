"""The engine of servers of one kind."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial

from poolgrid.server.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine
from poolgrid.server.workers.engines.server.kinds import ServerKind
from poolgrid.server.workers.engines.server.settings import EngineServerSettings


def server_engine(kind: ServerKind) -> EngineDefinition[EngineServerSettings]:
    """Return the engine of servers of one kind."""
    class_name = "".join(word.capitalize() for word in kind.name.split("-")) + "Settings"
    attributes = {
        "__module__": __name__,
        "__doc__": f"Workers in front of {kind.title}'s servers.",
        "engine_name": kind.name,
        "own_arguments": staticmethod(lambda: kind.launch.own),
    }
    settings = type(class_name, (EngineServerSettings,), attributes)
    return EngineDefinition(
        title=kind.title,
        settings=settings,
        open=partial(_open, kind),
        shortest_timeout_ms=lambda settings: min(settings.health_timeout_ms, settings.progress_timeout_ms),
        serves=EngineServerSettings.serves,
        loads=EngineServerSettings.loads,
        with_model=EngineServerSettings.with_model,
        workers=EngineServerSettings.workers,
        server_kind=kind,
    )


def _open(
    kind: ServerKind, settings: EngineServerSettings, around: EngineHost
) -> AbstractAsyncContextManager[OpenedEngine]:
    from poolgrid.server.workers.engines.server.opening import open_server

    return open_server(settings, around, {kind.name: kind})
