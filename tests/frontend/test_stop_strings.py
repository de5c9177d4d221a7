from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.frontend.sequence_output import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    search = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += search.feed(piece)
        if search.matched is not None:
            return shown, search.matched
    return shown + search.flush(), None


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """What a reader would have shown who looked at the text character by character."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["END"], "The END of it", "The ", "END"),
        (["END"], "The EN", "The EN", None),
        (["abc", "b"], "xabc", "xa", "b"),
        (["aab"], "aaaab", "aa", "aab"),
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
        (["😀!"], "so 😀!", "so ", "😀!"),
        (["a"], "a", "", "a"),
    ],
)
def test_a_stop_string_is_found_wherever_the_text_is_cut_in_two(
    stops: list[str], text: str, shown: str, matched: str | None
) -> None:
    for cut in range(len(text) + 1):
        assert run(stops, [text[:cut], text[cut:]]) == (shown, matched)
    assert run(stops, list(text)) == (shown, matched)


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("ab\nc", max_size=5), max_size=10),
)
def test_any_cut_gives_what_a_reader_of_single_characters_would_show(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
)
def test_no_more_is_held_back_than_could_still_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    search = StopStrings(stops)
    text = ""
    shown = ""
    for piece in pieces:
        text += piece
        shown += search.feed(piece)
        if search.matched is not None:
            break
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
