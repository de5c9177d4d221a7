"""What is derived from the fleet is always that of the fleet as it is."""

from __future__ import annotations

from poolgrid.router.core.fleet import Fleet, chat_of, media_of
from poolgrid.wire.card import ChatSpec, MediaSpec
from poolgrid.wire.identifiers import Role
from tests.router.fleet_builder import make_card, worker_key


def test_models_and_roles_follow_every_change() -> None:
    fleet = Fleet()
    assert fleet.models() == {}

    b = fleet.join(worker_key("b"), 1, make_card())
    a = fleet.join(worker_key("a"), 1, make_card())
    assert fleet.models() == {"m": [a, b]}
    assert fleet.models() is fleet.models(), "sorted once per change"

    renewed = fleet.join(worker_key("b"), 2, make_card(role=Role.DECODE))
    assert fleet.models() == {"m": [a, renewed]}
    assert fleet.serving("m") == [a]
    assert fleet.serving("m", (Role.DECODE,)) == [renewed]

    fleet.drain(worker_key("a"))
    assert fleet.serving("m") == [a]
    assert a.draining

    fleet.leave(worker_key("a"))
    assert fleet.models() == {"m": [renewed]}
    assert fleet.serving("other") == []


def test_what_any_worker_was_told_of_chats_and_media_holds_for_its_model() -> None:
    fleet = Fleet()
    fleet.join(worker_key("a"), 1, make_card(chat=ChatSpec("", "hermes")))
    fleet.join(worker_key("b"), 1, make_card(chat=ChatSpec("qwen3", "", "{{ messages }}")))
    fleet.join(worker_key("c"), 1, make_card(role=Role.ENCODE, media=MediaSpec(("image",), item_bytes_max=7)))
    fleet.join(worker_key("d"), 1, make_card(media=MediaSpec(("embeddings",), "<image>")))
    (workers,) = fleet.models().values()

    assert chat_of(workers) == ChatSpec("qwen3", "hermes", "{{ messages }}")
    assert media_of(workers) == MediaSpec(("embeddings",), "<image>", item_bytes_max=7)
    assert chat_of([]) == ChatSpec()
