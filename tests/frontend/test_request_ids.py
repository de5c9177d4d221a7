"""What requests are called: by their clients, and by everything behind the front end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.frontend.request_body import RequestIds, base_name
from poolgrid.router.core.load_ledger import OTHERS
from poolgrid.wire.request_ids import dispatch_id, dispatch_of, name_of


def test_a_request_is_shown_by_the_name_that_its_client_chose_and_goes_by_an_id_of_its_own() -> None:
    ids = RequestIds("p-")
    assert ids.wanted(None) == "p-1"
    assert ids.wanted(b"mine") == "mine"
    assert ids.wanted(b"x" * 129) == "p-2"
    assert ids.wanted(b"new\r\nline") == "p-3"
    assert ids.wanted(b"mine~1") == "p-4", "the mark divides what is the client's from what is not"
    assert ids.of_sequences(ids.wanted(None), 2) == ["p-5-0", "p-5-1"], "what the front end made is unique already"
    assert type(ids.of_sequences(ids.wanted(None), 1)[0]) is str, "codecs take nothing else"
    one, two = ids.of_sequences("mine", 1), ids.of_sequences("mine", 2)
    assert one == ["mine~p-7"]
    assert two == ["mine-0~p-8", "mine-1~p-8"]
    assert [base_name(one), base_name(two), base_name(ids.of_sequences("mine-0", 1))] == ["mine", "mine", "mine-0"]
    for prefix in ("", "7", "a~"):
        with pytest.raises(ValueError, match="must begin with a letter"):
            RequestIds(prefix)


CLIENT_NAMES = st.lists(st.text("ab~-.019r", max_size=6).map(str.encode), min_size=2, max_size=12)


@given(CLIENT_NAMES)
def test_no_name_makes_a_request_or_one_of_its_dispatches_another_ones(headers: list[bytes]) -> None:
    """Two front ends, and clients that try each other's ids: `a~1` is the second dispatch of nobody else's `a`."""
    fronts = [RequestIds("ra"), RequestIds("rb")]
    headers = [*headers, *(f"{header.decode()}~1".encode() for header in headers)]
    named: list[str] = []
    for ids in fronts:
        for header in headers:
            for request_id in ids.of_sequences(ids.wanted(header), 2):
                legs = [dispatch_id(request_id, number) for number in range(3)]
                assert [dispatch_of(leg) for leg in legs] == [(request_id, number) for number in range(3)]
                assert {name_of(leg) for leg in legs} == {name_of(request_id)}
                named += legs
    assert len(named) == len(set(named))
    assert not [each for each in named if each.startswith(OTHERS)]
