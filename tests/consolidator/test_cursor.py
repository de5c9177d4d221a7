"""What a sequence number means, row by row of the table in the module."""

from __future__ import annotations

import pytest

from poolgrid.consolidator.core.cursor import Cursor, Verdict


@pytest.mark.parametrize(
    ("epoch", "seq", "verdict"),
    [
        (5, 3, Verdict.NEXT),
        (5, 2, Verdict.DUPLICATE),
        (5, 0, Verdict.DUPLICATE),
        (5, 4, Verdict.GAP),
        (5, 400, Verdict.GAP),
        (6, 0, Verdict.NEW_EPOCH),
        (6, 3, Verdict.NEW_EPOCH),
        (4, 3, Verdict.OLD_EPOCH),
        (4, 99, Verdict.OLD_EPOCH),
    ],
)
def test_a_batch_is_judged_by_the_table(epoch: int, seq: int, verdict: Verdict) -> None:
    cursor = Cursor(5, 3)

    assert cursor.judge_batch(epoch, seq) is verdict
    assert cursor == Cursor(5, 3)  # judging moves nothing


@pytest.mark.parametrize(
    ("epoch", "next_seq", "verdict"),
    [
        (5, 3, Verdict.NEXT),
        (5, 4, Verdict.GAP),
        (5, 2, Verdict.BACKWARDS),
        (5, 0, Verdict.BACKWARDS),
        (6, 0, Verdict.NEW_EPOCH),
        (4, 9, Verdict.OLD_EPOCH),
    ],
)
def test_an_announcement_is_judged_by_the_table(epoch: int, next_seq: int, verdict: Verdict) -> None:
    assert Cursor(5, 3).judge_announcement(epoch, next_seq) is verdict


def test_a_cursor_moves_only_when_told() -> None:
    cursor = Cursor(1)

    cursor.advance()
    assert cursor == Cursor(1, 1)
    cursor.begin(2)
    assert cursor == Cursor(2, 0)
