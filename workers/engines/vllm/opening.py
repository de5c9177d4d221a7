"""Opens vLLM's server as the engine of a worker."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from poolgrid.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.workers.engines.server.core.calls import Dialect
from poolgrid.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.workers.engines.server.opening import open_server
from poolgrid.workers.engines.server.settings import EngineServerSettings
from poolgrid.workers.engines.vllm.core.dialect import VllmDialect
from poolgrid.workers.engines.vllm.core.launching import LAUNCH
from poolgrid.workers.engines.vllm.facts import KIND


def open_engine(settings: EngineServerSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    """Open it; see ``poolgrid.workers.engines.server.opening``."""
    return open_server(settings, around, KIND, LAUNCH, make_dialect)


def make_dialect(facts: ServerFacts, settings: EngineServerSettings) -> Dialect:
    """Return how requests are put to a server."""
    # Requests name the global number of their rank, which is not the local one where ranks are on several machines.
    ranks = [source.dp_rank for source in facts.sources] or list(range(facts.ranks))
    return VllmDialect(facts.model, ranks, settings.engine_priorities, bool(settings.image_placeholder))
