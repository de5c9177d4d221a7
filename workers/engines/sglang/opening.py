"""Opens SGLang's server as the engine of a worker."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from poolgrid.http.http_target import Target
from poolgrid.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.workers.engines.server.core.calls import Dialect
from poolgrid.workers.engines.server.core.server_facts import ServerFacts
from poolgrid.workers.engines.server.opening import open_server
from poolgrid.workers.engines.server.settings import EngineServerSettings
from poolgrid.workers.engines.sglang.core.dialect import SglangDialect
from poolgrid.workers.engines.sglang.core.launching import LAUNCH
from poolgrid.workers.engines.sglang.facts import KIND


def open_engine(settings: EngineServerSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    """Open it; see ``poolgrid.workers.engines.server.opening``."""
    return open_server(settings, around, KIND, LAUNCH, make_dialect)


def make_dialect(facts: ServerFacts, settings: EngineServerSettings) -> Dialect:
    """Return how requests are put to a server."""
    extra = facts.extra or {}
    return SglangDialect(
        ranks=facts.ranks,
        priorities=settings.engine_priorities,
        lower_is_earlier=bool(extra.get("lower_is_earlier")),
        follows_events=settings.follow_events and not facts.events_missing,
        takes_pictures=bool(settings.image_placeholder),
        bootstrap_host=Target(settings.engine_url).host,
        bootstrap_port=int(extra.get("bootstrap_port") or 8998),
    )
