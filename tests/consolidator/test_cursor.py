"""What a sequence number means, row by row of the table in the module."""

from __future__ import annotations

import pytest

from poolgrid.kernel.consolidation.pool_state import Cursor, SequenceVerdict


@pytest.mark.parametrize(
    ("epoch", "seq", "verdict"),
    [
        (5, 3, SequenceVerdict.NEXT),
        (5, 2, SequenceVerdict.DUPLICATE),
        (5, 0, SequenceVerdict.DUPLICATE),
        (5, 4, SequenceVerdict.GAP),
        (5, 400, SequenceVerdict.GAP),
        (6, 0, SequenceVerdict.NEW_EPOCH),
        (6, 3, SequenceVerdict.NEW_EPOCH),
        (4, 3, SequenceVerdict.OLD_EPOCH),
        (4, 99, SequenceVerdict.OLD_EPOCH),
    ],
)
def test_a_batch_is_judged_by_the_table(epoch: int, seq: int, verdict: SequenceVerdict) -> None:
    cursor = Cursor(5, 3)

    assert cursor.judge_batch(epoch, seq) is verdict
    assert cursor == Cursor(5, 3)  # judging moves nothing


@pytest.mark.parametrize(
    ("epoch", "next_seq", "verdict"),
    [
        (5, 3, SequenceVerdict.NEXT),
        (5, 4, SequenceVerdict.GAP),
        (5, 2, SequenceVerdict.BACKWARDS),
        (5, 0, SequenceVerdict.BACKWARDS),
        (6, 0, SequenceVerdict.NEW_EPOCH),
        (4, 9, SequenceVerdict.OLD_EPOCH),
    ],
)
def test_an_announcement_is_judged_by_the_table(epoch: int, next_seq: int, verdict: SequenceVerdict) -> None:
    assert Cursor(5, 3).judge_announcement(epoch, next_seq) is verdict


def test_a_cursor_moves_only_when_told() -> None:
    cursor = Cursor(1)

    cursor.advance()
    assert cursor == Cursor(1, 1)
    cursor.begin(2)
    assert cursor == Cursor(2, 0)
