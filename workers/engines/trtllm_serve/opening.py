"""Opens trtllm-serve as the engine of a worker."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from poolgrid.kv_events.trtllm import parse_event
from poolgrid.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.workers.engines.server.core.calls import Dialect
from poolgrid.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.workers.engines.server.opening import open_server
from poolgrid.workers.engines.server.settings import EngineServerSettings
from poolgrid.workers.engines.trtllm_serve.core.dialect import TrtllmServeDialect
from poolgrid.workers.engines.trtllm_serve.core.launching import LAUNCH
from poolgrid.workers.engines.trtllm_serve.facts import KIND


def open_engine(settings: EngineServerSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    """Open it; see ``poolgrid.workers.engines.server.opening``."""
    return open_server(settings, around, KIND, LAUNCH, make_dialect, parse_event)


def make_dialect(facts: ServerFacts, settings: EngineServerSettings) -> Dialect:
    """Return how requests are put to a server."""
    return TrtllmServeDialect(facts.model)
