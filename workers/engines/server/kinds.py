"""Which engine a server runs, and what it says of itself: found out by asking.

Every engine that runs in a server has a ``ServerKind`` in its definition. ``learn`` asks a server of any kind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from poolgrid.kv_events.cache_events import AnyEngineEvent
from poolgrid.workers.engines.server.core.calls import ServerDialect
from poolgrid.workers.engines.server.core.launching import Launch
from poolgrid.workers.engines.server.core.server_facts import (
    ListedModel,
    ModelList,
    ServerFacts,
    adapters_of,
    aliases_of,
    choose_model,
    vetted,
)
from poolgrid.workers.engines.server.server_client import ServerClient

if TYPE_CHECKING:
    from poolgrid.workers.engines.server.settings import EngineServerSettings

MODELS = "/v1/models"

HEALTH_PATH = "/health"
"""Path that answers 200 while a server does its work."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """How servers with one engine are recognised and asked."""

    name: str
    """As ``--engine`` takes it."""
    title: str
    """What people call it."""
    owned_by: str
    """What such servers write into their list of models."""
    learn: Callable[[ServerClient, ListedModel], Awaitable[ServerFacts]]
    """Ask a server of this kind for all it tells of itself; raises ``ServerError``, ``DecodeError``."""
    make_dialect: Callable[[ServerFacts, EngineServerSettings], ServerDialect]
    """How requests are put to a server."""
    launch: Launch
    """How it is started."""
    events_option: str
    """What to start it with so that it publishes its cache events."""
    block_size_option: str
    """What to start it with for blocks of N tokens."""
    pictures_missing: Callable[[ServerClient], Awaitable[str]]
    """Ask why a server takes no images next to token ids, and what to do; empty = it takes them, or does not report it.

    Raises ``ServerError``.
    """
    parse_drained: Callable[[Any], AnyEngineEvent] | None = None
    """Read one event of a server that hands them out over HTTP; raises ``DecodeError``."""

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


class UnknownServer(ValueError):
    """A server is none of the kinds there are."""


async def learn(
    client: ServerClient, kinds: Mapping[str, ServerKind], wanted_kind: str = "", wanted_model: str = ""
) -> ServerFacts:
    """Return the facts of a server.

    ``wanted_kind`` is taken instead of what the server looks like; ``wanted_model`` is one of its model names, empty =
    the first that is no adapter. Raises ``ServerError`` when it does not answer, ``UnknownServer`` when it is of no
    kind that is known, ``ValueError`` when it has no such model.
    """
    listed = await client.ask_for(MODELS, ModelList)
    model = choose_model(listed, wanted_model)
    if wanted_kind:
        kind = kinds[wanted_kind]
    else:
        found = [each for each in kinds.values() if each.owned_by == model.owned_by]
        if not found:
            raise UnknownServer(
                f"{client.target.url} reports models owned by {model.owned_by!r}, known are "
                f"{', '.join(f'{each.owned_by} ({each.name})' for each in kinds.values())}; name its engine"
            )
        kind = found[0]
    return await kind.ask(client, listed, model)
