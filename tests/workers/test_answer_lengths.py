"""Answers are as long as those of real chats: log-normal, cut at both ends, the same for the same digest."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from poolgrid.plugins.simulated.core.next_token import (
    MEAN_DEFAULT,
    STDDEV_DEFAULT,
    AnswerLengths,
)

TRACE = Path(__file__).parents[1] / "data" / "conversation_1000.jsonl"


def drawn(lengths: AnswerLengths, count: int = 20_000) -> list[int]:
    return [lengths.tokens(digest * 0x9E3779B97F4A7C15 % 2**64) for digest in range(count)]


def test_lengths_have_the_mean_and_the_spread_of_the_published_trace() -> None:
    published = [json.loads(line)["output_length"] for line in TRACE.read_text().splitlines()]
    lengths = drawn(AnswerLengths())

    # The first 1,000 rows of the 12,031 that the constants are from.
    assert statistics.fmean(published) == pytest.approx(MEAN_DEFAULT, rel=0.03)
    assert statistics.pstdev(published) == pytest.approx(STDDEV_DEFAULT, rel=0.03)
    assert statistics.fmean(lengths) == pytest.approx(MEAN_DEFAULT, rel=0.03)
    # Less than asked for: the longest are cut.
    assert 0.85 * STDDEV_DEFAULT < statistics.pstdev(lengths) < STDDEV_DEFAULT


def test_the_length_at_a_known_digest_never_changes() -> None:
    """Golden values: workers of two versions may share an answer."""
    assert [AnswerLengths().tokens(digest) for digest in (0, 1, 2**64 - 1)] == GOLDEN


GOLDEN = [137, 393, 171]


@pytest.mark.parametrize(
    ("mean", "stddev", "named"),
    [(0, 1, "the mean is 0 tokens"), (2**23, 1, "the mean is 8.3886"), (5, -1, "the standard deviation is -1")],
)
def test_impossible_lengths_are_refused(mean: float, stddev: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AnswerLengths(mean, stddev)
