"""The bodies of a request's two legs."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.forwarding.two_legs import (
    PATHS,
    can_be_split,
    decode_body,
    freeing_body,
    params_of,
    prefill_body,
    transfer_of,
)
from tests.cases import for_each

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def values_of(body: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


def prefill(path: str, kind: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps(fields).encode()
    found: dict[str, Any] = json.loads(prefill_body(path, kind, body, values_of(body), "r-1", b""))
    return found


@for_each(
    "path, fields, changed",
    [
        (CHAT, {"max_tokens": 40}, {"max_tokens": 1}),
        (CHAT, {"max_completion_tokens": 40}, {"max_completion_tokens": 1}),
        (CHAT, {"max_completion_tokens": 40, "max_tokens": 50}, {"max_completion_tokens": 1, "max_tokens": 1}),
        (COMPLETIONS, {}, {"max_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 9}, {"max_output_tokens": 1, "store": False}),
        (CHAT, {"stream": True}, {"max_tokens": 1, "stream": False, "stream_options": None}),
        (CHAT, {"min_tokens": 8}, {"max_tokens": 1, "min_tokens": 1}),
        (COMPLETIONS, {"echo": True, "prompt_logprobs": 3}, {"echo": False, "prompt_logprobs": None}),
    ],
)
def test_a_prefill_server_of_vllm_is_asked_for_one_whole_token(
    path: str, fields: dict[str, Any], changed: dict[str, Any]
) -> None:
    asked = prefill(path, "vllm", **fields)

    assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
    assert {name: asked[name] for name in changed} == changed
    assert asked.keys() <= {"max_tokens"} | fields.keys() | changed.keys()


def test_both_servers_of_sglang_get_the_same_room_and_keep_all_else() -> None:
    transfer = transfer_of("sglang", "r-1", "10.0.0.7", 8998)
    body = b'{ "model" : "m",  "max_tokens":40,"stream":true }'

    first = prefill_body(CHAT, "sglang", body, values_of(body), "r-1", transfer)

    assert first == decode_body(body, transfer)
    room = json.loads(transfer)
    assert (room["bootstrap_host"], room["bootstrap_port"]) == ("10.0.0.7", 8998)
    assert 0 <= room["bootstrap_room"] < 1 << 63
    assert json.loads(first) == {"model": "m", "max_tokens": 40, "stream": True, **room}
    assert body[1:] in first
    assert transfer_of("sglang", "r-2", "10.0.0.7", 8998) != transfer
    assert transfer_of("vllm", "r-1", "10.0.0.7", 8998) == b""


def test_what_vllm_has_left_reaches_the_decode_server_in_the_clients_own_body() -> None:
    left = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]], "further": {"a": None}}
    params = params_of(CHAT, "vllm", json.dumps({"choices": [], "kv_transfer_params": left}).encode())
    body = b'{"messages":[{"content":"\\u00e9"}], "temperature": 1.0}'

    asked = decode_body(body, params)

    assert json.loads(asked)["kv_transfer_params"] == left
    assert asked.endswith(body[1:])
    freed = json.loads(freeing_body(CHAT, body, values_of(body), params))
    assert (freed["max_tokens"], freed["kv_transfer_params"]) == (1, left)


@for_each(
    "finish, continues",
    [
        ("length", True),
        ("not_finished", True),
        ("stop", False),
    ],
)
def test_a_prompt_of_trtllm_serve_continues_unless_its_first_token_ended_it(finish: str, continues: bool) -> None:
    left = {"request_type": "context_only", "ctx_request_id": 7, "encoded_opaque_state": "b3A="}
    choice = {"finish_reason": finish, "disaggregated_params": left}
    answer = json.dumps({"choices": [choice], "prompt_token_ids": [4, 5]}).encode()

    params = params_of(CHAT, "trtllm-serve", answer)

    if continues:
        asked = json.loads(decode_body(b"{}", params))
        assert asked["disaggregated_params"] == {**left, "request_type": "generation_only"}
        assert asked["prompt_token_ids"] == [4, 5]
        assert json.loads(decode_body(b'{"prompt":"x"}', params_of(COMPLETIONS, "trtllm-serve", answer)))["prompt"] == [
            4,
            5,
        ]
    else:
        assert params == b""
        assert decode_body(b"{}", params) == b"{}"


def test_a_server_that_leaves_nothing_leaves_the_whole_request_to_the_other() -> None:
    for answer in (b"{}", b'{"kv_transfer_params":null}', b'{"choices":[]}'):
        for kind in ("vllm", "trtllm-serve"):
            assert params_of(CHAT, kind, answer) == b""
    with pytest.raises(ValueError, match="cannot be read"):
        params_of(CHAT, "vllm", b"<html>")


@for_each(
    "path, kind, fields, is_split",
    [
        (CHAT, "vllm", {}, True),
        (CHAT, "vllm", {"n": 1}, True),
        (CHAT, "vllm", {"n": 2}, False),
        (COMPLETIONS, "vllm", {"best_of": 3}, False),
        (COMPLETIONS, "vllm", {"prompt": "[1]"}, True),
        (COMPLETIONS, "vllm", {"prompt": [1, 2]}, True),
        (COMPLETIONS, "vllm", {"prompt": ["a"]}, False),
        (COMPLETIONS, "trtllm-serve", {"prompt": [[1], [2]]}, False),
        (CHAT, "sglang", {"n": 2}, True),
        ("/v1/messages", "vllm", {}, True),
        ("/v1/messages", "sglang", {}, False),
        ("/v1/embeddings", "vllm", {}, False),
        (CHAT, "openai", {}, False),
    ],
)
def test_which_requests_two_servers_can_share(path: str, kind: str, fields: dict[str, Any], is_split: bool) -> None:
    assert can_be_split(path, kind, values_of(json.dumps(fields).encode())) is is_split


MEMBERS = st.dictionaries(
    st.text(max_size=4), st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4), max_size=6
)


@given(MEMBERS, st.sampled_from(sorted((kind, path) for kind in PATHS for path in PATHS[kind])))
def test_all_else_stays_as_the_client_wrote_it(members: dict[str, Any], of: tuple[str, str]) -> None:
    kind, path = of
    body = json.dumps(members).encode()
    transfer = transfer_of(kind, "r", "h", 1)

    asked = json.loads(prefill_body(path, kind, body, values_of(body), "r", transfer))

    assert {name: asked[name] for name in members} == members
