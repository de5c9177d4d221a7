"""What a worker was told of chats with its model, as its card says it to routers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from poolgrid.wire.card import AUTO, ChatSpec, WorkerCard
from poolgrid.wire.limits import CHAT_TEMPLATE_CHARS_MAX
from poolgrid.wire.names import COMPONENTS
from poolgrid.workers.settings import WorkerProcessSettings

MEBIBYTE = 1024 * 1024


def chat_spec(settings: WorkerProcessSettings) -> ChatSpec:
    """Return what a worker was told; raises ``ValueError`` when its template cannot be read, or is too long."""
    return ChatSpec(
        "" if settings.reasoning_parser == AUTO else settings.reasoning_parser,
        "" if settings.tool_call_parser == AUTO else settings.tool_call_parser,
        "" if settings.chat_template is None else _read_template(settings.chat_template),
    )


def told_card(card: WorkerCard, settings: WorkerProcessSettings, chat: ChatSpec) -> WorkerCard:
    """Return an engine's card with what the worker was told."""
    media = card.media
    if settings.max_file_size_mb is not None:
        media = msgspec.structs.replace(media, item_bytes_max=settings.max_file_size_mb * MEBIBYTE)
    return msgspec.structs.replace(card, media=media, chat=chat)


def named_card(card: WorkerCard, settings: WorkerProcessSettings) -> WorkerCard:
    """Return a card with the name that the worker has in its namespace, where it has one and the engine gave none."""
    if not settings.has_names or card.endpoint_name:
        return card
    name = f"{settings.namespace}.{COMPONENTS[card.role]}.generate"
    return msgspec.structs.replace(card, endpoint_name=name)


def card_of_rank(card: WorkerCard, dp_rank: int) -> WorkerCard:
    """Return the card of one rank: the template is in the first one's only, because a pool may have thousands."""
    if dp_rank == 0 or not card.chat.chat_template:
        return card
    return msgspec.structs.replace(card, chat=msgspec.structs.replace(card.chat, chat_template=""))


def _read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template is {path}, which cannot be read as text: {error}") from None
    if not 1 <= len(text) <= CHAT_TEMPLATE_CHARS_MAX:
        raise ValueError(
            f"chat_template is {path} with {len(text)} characters, allowed are 1 to {CHAT_TEMPLATE_CHARS_MAX}"
        )
    return text
