"""Which engine a server runs, and what it says of itself: found out by asking.

Every engine that runs in a server has a ``ServerKind`` in its definition. ``learn`` asks a server of any kind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from poolgrid.kernel.kv_events.cache_events import AnyEngineEvent
from poolgrid.server.workers.engines.server.core.engine_figures import EngineFigures
from poolgrid.server.workers.engines.server.core.launching import Launch
from poolgrid.server.workers.engines.server.core.server_facts import (
    ListedModel,
    ModelList,
    ServerFacts,
    adapters_of,
    aliases_of,
    choose_model,
    vetted,
)
from poolgrid.server.workers.engines.server.server_client import ServerClient

MODELS = "/v1/models"

HEALTH_PATH = "/health"


@dataclass(frozen=True, slots=True)
class ServerKind:
    """How servers with one engine are recognised and asked."""

    name: str
    """As ``--engine`` takes it."""
    title: str
    """What people call it."""
    owned_by: str
    """What such servers write into their list of models; empty: servers that are of no other kind."""
    learn: Callable[[ServerClient, ListedModel], Awaitable[ServerFacts]]
    """Ask a server of this kind for all it tells of itself; raises ``ServerError``, ``DecodeError``."""
    launch: Launch
    """How it is started."""
    events_option: str
    """What to start it with so that it publishes its cache events."""
    block_size_option: str
    """What to start it with for blocks of N tokens."""
    parse_drained: Callable[[Any], AnyEngineEvent] | None = None
    """Read one event of a server that hands them out over HTTP; raises ``DecodeError``."""
    health_path: str = HEALTH_PATH
    """Path that answers 200 while a server does its work."""
    figures: EngineFigures | None = None
    """Where it says how many requests it has; ``None`` = it does not."""
    names_salts: bool = True
    """Whether what it publishes names the salt of a chain; where not, its own names of first blocks tell."""
    chooses_rank: bool = False
    """Whether it chooses the data-parallel rank of a request itself, and takes no word about it."""
    reuse_option: str = ""
    """What to start it with so that its answers say how many prompt tokens it reused; empty = they do anyway."""

    async def ask(self, client: ServerClient, listed: ModelList, model: ListedModel) -> ServerFacts:
        """Return what a server of this kind says of itself; raises as ``learn`` does."""
        facts = replace(
            await self.learn(client, model),
            kind=self.name,
            model=model.id,
            loras=adapters_of(listed, model),
            aliases=aliases_of(listed, model),
        )
        return vetted(facts)


class _Version(msgspec.Struct):
    version: str = ""


async def version_of(client: ServerClient) -> str:
    """Return what ``/version`` says; empty where there is none."""
    version = await client.ask_if_there("/version", _Version)
    return "" if version is None else version.version


async def learn(
    client: ServerClient, kinds: Mapping[str, ServerKind], wanted_kind: str = "", wanted_model: str = ""
) -> ServerFacts:
    """Return the facts of a server.

    ``wanted_kind`` is taken instead of what the server looks like; ``wanted_model`` is one of its model names, empty =
    the first that is no adapter. Raises ``ServerError`` when it does not answer, ``ValueError`` when it has no such
    model.
    """
    listed = await client.ask_for(MODELS, ModelList)
    model = choose_model(listed, wanted_model)
    kind = kinds[wanted_kind] if wanted_kind else kind_of(model, kinds)
    return await kind.ask(client, listed, model)


def kind_of(model: ListedModel, kinds: Mapping[str, ServerKind]) -> ServerKind:
    """Return the kind of the server that lists a model; one without an owner stands for all others."""
    found = [each for each in kinds.values() if each.owned_by == model.owned_by]
    return found[0] if found else next(each for each in kinds.values() if not each.owned_by)
