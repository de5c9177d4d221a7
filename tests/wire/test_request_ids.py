"""What people write when they ask for a request, and what they mean by it."""

from __future__ import annotations

import pytest

from poolgrid.kernel.wire.identifiers import SEQUENCE, are_sequences, kept_under, name_of, nearness, spellings

KEPT = ("mine~r1", "two-0~r2", "two-1~r2", "r3", "r4-0", "r4-1", "other-0~r5", "other-1~r6")


def known(name: str) -> str | None:
    latest = {name_of(each): each for each in KEPT}
    return name if name in KEPT else latest.get(name)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("mine", ["mine~r1"]),
        ("mine~r1", ["mine~r1"]),
        ("mine~r1~2", ["mine~r1"]),
        ("chatcmpl-mine", ["mine~r1"]),
        ("resp_mine", ["mine~r1"]),
        ("chatcmpl-r3", ["r3"]),
        ("cmpl-r3", ["r3"]),
        ("two", ["two-0~r2", "two-1~r2"]),
        ("chatcmpl-two", ["two-0~r2", "two-1~r2"]),
        ("two-1", ["two-1~r2"]),
        ("r4", ["r4-0", "r4-1"]),
        ("cmpl-r4", ["r4-0", "r4-1"]),
        ("r4-1", ["r4-1"]),
        ("other", ["other-0~r5"]),
        ("gone", []),
        ("", []),
        ("chatcmpl-", []),
    ],
)
def test_a_request_is_found_by_every_name_that_a_person_has(asked: str, found: list[str]) -> None:
    assert kept_under(asked, known) == found


def test_a_name_that_begins_like_an_object_is_taken_as_it_is_first() -> None:
    assert spellings("chatcmpl-x~r1~2") == ("chatcmpl-x~r1~2", "x~r1~2", "x~r1")
    assert spellings("resp_x_0123456789abcdef01234567")[1:] == ("x_0123456789abcdef01234567", "x")
    assert spellings("x_0123456789abcdef01234567") == ("x_0123456789abcdef01234567",)
    assert kept_under("cmpl-x", {"cmpl-x": "cmpl-x~r1", "x": "x~r2"}.get) == ["cmpl-x~r1"]


def test_a_journal_is_read_by_how_near_a_name_is() -> None:
    assert [nearness("chatcmpl-two", each) for each in ("two~r1", "two-1~r2", "twofold~r3")] == [1, SEQUENCE, None]
    assert nearness("two-1~r2", "two-1~r2") == 0
    assert are_sequences("two-0~r2", "two-1~r2")
    assert are_sequences("r4-0", "r4-1")
    assert not are_sequences("other-0~r5", "other-1~r6")
    assert not are_sequences("r4-0", "r5-0")
