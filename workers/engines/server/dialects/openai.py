"""Any other server that speaks OpenAI's API: it reports the names of its models, and nothing more.

Requests go to it as clients wrote them (``poolgrid.proxy``); by token ids it cannot be asked, because no field of that
API gives token ids back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from poolgrid.wire.requests import Generate
from poolgrid.workers.core.refusal import UnableError
from poolgrid.workers.engines.server.core.calls import Call
from poolgrid.workers.engines.server.core.launching import Launch, ServerCommand, WantedServer
from poolgrid.workers.engines.server.core.server_facts import ListedModel, ServerFacts
from poolgrid.workers.engines.server.kinds import MODELS, ServerKind
from poolgrid.workers.engines.server.server_client import ServerClient

if TYPE_CHECKING:
    from poolgrid.workers.engines.server.settings import EngineServerSettings

TITLE = "OpenAI-compatible server"

NO_EVENTS = "it reports nothing but OpenAI's API"


class OpenAiDialect:
    """No way to put requests as token ids."""

    title = TITLE
    tells_reuse_first = False

    def call(self, request: Generate) -> Call:
        """Refuse a request."""
        raise UnableError(f"an {TITLE} takes requests as their clients wrote them, and not as token ids")


async def learn(client: ServerClient, model: ListedModel) -> ServerFacts:
    """Return the facts of a server."""
    return ServerFacts(
        model_path=model.root or "",
        max_sequence_length=model.max_model_len,
        events_missing=NO_EVENTS,
    )


def make_dialect(facts: ServerFacts, settings: EngineServerSettings) -> OpenAiDialect:
    """Return how requests are put to a server."""
    return OpenAiDialect()


async def pictures_missing(client: ServerClient) -> str:
    """Return why a server takes no images next to token ids, and what to do."""
    return "it takes no token ids; requests with images reach it as their clients wrote them"


def command(wanted: WantedServer) -> ServerCommand:
    """Refuse to start a server: no command is known."""
    raise ValueError(f"an {TITLE} is not started here: give its engine_url")


KIND = ServerKind(
    "openai",
    TITLE,
    "",
    learn,
    make_dialect,
    Launch("", {}, command),
    "none: it publishes nothing",
    "--kv-block-size N of its worker",
    pictures_missing,
    health_path=MODELS,
)
