"""Which engine a server runs, and what it says of itself: found out by asking.

Every engine that runs in a server has a ``ServerKind`` in its definition. ``learn`` asks a server of any kind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from poolgrid.workers.engines.server.core.server_facts import (
    ListedModel,
    ModelList,
    ServerFacts,
    choose_model,
    vetted,
)
from poolgrid.workers.engines.server.server_client import ServerClient

MODELS = "/v1/models"


@dataclass(frozen=True, slots=True)
class ServerKind:
    """How servers with one engine are recognised and asked."""

    name: str
    """As ``--engine`` takes it."""
    title: str
    """What people call it."""
    owned_by: str
    """What such servers write into their list of models."""
    learn: Callable[[ServerClient, ModelList, ListedModel], Awaitable[ServerFacts]]
    """Ask a server of this kind for all it tells; raises ``ServerError``, ``DecodeError``."""
    events_option: str
    """What to start it with so that it publishes its cache events."""
    block_size_option: str
    """What to start it with for blocks of N tokens."""
    pictures_missing: Callable[[ServerClient], Awaitable[str]]
    """Ask why a server takes no pictures beside token ids, and what to do; empty = it takes them, or does not say.

    Raises ``ServerError``.
    """


class UnknownServer(ValueError):
    """A server is none of the kinds there are."""


async def learn(
    client: ServerClient, kinds: Mapping[str, ServerKind], wanted_kind: str = "", wanted_model: str = ""
) -> ServerFacts:
    """Return what a server says of itself.

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
                f"{client.target.url} says that its models are owned by {model.owned_by!r}, known are "
                f"{', '.join(f'{each.owned_by} ({each.name})' for each in kinds.values())}; name its engine"
            )
        kind = found[0]
    return vetted(await kind.learn(client, listed, model))
