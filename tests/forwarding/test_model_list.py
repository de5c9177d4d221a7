"""Lists of models merged: whole cards, the first server's first."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.model_list import EMPTY, MAX_CARDS, MAX_LIST_BYTES, ModelCards, merge_model_lists

BASE = b'{"id": "m", "object":"model","created":1, "root":"/models/m","max_model_len":4096.0,"permission":[{"id":"p"}]}'
ADAPTER = b'{"id":"ad\\u0061pter","parent":"m" , "x":NaN}'
OTHER = b'{"id":"n","vendor":{"z":1,"a":[1e3]}}'


def listed(*cards: bytes, more: bytes = b"") -> bytes:
    return b'{"object":"list", "data": [' + b", ".join(cards) + b"]" + more + b"}\n"


def test_one_servers_list_is_its_own_bytes() -> None:
    body = listed(BASE, ADAPTER, more=b',"x":1.0')

    assert merge_model_lists([("a", body)]) == ModelCards(body, {"m": BASE, "adapter": ADAPTER}, {})


def test_equal_lists_are_the_first_ones_bytes() -> None:
    first, second = listed(BASE), listed(BASE.replace(b'"created":1', b'"created":2'))

    merged = merge_model_lists([("a", first), ("b", second)])
    assert merged.body == first
    assert merged.cards == {"m": BASE}


def test_further_cards_come_behind_as_they_were_written() -> None:
    merged = merge_model_lists([("a", listed(BASE)), ("b", listed(ADAPTER, BASE)), ("c", listed(OTHER, ADAPTER))])

    assert merged.body == b'{"object":"list", "data": [' + BASE + b"," + ADAPTER + b"," + OTHER + b"]}\n"
    assert list(merged.cards) == ["m", "adapter", "n"]


def test_cards_behind_an_empty_list() -> None:
    assert merge_model_lists([("a", listed()), ("b", listed(OTHER))]).body == listed(OTHER)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"<html>", "byte 0 is '<'"),
        (b"[]", "not a JSON object"),
        (b'{"data":{}}', "no member data that is a list"),
        (b'{"object":"list"}', "no member data"),
        (b'{"data":[1]}', "card 0 of the list of models has no id"),
        (listed(BASE, b'{"id":null}'), "card 1 of the list of models has no id"),
        (b'{"data":[],"x":"' + b"x" * MAX_LIST_BYTES + b'"}', f"allowed are {MAX_LIST_BYTES}"),
    ],
)
def test_an_answer_that_is_no_list_is_left_out_and_named(body: bytes, text: str) -> None:
    merged = merge_model_lists([("bad", body), ("a", listed(BASE))])

    assert merged.body == listed(BASE)
    assert list(merged.unread) == ["bad"]
    assert text in merged.unread["bad"]


def test_no_list_at_all_is_an_empty_one() -> None:
    assert merge_model_lists([]) == ModelCards(EMPTY, {}, {})
    assert json.loads(EMPTY) == {"object": "list", "data": []}


def test_cards_are_bounded() -> None:
    lists = [(f"s{n}", listed(*(b'{"id":"%d-%d"}' % (n, card) for card in range(MAX_CARDS // 2)))) for n in range(3)]
    merged = merge_model_lists(lists)

    assert len(json.loads(merged.body)["data"]) == len(merged.cards) == MAX_CARDS
    assert "2-0" not in merged.cards


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=4), max_size=4))
def test_the_merge_equals_the_naive_one(lists: list[list[str]]) -> None:
    answers = [
        (str(n), listed(*(json.dumps({"id": name, "by": n}).encode() for name in names)))
        for n, names in enumerate(lists)
    ]
    naive: dict[str, int] = {}
    for n, names in enumerate(lists):
        for name in names:
            naive.setdefault(name, n)
    merged = merge_model_lists(answers)
    cards = {card["id"]: card["by"] for card in json.loads(merged.body)["data"]}

    assert cards == naive
    assert list(cards) == list(naive)
    assert {name: json.loads(card)["by"] for name, card in merged.cards.items()} == naive
