"""What a worker's card must have in common with its pool for the worker to join."""

from __future__ import annotations

from collections.abc import Mapping

from poolgrid.consolidator.core.pool_state import MemberRank
from poolgrid.wire.card import WorkerCard, card_problem, name_problem
from poolgrid.wire.hashing import HASH_SPEC
from poolgrid.wire.identifiers import WorkerKey
from poolgrid.wire.limits import POOL_TEMPLATES_CHARS_MAX


def incompatibility(
    members: Mapping[WorkerKey, MemberRank], workers_max: int, key: WorkerKey, card: WorkerCard
) -> str | None:
    """Return why a rank with this card may not join the members of a pool, or ``None``."""
    if key not in members and len(members) >= workers_max:
        return f"the pool has {len(members)} worker ranks, allowed are at most {workers_max}"
    problem = name_problem("worker_id", key.worker_id, needed=True) or card_problem(card)
    if problem is not None:
        return problem
    if card.dp_size < 1 or key.dp_rank >= card.dp_size:
        return f"dp_rank is {key.dp_rank}, the card's dp_size {card.dp_size} allows 0 to {card.dp_size - 1}"
    if card.hash_spec != HASH_SPEC:
        return (
            f"the card's hash_spec is {card.hash_spec!r}, this pool hashes blocks with {HASH_SPEC!r}: "
            "its blocks would never be found"
        )
    templates = len(card.chat.chat_template)
    for other_key, other in members.items():
        if other_key == key:
            continue
        if other_key.worker_id == key.worker_id and other.card.dp_size != card.dp_size:
            return f"the card's dp_size is {card.dp_size}, rank {other_key} of the worker has {other.card.dp_size}"
        if other.card.model == card.model and other.card.block_size != card.block_size:
            return (
                f"the card's block_size is {card.block_size}, worker {other_key} serves model {card.model!r} with "
                f"{other.card.block_size}; all workers of a model in a pool must agree"
            )
        if other.card.model == card.model:
            contradiction = _contradiction(card, other_key, other.card)
            if contradiction is not None:
                return contradiction
        templates += len(other.card.chat.chat_template)
    if card.chat.chat_template and templates > POOL_TEMPLATES_CHARS_MAX:
        return (
            f"with the card's chat.chat_template those of the pool have {templates} characters, allowed are "
            f"{POOL_TEMPLATES_CHARS_MAX}: give the template to the routers"
        )
    return None


def _contradiction(card: WorkerCard, other_key: WorkerKey, other: WorkerCard) -> str | None:
    """Say what two workers of a model tell routers differently, or ``None``."""
    told = [(f"chat.{field}", own, others) for field, own, others in card.chat.contradictions(other.chat)]
    largest, others = card.media.item_bytes_max, other.media.item_bytes_max
    if largest and others and largest != others:
        told.append(("media.item_bytes_max", str(largest), str(others)))
    if not told:
        return None
    field, own_value, other_value = told[0]
    return (
        f"the card's {field} is {own_value}, worker {other_key} serves model {card.model!r} with {other_value}; all "
        "workers of a model in a pool must agree, or leave it out"
    )
