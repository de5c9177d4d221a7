"""From samples of a server to a timing table: medians, without the overhead, and gaps while all decode."""

from __future__ import annotations

import pytest

from poolgrid.tools.engine_check.core.timing_points import (
    DecodeSample,
    Measured,
    PrefillSample,
    decode_points,
    gaps_while_all_decode,
    timing_table,
)


def measured(prefill: list[PrefillSample], decode: list[DecodeSample], overhead_ms: float = 2.0) -> Measured:
    return Measured(overhead_ms, tuple(prefill), tuple(decode))


def test_decode_points_of_nearly_one_share_become_one() -> None:
    samples = [
        DecodeSample(32, 100, 0.5, (20.0, 22.0, 24.0)),
        DecodeSample(1, 32, 0.0005, (5.0,)),
        DecodeSample(8, 32, 0.001, (7.0,)),
        DecodeSample(32, 900, 1.01, (30.0,)),
        DecodeSample(32, 300, 0.7, ()),
    ]

    assert decode_points(measured([], samples)) == [[0.0005, 6.0], [0.5, 22.0], [1.0, 30.0]]


def test_a_table_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="no decode was measured"):
        timing_table(measured([PrefillSample(1, (3.0,))], []), "here")


def test_gaps_count_from_the_last_first_token_to_the_first_last_one() -> None:
    slow = [0.0, 10.0, 20.0, 30.0, 40.0]
    late = [15.0, 25.0, 25.0, 45.0]  # the last is behind the end of the other

    # What a busy client reads together is as long as what it reads one by one.
    assert gaps_while_all_decode([slow, late]) == [10.0, 5.0]
    assert gaps_while_all_decode([slow, [1.0]]) == []
    assert gaps_while_all_decode([]) == []


def test_gaps_are_those_of_steps_where_a_server_sends_several_tokens_at_a_time() -> None:
    # One at first, then four at a time, a step each 10 ms; the other joined after the first four.
    early = [0.0, *[40.0] * 4, *[80.0] * 4, *[120.0] * 4]
    joined = [30.0, *[70.0] * 4, *[110.0] * 4, *[150.0] * 4]

    assert gaps_while_all_decode([early, joined]) == [10.0, 10.0]
    assert gaps_while_all_decode([[0.0, 40.0, 40.0], [40.0, 40.0]]) == []
