"""Segments are found where they stand, as long as they are remembered, and only if they are the same to the end."""

from __future__ import annotations

from poolgrid.frontend.segment_cache import SAME_HEAD_MAX, SEGMENT_CHARS_MIN, SegmentCache

END = ("<|end|>", "<|start|>")


def test_a_segment_is_found_up_to_a_delimiter_or_the_end_of_the_text() -> None:
    cache = SegmentCache(100_000)
    segment = "<|start|>" + "word " * 100
    cache.keep(segment, b"ids")

    found = (9 + len(segment), b"ids")
    assert cache.standing_at(f"something{segment}<|end|>more", 9, END) == found
    assert cache.standing_at(f"something{segment}", 9, END) == found
    assert cache.standing_at(f"something{segment}x<|end|>", 9, END) is None, "the segment goes on"
    assert cache.standing_at(f"something{segment[:-1]}<|end|>", 9, END) is None, "it ends before"
    assert cache.standing_at(f"something{segment}<|end|>", 8, END) is None


def test_a_segment_is_found_in_a_text_with_wider_characters_elsewhere() -> None:
    cache = SegmentCache(100_000)
    segment = "<|start|>" + "plain " * 100
    cache.keep(segment, b"ids")

    for other in ("é", "日本語", "🙂"):
        text = f"{other}{segment}<|end|>{other}"
        assert cache.standing_at(text, len(other), END) == (len(other) + len(segment), b"ids")


def test_of_many_segments_that_begin_alike_the_newest_are_found_where_they_stand_and_all_by_their_text() -> None:
    cache = SegmentCache(10_000_000)
    segments = [f"<|start|>{'the same ' * 100}{number}" for number in range(3 * SAME_HEAD_MAX)]
    for segment in segments:
        cache.keep(segment, segment[-8:].encode())

    standing = [cache.standing_at(f"{segment}<|end|>", 0, END) for segment in segments]
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
    assert cache.standing_at(segments[0], 0, END) is None
    cache.clear()
    assert (len(cache), cache.used_bytes, cache._heads) == (0, 0, {})
