"""How long blocks stay cached, as it is said on the wire: which block has what, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.requests import Generate, KvRetention, RetainedTokens, Sampling

SYSTEM = RetainedTokens(0, 10, 80, 5000)
DOCUMENT = RetainedTokens(12, None, 5)


def test_a_block_has_what_the_range_says_in_which_it_begins() -> None:
    retention = KvRetention((SYSTEM, DOCUMENT), 20, 9)

    blocks = [(80, 5000), (80, 5000), (80, 5000), (5, None), (5, None), (20, 9), (20, 9)]
    for start in range(8):
        for end in range(start, 8):
            assert retention.of_blocks(4, start, end, prompt_tokens=18) == blocks[start:end]
    nothing = (None, None)
    assert KvRetention((SYSTEM,)).of_blocks(8, 0, 3, prompt_tokens=24) == [(80, 5000), (80, 5000), nothing]


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ((RetainedTokens(4, 4),), "ranges[0] ends at 4, allowed is more than where it starts (4)"),
        ((SYSTEM, RetainedTokens(9)), "ranges[1] starts at 9, and the one before it reaches to 10"),
        ((DOCUMENT, RetainedTokens(99)), "ranges[1] starts at 99, and the one before it reaches to the end"),
    ],
)
def test_ranges_that_overlap_or_are_empty_are_no_message(ranges: tuple[RetainedTokens, ...], words: str) -> None:
    retention = KvRetention(ranges)
    assert retention.fault.startswith(words)
    frame = msgspec.msgpack.encode(Generate("r", b"", Sampling(1), retention=retention))

    with pytest.raises(DecodeError, match=r"Generate\.retention"):
        codec.to_worker.decode(frame)


def test_priorities_can_be_capped() -> None:
    assert KvRetention((SYSTEM, DOCUMENT), 90).capped(35) == KvRetention(
        (RetainedTokens(0, 10, 35, 5000), DOCUMENT), 35
    )
