"""Segments are found where they stand, as long as they are remembered, and only if they are the same to the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.server.frontend.tokenization import SAME_HEAD_MAX, SEGMENT_CHARS_MIN, SegmentCache
from tests.examples import examples

END = ("<|end|>", "<|start|>")


def standing_at(cache: SegmentCache, text: str, begin: int) -> tuple[int, bytes] | None:
    """Return where the segments end that are found one behind the other from a place on, and their ids."""
    parts: list[bytes] = []
    end = cache.follow(text, begin, END, "", parts)
    return (end, b"".join(parts)) if parts else None


def test_a_segment_is_found_up_to_a_delimiter_or_the_end_of_the_text() -> None:
    cache = SegmentCache(100_000)
    segment = "<|start|>" + "word " * 100
    cache.keep(segment, b"ids")

    found = (9 + len(segment), b"ids")
    assert standing_at(cache, f"something{segment}<|end|>more", 9) == found
    assert standing_at(cache, f"something{segment}", 9) == found
    assert standing_at(cache, f"something{segment}x<|end|>", 9) is None, "the segment goes on"
    assert standing_at(cache, f"something{segment[:-1]}<|end|>", 9) is None, "it ends before"
    assert standing_at(cache, f"something{segment}<|end|>", 8) is None


def test_segments_one_behind_the_other_are_found_in_one_go_up_to_the_first_that_is_not_known() -> None:
    cache = SegmentCache(100_000)
    segments = [f"<|start|>{number}{' word' * 100}" for number in range(4)]
    for segment in segments[:3]:
        cache.keep(segment, segment[9:10].encode())
    cache.keep(segments[3], b"of another salt", "salt")

    known = "".join(segments[:3])
    assert standing_at(cache, known, 0) == (len(known), b"012")
    assert standing_at(cache, "".join(segments), 0) == (len(known), b"012")
    assert standing_at(cache, f"{known}<|end|>and more", 0) == (len(known), b"012")
    assert standing_at(cache, f"{segments[0]}<|start|>new{known}", 0) == (len(segments[0]), b"0")


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "salt"]), st.lists(st.integers(0, 12), min_size=1, max_size=8)), max_size=40
    )
)
def test_what_followed_a_segment_before_makes_no_difference_to_what_is_found(
    prompts: list[tuple[str, list[int]]],
) -> None:
    """Conversations fork, return and are forgotten; a prompt is found as by a cache that has just been filled."""
    text_of = {number: f"<|start|>{number}{' word' * (100 + number)}" for number in range(13)}
    # Some sixteen of the twenty-six fit.
    cache = SegmentCache(16 * 1500)

    for salt, numbers in prompts:
        text = "".join(text_of[number] for number in numbers)
        kept = {number for number in range(13) if ((salt, text_of[number]) if salt else text_of[number]) in cache._kept}
        known = next((at for at, number in enumerate(numbers) if number not in kept), len(numbers))
        parts: list[bytes] = []

        end = cache.follow(text, 0, END, salt, parts)

        assert parts == [f"{salt}{number}".encode() for number in numbers[:known]]
        assert end == sum(len(text_of[number]) for number in numbers[:known])
        for number in numbers:
            cache.keep(text_of[number], f"{salt}{number}".encode(), salt)


def test_segments_that_follow_each_other_in_a_circle_hold_each_other_no_more_once_all_is_forgotten() -> None:
    cache = SegmentCache(100_000)
    first, second = (f"<|start|>{number}{' word' * 100}" for number in range(2))
    cache.keep(first, b"0")
    cache.keep(second, b"1")
    assert standing_at(cache, first + second + first, 0) is not None
    kept = cache._heads[first[:SEGMENT_CHARS_MIN]][0]
    assert kept.followed_by is not None

    cache.clear()
    assert kept.followed_by is None


def test_of_many_segments_that_begin_alike_the_newest_are_found_where_they_stand_and_all_by_their_text() -> None:
    cache = SegmentCache(10_000_000)
    segments = [f"<|start|>{'the same ' * 100}{number}" for number in range(3 * SAME_HEAD_MAX)]
    for segment in segments:
        cache.keep(segment, segment[-8:].encode())

    standing = [standing_at(cache, f"{segment}<|end|>", 0) for segment in segments]
    assert [found is not None for found in standing] == [False] * 2 * SAME_HEAD_MAX + [True] * SAME_HEAD_MAX
    assert all(cache.get(segment) == segment[-8:].encode() for segment in segments)


def test_what_is_forgotten_is_found_in_no_way_and_takes_no_memory() -> None:
    cache = SegmentCache(60_000)
    segments = [f"<|start|>{number:04}{'x y ' * SEGMENT_CHARS_MIN}" for number in range(200)]
    for segment in segments:
        cache.keep(segment, b"1234")
        assert cache.used_bytes <= 60_000

    kept = [segment for segment in segments if cache.get(segment) is not None]
    assert kept == segments[-len(kept) :]
    assert len(kept) == len(cache) == sum(map(len, cache._heads.values()))
    assert standing_at(cache, segments[0], 0) is None
    cache.clear()
    assert (len(cache), cache.used_bytes, cache._heads) == (0, 0, {})
