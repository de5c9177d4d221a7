"""Presence against a model of plain sets: what readers are told, what the fold knows, what a dump gives back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.consolidation.block_ownership import BlockEvent, BlockOwnership, chains
from poolgrid.kernel.wire.events import AnyEvent, BlocksRemoved, BlocksStored, CacheCleared, SnapshotBegan
from poolgrid.kernel.wire.hashing import unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from tests.consolidator.pusher import removed
from tests.examples import examples
from tests.router.fleet_builder import stored

Operation = tuple[str, str, Tier, int | None, list[int]]
hashes = st.integers(1, 12)
operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear", "restate"]),
        st.sampled_from(["worker", "kvbm"]),
        st.sampled_from(list(Tier)),
        st.none() | hashes,
        st.lists(hashes, min_size=1, max_size=8),
    ),
    max_size=30,
)


def perform(presence: BlockOwnership, operation: Operation, out: list[AnyEvent]) -> None:
    what, source, tier, parent, blocks = operation
    if what == "store":
        presence.store(source, stored(blocks, parent, tier), out)
    elif what == "remove":
        presence.remove(source, removed(blocks, tier), out)
    elif what == "clear":
        presence.clear(source, out)
    else:
        presence.restate(source, SnapshotBegan(), out)


def perform_naively(model: dict[tuple[Tier, str], set[int]], operation: Operation) -> None:
    what, source, tier, _parent, blocks = operation
    if what == "store":
        model.setdefault((tier, source), set()).update(blocks)
    elif what == "remove":
        model.setdefault((tier, source), set()).difference_update(blocks)
    else:
        for one in Tier:
            model.pop((one, source), None)


def visible(model: dict[tuple[Tier, str], set[int]]) -> dict[Tier, set[int]]:
    return {tier: set().union(*(held for (at, _), held in model.items() if at is tier)) for tier in Tier}


def read(view: dict[Tier, set[int]], events: list[AnyEvent]) -> None:
    """Follow events as a router does."""
    for event in events:
        if isinstance(event, BlocksStored):
            view[event.tier] |= set(unpack_hashes(event.sequence_hashes))
        elif isinstance(event, BlocksRemoved):
            view[event.tier] -= set(unpack_hashes(event.sequence_hashes))
        elif isinstance(event, (CacheCleared, SnapshotBegan)):
            for held in view.values():
                held.clear()


def frozen(presence: BlockOwnership) -> dict[tuple[Tier, str], dict[int, int | None]]:
    return {(tier, source): dict(held.items()) for tier, _, source, held in presence.freeze() if held}


@settings(max_examples=examples(30))
@given(operations)
def test_readers_see_what_at_least_one_source_holds(history: list[Operation]) -> None:
    presence, model = BlockOwnership(), {}  # type: ignore[var-annotated]
    view: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for operation in history:
        out: list[AnyEvent] = []
        perform(presence, operation, out)
        perform_naively(model, operation)
        for event in out:
            assert not isinstance(event, BlocksRemoved) or set(unpack_hashes(event.sequence_hashes)) <= view[event.tier]
            read(view, [event])

        assert view == visible(model)
        assert presence.counts() == tuple(len(view[tier]) for tier in Tier)


@settings(max_examples=examples(60))
@given(operations)
def test_the_fold_of_what_was_emitted_is_the_same_presence(history: list[Operation]) -> None:
    presence, folded = BlockOwnership(), BlockOwnership()
    for operation in history:
        out: list[AnyEvent] = []
        perform(presence, operation, out)
        for event in out:
            assert isinstance(event, BlockEvent)
            folded.apply(operation[1], event)

        assert {key: set(held) for key, held in frozen(folded).items()} == {
            key: set(held) for key, held in frozen(presence).items()
        }


@settings(max_examples=examples(40))
@given(operations)
def test_a_dump_names_each_block_once_with_its_parent(history: list[Operation]) -> None:
    presence = BlockOwnership()
    for operation in history:
        perform(presence, operation, [])

    for *_, held in presence.freeze():
        back: dict[int, int | None] = {}
        for parent, run in chains(held):
            previous = parent
            for sequence_hash in run:
                assert sequence_hash not in back
                back[sequence_hash] = previous
                previous = sequence_hash
        assert back == held


def test_a_chain_that_known_blocks_interrupt_is_told_in_pieces_with_the_right_parents() -> None:
    presence, out = BlockOwnership(), []  # type: ignore[var-annotated]
    presence.store("worker", stored([3], 2), [])

    presence.store("worker", stored([1, 2, 3, 4]), out)

    assert out == [stored([1, 2]), stored([4], 3)]


def test_hashes_that_name_each_other_in_a_circle_are_dumped_once() -> None:
    presence = BlockOwnership()
    presence.store("worker", stored([1, 2, 3], 3), [])
    presence.store("worker", stored([4], 2), [])
    presence.store("worker", stored([9], 9), [])

    (held,) = (held for *_, held in presence.freeze())

    assert sorted(block for _, run in chains(held) for block in run) == [1, 2, 3, 4, 9]


def test_blocks_beyond_the_limit_are_not_taken_in_and_counted() -> None:
    presence, out = BlockOwnership(blocks_max=3), []  # type: ignore[var-annotated]

    presence.store("worker", stored([1, 2]), out)
    presence.store("worker", stored([3, 4], 2), out)

    assert out == [stored([1, 2])]
    assert presence.refused_blocks == 2
