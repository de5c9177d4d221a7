"""Mutated documents: never anything but a document or named problems.

`POOLGRID_FUZZ_DOCUMENTS` sets how many (default 2,000; the issue's measure is 10,000), `POOLGRID_FUZZ_SEED` where they
begin.
"""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.pool_grids.grid import Grid, GridRequest
from poolgrid.kernel.pool_grids.grid_document import GridDocumentError
from poolgrid.plugins.grid_builder.pool_profiles import load_profiles
from poolgrid.server.global_router.document.history import document_text
from poolgrid.server.global_router.document.reader import load_document
from tests.global_router.documents import (
    DYNAMO_DOCUMENTS,
    POOL_CONFIGS,
    ROOT,
    aggregated,
    disagg,
    dynamo_agg,
    dynamo_disagg,
)

DOCUMENTS = int(os.environ.get("POOLGRID_FUZZ_DOCUMENTS", "2000"))
SEED = int(os.environ.get("POOLGRID_FUZZ_SEED", "1"))

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 0.5, 1.0, -0.0, 1e308, 2**31, 2**64, 10**400, float("nan"), float("inf"),
    "", "0", "p-fast", "x" * 300, "\ud800", "é", [], [[]], [0], [[0, 1]], {}, {"name": "a"}, {"": {}}, [None],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, child in value.items():
            found += places(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            found += places(child, (*path, index))
    return found


def mutate(raw: Any, dice: random.Random) -> Any:
    """Change one to four places of a document: replace, remove, double, rename, swap, wrap, nudge."""
    for _ in range(dice.randint(1, 4)):
        all_places = places(raw)
        if not all_places:
            return raw
        path = dice.choice(all_places)
        parent = raw
        for step in path[:-1]:
            parent = parent[step]
        key = path[-1]
        action = dice.randrange(8)
        if action == 0:
            parent[key] = copy.deepcopy(dice.choice(VALUES))
        elif action == 1:
            del parent[key]
        elif action == 2 and isinstance(parent, list):
            parent.insert(dice.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        elif action == 3 and isinstance(parent, dict):
            name = list(key)
            if name:
                name[dice.randrange(len(name))] = dice.choice("_xé")
            parent["".join(name)] = parent.pop(key)
        elif action == 4:
            other = raw
            for step in dice.choice(all_places):
                other = other[step]
            parent[key] = copy.deepcopy(other)
        elif action == 5:
            parent[key] = [parent[key]]
        elif action == 6 and isinstance(parent[key], int | float):
            parent[key] = parent[key] * dice.choice([-1, 0, 2, 1.5, 1e9])
        elif action == 7 and isinstance(parent[key], str):
            parent[key] = parent[key][:-1]
    return raw


def damage(text: str, dice: random.Random) -> str | bytes:
    """Now and then, break the text itself."""
    if dice.random() < 0.85 or not text:
        return text
    at = dice.randrange(len(text))
    if dice.random() < 0.5:
        return text[:at] + dice.choice(["", "}", "{", '"', ",", "NaN", "\\"]) + text[at + dice.randint(0, 3) :]
    return text.encode("utf-8", "surrogatepass")[:at] + bytes([dice.randrange(256)])


def corpus() -> list[Any]:
    return [
        disagg(),
        aggregated(),
        *(make() for make in DYNAMO_DOCUMENTS.values()),
        *(json.loads(path.read_text()) for path in POOL_CONFIGS),
    ]


def check_problems(error: GridDocumentError) -> None:
    """A refusal has problems, each a line that begins with a place and can be printed."""
    assert error.problems
    for line in map(str, error.problems):
        place, _, text = line.partition(": ")
        assert place.startswith("$")
        assert text
        assert "\n" not in line
        line.encode()


def explore(text: str | bytes) -> bool:
    """Load a document; whatever is valid can be used and written, whatever is not names its places."""
    try:
        loaded = load_document(text)
    except GridDocumentError as error:
        check_problems(error)
        return False
    again = load_document(document_text(loaded.document))
    assert again.document == loaded.document
    grid = Grid(loaded.document)
    for stage in grid.stages:
        for isl in (0, 1500, 10**7):
            selection = grid.select(stage, GridRequest(isl))
            assert selection.pool in grid.stages[stage].ranks
    return True


def test_mutated_documents_are_read_or_refused_with_their_places() -> None:
    base = corpus()
    valid = 0
    for number in range(DOCUMENTS):
        dice = random.Random(SEED * 1_000_003 + number)
        raw = mutate(copy.deepcopy(dice.choice(base)), dice)
        text = damage(json.dumps(raw), dice)
        try:
            valid += explore(text)
        except Exception as error:
            raise AssertionError(f"document {number} of seed {SEED}: {error!r}: {text!r}") from error
    assert DOCUMENTS < 100 or 0.02 * DOCUMENTS < valid < 0.8 * DOCUMENTS


def test_mutated_profiles_are_read_or_refused_with_their_places() -> None:
    base = json.loads((ROOT / "pool_configs" / "profiles" / "two_by_two.profiles.json").read_text())
    for number in range(DOCUMENTS // 10):
        dice = random.Random(SEED * 7_000_003 + number)
        text = damage(json.dumps(mutate(copy.deepcopy(base), dice)), dice)
        try:
            load_profiles(text)
        except GridDocumentError as error:
            check_problems(error)


KEYS = st.sampled_from(
    sorted(
        {
            key
            for raw in (disagg(), aggregated(), dynamo_disagg(), dynamo_agg())
            for path in places(raw)
            for key in path
            if isinstance(key, str)
        }
    )
)
JSON = st.recursive(
    st.sampled_from(VALUES) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


@given(raw=st.dictionaries(KEYS, JSON, max_size=6))
def test_any_object_with_the_formats_keys_is_read_or_refused(raw: dict[str, Any]) -> None:
    explore(json.dumps(raw))


@given(text=st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_read_or_refused(text: str | bytes) -> None:
    assert not explore(text)
