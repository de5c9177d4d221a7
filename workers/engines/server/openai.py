"""Any other server that speaks OpenAI's API: it reports the names of its models, and nothing more."""

from __future__ import annotations

from poolgrid.server.workers.engines.server.core.launching import Launch, ServerCommand, WantedServer
from poolgrid.server.workers.engines.server.core.server_facts import ListedModel, ServerFacts
from poolgrid.server.workers.engines.server.kinds import MODELS, ServerKind
from poolgrid.server.workers.engines.server.server_client import ServerClient

TITLE = "OpenAI-compatible server"

NO_EVENTS = "it reports nothing but OpenAI's API"


async def learn(client: ServerClient, model: ListedModel) -> ServerFacts:
    """Return the facts of a server."""
    return ServerFacts(
        model_path=model.root or "",
        max_sequence_length=model.max_model_len,
        events_missing=NO_EVENTS,
    )


def command(wanted: WantedServer) -> ServerCommand:
    """Refuse to start a server: no command is known."""
    raise ValueError(f"an {TITLE} is not started here: give its engine_url")


KIND = ServerKind(
    "openai",
    TITLE,
    "",
    learn,
    Launch("", {}, command),
    "none: it publishes nothing",
    "--kv-block-size N of its worker",
    health_path=MODELS,
)
