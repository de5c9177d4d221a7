"""Values cut into a client's JSON: what is not cut stays byte for byte, and the result is the naive edit's."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.body_edit import (
    MAX_MEMBERS,
    MAX_SLOW_BYTES,
    edit,
    edit_elements,
    elements,
    top_level,
)
from tests.forwarding.json_text import NAMES, arrays, bodies, read, values

EDITS = [
    pytest.param(b'{"a":1}', b'{"cache_salt":"s","a":1}', id="inserted-first"),
    pytest.param(b"{}", b'{"cache_salt":"s"}', id="empty"),
    pytest.param(b" \n{ \t} ", b' \n{"cache_salt":"s" \t} ', id="empty-with-space"),
    pytest.param(b'{ "a": 1 }\n', b'{"cache_salt":"s", "a": 1 }\n', id="space-stays"),
    pytest.param(b'{"a":1, "cache_salt" : "old" , "b":2}', b'{"a":1, "cache_salt" : "s" , "b":2}', id="in-place"),
    pytest.param(b'{"cache\\u005fsalt":[1,{"x":"}"}],"b":2}', b'{"cache\\u005fsalt":"s","b":2}', id="escaped-key"),
    pytest.param(b'{"cache_salt":1,"cache_salt":12}', b'{"cache_salt":"s","cache_salt":"s"}', id="repeated"),
    pytest.param(b'{"cache_salt":12,"cache_salt":1}', b'{"cache_salt":"s","cache_salt":"s"}', id="repeated-prefix"),
    pytest.param(b'\xef\xbb\xbf{"a":1}', b'\xef\xbb\xbf{"cache_salt":"s","a":1}', id="byte-order-mark"),
    pytest.param(b'{"a":NaN,"b":-Infinity}', b'{"cache_salt":"s","a":NaN,"b":-Infinity}', id="nan"),
    pytest.param(b'{"a":"\\ud83d","cache_salt":0}', b'{"a":"\\ud83d","cache_salt":"s"}', id="half-of-a-pair"),
    pytest.param(b'{"\\ud83d":1,"cache_salt":0}', b'{"\\ud83d":1,"cache_salt":"s"}', id="half-of-a-pair-as-key"),
    pytest.param(b'{"a":{"cache_salt":1}}', b'{"cache_salt":"s","a":{"cache_salt":1}}', id="nested-name-is-another"),
    pytest.param(b'{"a":"\\"cache_salt\\":1"}', b'{"cache_salt":"s","a":"\\"cache_salt\\":1"}', id="name-within-text"),
    pytest.param(
        b'{"seed":9007199254740993,"f":1E+0}', b'{"cache_salt":"s","seed":9007199254740993,"f":1E+0}', id="num"
    ),
]


@pytest.mark.parametrize(("body", "edited"), EDITS)
def test_a_set_field_changes_no_other_byte(body: bytes, edited: bytes) -> None:
    assert edit(body, {"cache_salt": b'"s"'}) == edited


REMOVALS = [
    pytest.param(b'{"a":1,"b":2,"c":3}', ["a"], b'{"b":2,"c":3}', id="first"),
    pytest.param(b'{"a":1, "b":2, "c":3}', ["b"], b'{"a":1,  "c":3}', id="middle"),
    pytest.param(b'{"a":1 , "b":2 , "c":3 }', ["c"], b'{"a":1 , "b":2 }', id="last"),
    pytest.param(b'{"a":1,"b":2,"c":3}', ["b", "c"], b'{"a":1}', id="last-two"),
    pytest.param(b'{ "a":1, "b":2 }', ["a", "b"], b"{  }", id="all"),
    pytest.param(b'{"a":1,"b":2,"a":3}', ["a"], b'{"b":2}', id="repeated"),
    pytest.param(b'{"a":1}', ["x"], b'{"a":1}', id="absent"),
    pytest.param(b'{"a":1,"a":[1],"b":2}', ["a"], b'{"b":2}', id="repeated-at-once"),
]


@pytest.mark.parametrize(("body", "names", "edited"), REMOVALS)
def test_a_removed_field_takes_one_comma_along(body: bytes, names: list[str], edited: bytes) -> None:
    assert edit(body, removed=names) == edited


NESTED = [
    pytest.param(b'{"stream":true}', b'{"stream_options":{"include_usage":true},"stream":true}', id="absent"),
    pytest.param(b'{"stream_options":null}', b'{"stream_options":{"include_usage":true}}', id="null"),
    pytest.param(b'{"stream_options" : {} }', b'{"stream_options" : {"include_usage":true} }', id="empty"),
    pytest.param(
        b'{"stream_options":{ "include_usage" : false, "x":1.0}}',
        b'{"stream_options":{ "include_usage" : true, "x":1.0}}',
        id="in-place",
    ),
    pytest.param(
        b'{"stream_options":{"x":1.0}}', b'{"stream_options":{"include_usage":true,"x":1.0}}', id="beside-another"
    ),
    pytest.param(b'{"stream_options":"odd"}', b'{"stream_options":"odd"}', id="the-engine-refuses-it"),
    pytest.param(b'{"stream_options":[]}', b'{"stream_options":[]}', id="the-engine-refuses-a-list"),
]


@pytest.mark.parametrize(("body", "edited"), NESTED)
def test_a_nested_field_is_set_in_the_object_that_is_there(body: bytes, edited: bytes) -> None:
    assert edit(body, nested={"stream_options": {"include_usage": b"true"}}) == edited


INVALID = [
    pytest.param(b"", "it ends at byte 0", id="empty"),
    pytest.param(b"  ", "it ends at byte 2", id="space"),
    pytest.param(b"[1]", "byte 0 is '['", id="array"),
    pytest.param(b'"x"', "byte 0 is '\"'", id="string"),
    pytest.param('{"a":1}'.encode("utf-16"), "byte 0 is 'ÿ'", id="utf-16"),
    pytest.param(b'{"a":1,}', "byte 7", id="comma-at-the-end"),
    pytest.param(b'{"a":1', "it ends at byte 6", id="no-end"),
    pytest.param(b'{"a":1 "b":2}', "byte 6", id="no-comma"),
    pytest.param(b'{"a" 1}', "byte 1 is '\"', allowed is a key in quotes with ':' behind it", id="no-colon"),
    pytest.param(b"{a:1}", "byte 1", id="bare-key"),
    pytest.param(b'{"a":tru}', "byte 5", id="word"),
    pytest.param(b'{"a":[1,2}', "byte 9", id="bracket"),
    pytest.param(b'{"a":"x\n"}', "byte 7", id="line-end-in-a-string"),
    pytest.param(b'{"a":"\\x"}', "byte", id="escape"),
    pytest.param(b'{"a":1} x', "byte 8", id="text-behind"),
    pytest.param(b'{"a":NaN} {"b":1}', "byte 10", id="object-behind-an-odd-one"),
    pytest.param(b'{"a":NaN,}', "byte 9", id="odd-and-comma-at-the-end"),
    pytest.param(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep", id="deep"),
    pytest.param(b'{"b":NaN,"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep", id="odd-and-deep"),
]


@pytest.mark.parametrize(("body", "where"), INVALID)
def test_invalid_json_is_refused_with_its_place(body: bytes, where: str) -> None:
    with pytest.raises(ValueError, match="JSON") as raised:
        top_level(body)
    assert where in str(raised.value)


@pytest.mark.parametrize("repeated", [False, True])
def test_members_are_bounded(repeated: bool) -> None:
    names = [0 if repeated else index for index in range(MAX_MEMBERS + 1)]
    body = b"{" + b",".join(b'"a%d":1' % name for name in names) + b"}"

    with pytest.raises(ValueError, match=f"allowed are {MAX_MEMBERS}|more than {MAX_MEMBERS}"):
        edit(body, {"a0": b"2"})


@pytest.mark.parametrize("body", [b'{"a":NaN,"b":"%b"}', b'{"a":1,"a":2,"b":"%b"}'])
def test_the_slow_parser_reads_bodies_up_to_a_bound(body: bytes) -> None:
    room = MAX_SLOW_BYTES - len(body % b"")
    assert edit(body % (b"x" * room), {"a": b"3"}).startswith(b'{"a":3,')

    with pytest.raises(ValueError, match=f"allowed are {MAX_SLOW_BYTES}"):
        edit(body % (b"x" * (room + 1)), {"a": b"3"})


def test_the_last_of_repeated_keys_counts() -> None:
    fields = top_level(b'{"model":"a","mod\\u0065l": "b" }')

    assert fields.value("model") == b'"b"'
    assert [(m.name, m.value_start, m.value_end) for m in fields.members] == [("model", 9, 12), ("model", 27, 30)]


@given(body=bodies(odd=True))
def test_members_are_where_their_values_are(body: bytes) -> None:
    fields = top_level(body)
    pairs = json.loads(body, parse_constant=str, object_pairs_hook=list) if fields.members else []

    assert [member.name for member in fields.members] == [name for name, _ in pairs]
    for member, (_, value) in zip(fields.members, pairs, strict=True):
        raw = body[member.value_start : member.value_end]
        assert json.loads(raw, parse_constant=str, object_pairs_hook=list) == value
        assert raw == raw.strip()
    assert {name: read(bytes(raw)) for name, raw in fields.values.items()} == read(body)


@given(
    body=bodies(odd=True),
    changes=st.dictionaries(NAMES, values().map(str.encode), max_size=3),
    removed=st.lists(NAMES, max_size=3),
)
def test_an_edit_equals_the_naive_one(body: bytes, changes: dict[str, bytes], removed: list[str]) -> None:
    naive = {name: value for name, value in read(body).items() if name not in removed}
    naive |= {name: read(value) for name, value in changes.items()}

    assert read(edit(body, changes, removed=removed)) == naive


@given(body=bodies(odd=True), value=values().map(str.encode))
def test_an_inserted_member_leaves_the_clients_bytes(body: bytes, value: bytes) -> None:
    edited = edit(body, {"poolgrid's own": value, "another": value})
    opening = top_level(body).opening
    inserted = b'"poolgrid\'s own":%b,"another":%b' % (value, value) + (b"," if top_level(body).values else b"")

    assert edited == body[:opening] + inserted + body[opening:]
    assert edit(edited, removed=["poolgrid's own", "another"]) == body


@given(body=bodies(), value=values().map(str.encode))
def test_a_replaced_value_put_back_leaves_the_clients_bytes(body: bytes, value: bytes) -> None:
    members = {member.name: body[member.value_start : member.value_end] for member in top_level(body).members}
    repeated = len(members) < len(top_level(body).members)

    if not repeated:
        assert edit(edit(body, dict.fromkeys(members, value)), members) == body


@given(body=bodies(odd=True), outer=NAMES, inner=NAMES, value=values().map(str.encode))
def test_a_nested_edit_equals_the_naive_one(body: bytes, outer: str, inner: str, value: bytes) -> None:
    naive = read(body)
    if naive.get(outer) is None:
        naive[outer] = {}
    if isinstance(naive[outer], dict):
        naive[outer][inner] = read(value)

    assert read(edit(body, nested={outer: {inner: value}})) == naive


@given(body=bodies(odd=True), cut=st.integers(0, 40), put=st.binary(max_size=2))
def test_damaged_json_raises_a_value_error_or_is_read_as_python_reads_it(body: bytes, cut: int, put: bytes) -> None:
    damaged = body[:cut] + put + body[cut + 1 :]
    try:
        edited = edit(damaged, {"a": b"1", "new": b"2"})
    except ValueError:
        return
    try:
        naive = read(damaged)
    except ValueError:
        return  # invalid UTF-8 within a string: the engine refuses it
    assert read(edited) == naive | {"a": 1, "new": 2}


@given(array=arrays(values(odd=True)).map(str.encode))
def test_the_elements_of_an_array_are_its_bytes(array: bytes) -> None:
    found = elements(array, 1000)

    assert [read(element) for element in found] == read(array)
    assert all(element == element.strip() and element in array for element in found)
    assert edit_elements(array, bytes) == array
    assert read(edit_elements(array, lambda element: b"[" + element + b"]")) == [[value] for value in read(array)]


@pytest.mark.parametrize("array", [b"[1,]", b"[1 2]", b"[NaN,1", b"[" * 200_000 + b"]" * 200_000])
def test_an_invalid_array_is_refused(array: bytes) -> None:
    with pytest.raises(ValueError, match="JSON"):
        elements(array, 1000)


def test_a_large_body_costs_no_loop_over_its_bytes() -> None:
    """A loop in Python over 2 MB takes 60 ms and more; parsing, comparing and copying take about one."""
    body = json.dumps({"messages": [{"role": "user", "content": 'say "no"\n' * 20}] * 8000, "stream": True}).encode()
    assert len(body) > 2_000_000
    took = []
    for _ in range(5):
        began = time.perf_counter()
        edit(body, {"stream": b"false"})
        took.append(time.perf_counter() - began)

    assert min(took) < 0.02
