"""Hot reload as a value: replaced, unchanged, refused, rolled back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from poolgrid.server.global_router.document.history import CHANGES_MAX, DocumentHistory, diff_documents
from tests.global_router.documents import aggregated, changed, disagg, document, load


def history(capacity: int = 16) -> DocumentHistory:
    return DocumentHistory(load(disagg()), 0, capacity)


def text(raw: dict[str, Any]) -> str:
    return json.dumps(raw)


def test_a_valid_change_replaces_the_document_and_says_what_changed() -> None:
    made = history()
    raw = changed(disagg(), ("prefill", "mapping", 1, 1), "p-cheap")

    reload = made.propose(text(raw), "new.json", 5)

    assert reload.outcome == "replaced"
    assert [str(change) for change in reload.changes] == ['$.prefill.mapping[1][1]: "p-fast" is now "p-cheap"']
    assert made.current.number == 2
    assert made.current.loaded.document == document(raw)
    assert reload.explanation().source == "new.json"


def test_an_invalid_document_leaves_the_old_one_in_force() -> None:
    made = history()
    before = made.current

    reload = made.propose(text(changed(disagg(), ("mode",), "agregated")), "bad.json", 5)

    assert reload.outcome == "refused"
    assert str(reload.problems[0]).startswith("$.mode: ")
    assert made.current is before


def test_an_equal_document_is_unchanged_however_it_is_written() -> None:
    made = history()

    reload = made.propose(text(changed(disagg(), ("prefill", "mapping"), [[0, 1], [0, 0]])), "same.json", 5)

    assert reload.outcome == "unchanged"
    assert made.current.number == 1


def test_rollback_goes_back_one_document_at_a_time() -> None:
    made = history()
    first = made.current.loaded.document
    for isl_max in (3000, 4000):
        made.propose(text(changed(disagg(), ("prefill", "isl_max"), isl_max)), "x", isl_max)

    once = made.rollback(9)
    assert once.outcome == "rolled-back"
    assert [str(change) for change in once.changes] == ["$.prefill.isl_max: 4000 is now 3000"]
    made.rollback(10)
    assert made.current.loaded.document == first
    assert made.current.number == 5
    assert made.rollback(11).outcome == "unchanged"


def test_history_is_bounded() -> None:
    made = history(capacity=3)
    for isl_max in range(3000, 3010):
        made.propose(text(changed(disagg(), ("prefill", "isl_max"), isl_max)), "x", 0)

    assert [revision.number for revision in made.kept] == [9, 10, 11]
    with pytest.raises(ValueError, match="capacity is 0"):
        history(0)


def test_pools_are_compared_by_name() -> None:
    raw = disagg()
    raw["prefill"]["pools"].insert(0, {"name": "p-new", "priority": 5, "cost_per_hour": 1.0})
    raw["prefill"]["mapping"][1][1] = "p-new"
    raw["prefill"]["pools"][1]["url"] = "http://other:1"

    changes = [str(change) for change in diff_documents(document(disagg()), document(raw))]

    assert changes == [
        '$.prefill.pools[name=p-fast].url: "http://localhost:1" is now "http://other:1"',
        "$.prefill.pools[name=p-new]: added, an object of 7 keys",
        '$.prefill.mapping[1][1]: "p-fast" is now "p-new"',
    ]


def test_a_changed_order_of_pools_is_a_change() -> None:
    raw = disagg()
    raw["decode"]["pools"].reverse()

    changes = diff_documents(document(disagg()), document(raw))

    assert [(change.path, change.before) for change in changes] == [("$.decode.pools", "order d-fast, d-cheap")]


def test_a_stage_that_goes_and_one_that_comes_are_named() -> None:
    changes = diff_documents(document(disagg()), document(aggregated()))

    assert {(change.path, change.kind) for change in changes} == {
        ("$.mode", "changed"),
        ("$.prefill", "removed"),
        ("$.decode", "removed"),
        ("$.aggregated", "added"),
    }


def test_the_number_of_changes_is_bounded() -> None:
    def grid(pool: int) -> dict[str, Any]:
        raw = {**disagg(), "accept": ["unreachable-pool"]}
        raw["prefill"].update(isl_resolution=64, ttft_resolution=64, mapping=[[pool] * 64] * 64)
        return raw

    assert len(diff_documents(document(grid(0)), document(grid(1)))) == CHANGES_MAX
