"""Requests in vLLM's words, and its answers as they were recorded of real servers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from poolgrid.wire.errors import DecodeError
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import (
    FinishReason,
    Generate,
    KvRetention,
    LogitsProcessorCall,
    RefusalKind,
    Routing,
    Sampling,
    TokenLogprobs,
)
from poolgrid.wire.trace_context import TraceContext
from poolgrid.workers.core.refusal import BrokenError, RefusedError, UnableError
from poolgrid.workers.engines.server.core.calls import ServerAnswerPiece
from poolgrid.workers.engines.server.core.openai_words import refusal_of, retry_after_ms
from poolgrid.workers.engines.server.core.server_facts import ListedModel, other_layers
from poolgrid.workers.engines.server.dialects import sglang
from poolgrid.workers.engines.server.dialects.vllm import VllmDialect

DIALECT = VllmDialect("m")


def asked(request: Generate, dialect: VllmDialect = DIALECT) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(dialect.call(request).body)
    return body


def request(routing: Routing | None = None, stage: Stage = Stage.WHOLE, **sampling: Any) -> Generate:
    return Generate(
        "r",
        pack_tokens([5, 6, 7]),
        Sampling(**{"max_tokens": 9, **sampling}),
        routing=routing or Routing(),
        stage=stage,
    )


def test_a_plain_request_leaves_open_what_was_left_open() -> None:
    assert asked(request()) == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "add_special_tokens": False,
    }


@pytest.mark.parametrize(
    ("sampling", "body"),
    [
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, {"temperature": 0.0, "top_p": 0.5, "top_k": 3}),
        ({"min_p": 0.1, "seed": -4, "min_tokens": 2}, {"min_p": 0.1, "seed": -4, "min_tokens": 2}),
        (
            {"frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5},
            {"frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5},
        ),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        (
            {"logit_bias": {5: 1.5}, "bad_token_ids": (7, 8)},
            {"logit_bias": {"5": 1.5, "7": -100.0, "8": -100.0}},
        ),
        ({"guided_json": b'{"type":"object"}'}, {"structured_outputs": {"json": '{"type":"object"}'}}),
        ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_grammar": "root ::= x"}, {"structured_outputs": {"grammar": "root ::= x"}}),
        ({"guided_choice": ("a", "b")}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"structural_tag": "{}"}, {"structured_outputs": {"structural_tag": "{}"}}),
        ({"logprobs": 0}, {"logprobs": 0, "return_tokens_as_token_ids": True}),
        ({"prompt_logprobs": 2}, {"prompt_logprobs": 2, "stream": False}),
    ],
)
def test_what_is_asked_of_sampling_is_said_in_its_words(sampling: dict[str, Any], body: dict[str, Any]) -> None:
    assert asked(request(**sampling)).items() >= body.items()


def test_adapters_salts_ranks_priorities_and_traces_go_where_the_server_reads_them() -> None:
    routing = Routing(dp_rank=1, priority=3, lora_name="poet", cache_salt="s")
    dialect = VllmDialect("m", ranks=(4, 5), priorities=True)
    trace = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1")
    call = dialect.call(msgspec.structs.replace(request(routing), stop_token_ids=(2, 0), trace=trace))

    assert (
        json.loads(call.body).items()
        >= {
            "model": "poet",
            "cache_salt": "s",
            "priority": -3,
            "stop_token_ids": [2, 0],
        }.items()
    )
    assert call.headers == (
        "X-Request-Id: r",
        "X-data-parallel-rank: 5",
        "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate: vendor=1",
    )
    assert "priority" not in asked(request(routing))  # a server that does not schedule by them refuses them


@pytest.mark.parametrize(
    ("asking", "error", "words"),
    [
        (request(logits_processors=(LogitsProcessorCall("own"),)), UnableError, "logits_processors are set (own)"),
        (
            msgspec.structs.replace(request(), retention=KvRetention()),
            UnableError,
            "kv_cache_retention_config is given",
        ),
        (request(Routing(emitted_tokens=3), guided_regex="a"), UnableError, "guided_regex is set, and the output has"),
        (request(stage=Stage.DECODE), RefusedError, "without disaggregated_params"),
        (
            msgspec.structs.replace(request(stage=Stage.DECODE), disaggregated_params=b"\xff"),
            RefusedError,
            "is not vLLM's",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(asking: Generate, error: type[RefusedError], words: str) -> None:
    with pytest.raises(error) as caught:
        DIALECT.call(asking)
    assert words in str(caught.value)


def pieces(lines: list[str], **sampling: Any) -> list[ServerAnswerPiece | None]:
    read = DIALECT.call(request(**sampling)).read
    return [read(line.encode()) for line in lines]


def test_a_recorded_stream_is_read() -> None:
    """Of vLLM 0.25.0, but for the text."""
    first, last, usage = pieces(
        [
            '{"id":"cmpl-9434f3431d1694cb","object":"text_completion","created":1795317633,"model":"m","choices":'
            '[{"index":0,"text":"w102545","logprobs":null,"finish_reason":null,"stop_reason":null,'
            '"prompt_token_ids":[35522,149513],"token_ids":[102545]}]}',
            '{"id":"cmpl-9434f3431d1694cb","object":"text_completion","created":1795317633,"model":"m","choices":'
            '[{"index":0,"text":" slice","logprobs":null,"finish_reason":"length","stop_reason":null,'
            '"prompt_token_ids":null,"token_ids":[2997,7]}]}',
            '{"id":"cmpl-9434f3431d1694cb","object":"text_completion","created":1795317633,"model":"m","choices":[],'
            '"usage":{"prompt_tokens":40,"total_tokens":44,"completion_tokens":4,"prompt_tokens_details":'
            '{"cached_tokens":32}},"system_fingerprint":"vllm-0.25.0-60e87cfa"}',
        ]
    )
    assert first is not None
    assert last is not None
    assert usage is not None
    assert (first.tokens, first.finish) == ([102545], None)
    assert (last.tokens, last.finish) == ([2997, 7], FinishReason.LENGTH)
    assert (usage.tokens, usage.cached_tokens) == ([], 32)


def test_log_probabilities_of_a_prompt_begin_with_its_second_token() -> None:
    line = (
        '{"choices":[{"index":0,"text":"a","finish_reason":"length","token_ids":[11],"prompt_logprobs":[null,'
        '{"6":{"logprob":-3.0,"rank":9},"8":{"logprob":-0.5,"rank":1}},{"7":{"logprob":-0.25,"rank":1}}]}]}'
    )
    (piece,) = pieces([line], prompt_logprobs=1)

    assert piece is not None
    assert piece.prompt_logprobs is not None
    assert [(each.token_id, each.logprob, each.alternatives) for each in piece.prompt_logprobs] == [
        (6, -3.0, ((8, -0.5),)),
        (7, -0.25, ((7, -0.25),)),
    ]


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ('{"error":{"message":"bad","type":"BadRequestError","code":400}}', RefusalKind.CANNOT_DO, "bad"),
        ('{"error":{"message":"bad","type":"BadRequestError"}}', RefusalKind.CANNOT_DO, "bad"),
        ('{"error":{"message":"no such model","code":"404"}}', RefusalKind.CANNOT_DO, "no such model"),
        ('{"error":{"message":"later","type":"x","code":503}}', RefusalKind.BUSY, "no room"),
        ('{"error":{"message":"dead","type":"InternalServerError","code":500}}', RefusalKind.BROKEN, "failed"),
        ('{"choices":[{"index":0,"text":"a","finish_reason":null}]}', RefusalKind.BROKEN, "0.10.2 or newer"),
        ('{"choices":[{"index":0,"token_ids":[],"finish_reason":"abort"}]}', RefusalKind.BROKEN, "'abort'"),
    ],
)
def test_what_goes_wrong_in_a_stream_is_told_apart(line: str, kind: RefusalKind, words: str) -> None:
    (piece,) = pieces([line])

    assert piece is not None
    assert piece.failure is not None
    assert piece.failure.kind is kind
    assert words in piece.failure.reason


def test_what_is_no_answer_is_a_decode_error() -> None:
    for line in ("", "<html>", '{"choices": 7}', '{"choices":[{"token_ids":["x"]}]}'):
        with pytest.raises(DecodeError):
            pieces([line])


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (400, b'{"error":{"message":"too long","code":400}}', RefusalKind.CANNOT_DO, "(status 400): too long"),
        (400, b'{"message":"a\\r\\nb","code":400}', RefusalKind.CANNOT_DO, "(status 400): a b"),
        (400, b'{"error":{"message":"see http://10.0.0.3:8000/x"}}', RefusalKind.CANNOT_DO, ": see (address)"),
        (400, b'{"error":{"message":"<!DOCTYPE html><p>no"}}', RefusalKind.CANNOT_DO, "(status 400)"),
        (404, b'{"detail":"Not Found"}', RefusalKind.CANNOT_DO, "(status 404)"),
        (422, b'{"detail":[{"loc":["body"],"input":"secret"}]}', RefusalKind.CANNOT_DO, "(status 422)"),
        (408, b"", RefusalKind.BUSY, "has no room (status 408)"),
        (429, b"", RefusalKind.BUSY, "has no room (status 429)"),
        (503, b"later", RefusalKind.BUSY, "has no room (status 503)"),
        (401, b'{"error":"Unauthorized"}', RefusalKind.BROKEN, "vLLM does not serve its worker"),
        (500, b"\xff<html>", RefusalKind.BROKEN, "failed (status 500)"),
        (502, b'{"error":{"message":"upstream http://10.0.0.3 is down"}}', RefusalKind.BROKEN, "failed (status 502)"),
    ],
)
def test_other_statuses_have_a_kind_and_only_messages_for_clients_reach_them(
    status: int, body: bytes, kind: RefusalKind, reason: str
) -> None:
    failure = refusal_of(DIALECT.title, status, body)

    assert failure.kind is kind
    assert failure.reason.endswith(reason)
    assert failure.unknown_model is False


@pytest.mark.parametrize(
    ("value", "pause_ms"),
    [
        ("2", 2000),
        ("0", 0),
        ("1.5", 1500),
        ("-3", 0),
        ("1e9", 60_000),
        ("Thu, 01 Jan 1970 00:16:45 GMT", 5_000),
        ("Thu, 01 Jan 1970 00:00:05 GMT", 0),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("", None),
        ("Thu, 99 Jan 1970 00:16:45 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_bounded(value: str, pause_ms: int | None) -> None:
    assert retry_after_ms(value, now_s=1000.0) == pause_ms


PLACED = VllmDialect("m", block_size=4)


def left_of(
    tokens: list[int], kept_tokens: int, blocks: list[list[int]], asking: Generate | None = None, **choice: Any
) -> ServerAnswerPiece:
    """What a prefill leg comes to whose server gave these tokens and kept so much."""
    params = {"remote_num_tokens": kept_tokens, "remote_block_ids": blocks, "remote_host": "gpu1"}
    whole = {"choices": [{"token_ids": tokens, "finish_reason": "length", **choice}], "kv_transfer_params": params}
    call = PLACED.call(asking or request(stage=Stage.PREFILL))
    piece = call.read(json.dumps(whole).encode())
    assert piece is not None
    return piece


def after(left: ServerAnswerPiece, **sampling: Any) -> Generate:
    """The decode leg of a prefill leg."""
    return msgspec.structs.replace(request(stage=Stage.DECODE, **sampling), disaggregated_params=left.params)


def test_a_prefill_leg_gives_its_token_out_and_the_decode_leg_continues_after_it() -> None:
    left = left_of([8], 3, [[1]])
    assert (left.tokens, left.finish) == ([8], FinishReason.PREFILLED)

    call = PLACED.call(after(left, min_tokens=3))
    body = json.loads(call.body)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([5, 6, 7, 8], 8, 2)
    assert body["kv_transfer_params"] == {"remote_num_tokens": 3, "remote_block_ids": [[1]], "remote_host": "gpu1"}
    assert asked(after(left, max_tokens=2), PLACED)["max_tokens"] == 1
    # The router takes the first token for the one that it has, as it does with every engine.
    assert call.read(b'{"choices":[{"token_ids":[],"finish_reason":null}]}').tokens == []  # type: ignore[union-attr]
    assert call.read(b'{"choices":[{"token_ids":[9],"finish_reason":null}]}').tokens == [8, 9]  # type: ignore[union-attr]
    assert call.read(b'{"choices":[{"token_ids":[3],"finish_reason":"stop"}]}').tokens == [3]  # type: ignore[union-attr]


def test_an_answer_that_ends_right_after_its_first_token_has_it() -> None:
    piece = PLACED.call(after(left_of([8], 3, [[1]]))).read(b'{"choices":[{"token_ids":[],"finish_reason":"stop"}]}')
    assert piece is not None
    assert (piece.tokens, piece.finish) == ([8], FinishReason.STOP)


def test_the_first_token_keeps_its_log_probabilities() -> None:
    said = {"tokens": ["token_id:8"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:8": -0.5}]}
    asking = request(stage=Stage.PREFILL, logprobs=1)
    left = left_of([8], 3, [[1]], asking, logprobs=said)
    call = PLACED.call(after(left, logprobs=1))
    said = {"tokens": ["token_id:9"], "token_logprobs": [-0.25], "top_logprobs": [{"token_id:9": -0.25}]}
    piece = call.read(json.dumps({"choices": [{"token_ids": [9], "logprobs": said}]}).encode())
    assert piece is not None
    first = TokenLogprobs(8, -0.5, ((8, -0.5),))
    assert left.logprobs == (first,)
    assert (piece.tokens, piece.logprobs) == ([8, 9], (first, TokenLogprobs(9, -0.25, ((9, -0.25),))))
    # A server that keeps them to itself leaves the token out: what follows would not go with what is said of it.
    assert left_of([8], 3, [[1]], asking).tokens == []


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (left_of([8], 3, []), "no block"),
        (left_of([8], 3, [[]]), "no block of the only group"),
        (left_of([8], 4, [[1]]), "more tokens than the prompt has"),
        (left_of([8], 2, [[1]]), "a state that stops short of the prompt's end"),
        (left_of([8, 9], 3, [[1]]), "two tokens"),
        (left_of([8], 3, "abc"), "no blocks"),  # type: ignore[arg-type]
    ],
)
def test_kv_without_room_or_end_leaves_the_token_to_the_decode_leg(left: ServerAnswerPiece, why: str) -> None:
    assert (left.tokens, left.finish) == ([], FinishReason.PREFILLED), why
    assert asked(after(left), PLACED)["prompt"] == [5, 6, 7], why


def test_a_prompt_of_whole_blocks_leaves_the_token_to_the_decode_leg() -> None:
    for block_size, gives in ((3, False), (1, False), (4, True), (0, False)):
        blocks = [list(range(-(-3 // (block_size or 16))))]
        params = {"remote_num_tokens": 3, "remote_block_ids": blocks}
        whole = {"choices": [{"token_ids": [8], "finish_reason": "length"}], "kv_transfer_params": params}
        piece = (
            VllmDialect("m", block_size=block_size).call(request(stage=Stage.PREFILL)).read(json.dumps(whole).encode())
        )
        assert piece is not None
        assert piece.tokens == [8] * gives


@pytest.mark.parametrize(("length", "groups", "gives"), [(16, 1, True), (16, 2, False), (17, 2, True)])
def test_groups_of_layers_may_have_smaller_blocks_that_are_full(length: int, groups: int, gives: bool) -> None:
    dialect = VllmDialect("m", block_size=32)
    asking = msgspec.structs.replace(request(stage=Stage.PREFILL), token_ids=pack_tokens(range(length)))
    params = {"remote_num_tokens": length, "remote_block_ids": [[1]] * groups}
    whole = {"choices": [{"token_ids": [8], "finish_reason": "length"}], "kv_transfer_params": params}
    piece = dialect.call(asking).read(json.dumps(whole).encode())
    assert piece is not None
    assert piece.tokens == [8] * gives


@pytest.mark.parametrize(
    ("sampling", "gives"),
    [
        ({"guided_regex": "a+"}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"presence_penalty": -0.5}, False),
        ({"prompt_logprobs": 0}, False),
        ({"seed": 3}, False),
        ({"seed": 3, "temperature": 0.5}, False),
        ({"seed": 3, "temperature": 0.0}, True),
        ({"frequency_penalty": 0.0, "presence_penalty": 0.0}, True),
        ({"repetition_penalty": 1.5, "min_tokens": 4, "temperature": 1.0, "logit_bias": {7: 2.0}}, True),
    ],
)
def test_what_would_notice_the_seam_has_its_first_token_from_the_decode_leg(
    sampling: dict[str, Any], gives: bool
) -> None:
    assert left_of([8], 3, [[1]], request(stage=Stage.PREFILL, **sampling)).tokens == [8] * gives


def test_a_prefill_leg_that_ends_the_answer_keeps_nothing() -> None:
    piece = left_of([2], 3, [[1]], finish_reason="stop")
    assert (piece.tokens, piece.finish, piece.params) == ([2], FinishReason.STOP, None)
    # Of one token there is nothing to continue.
    assert "kv_transfer_params" not in asked(request(stage=Stage.PREFILL, max_tokens=1))


def test_a_first_token_that_is_none_is_the_prefill_legs_fault() -> None:
    for said in (b'{"first_token":"8"}', b'{"first_token":[-1]}', b'{"first_token":[1.5]}', b'{"first_token":[]}'):
        with pytest.raises(BrokenError, match="first token of the prefill leg"):
            PLACED.call(msgspec.structs.replace(request(stage=Stage.DECODE), disaggregated_params=said))


SLIDING = ["sliding_attention", "full_attention"] * 2
STATES = ["linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "others"),
    [
        ({}, set()),
        ({"layer_types": ["full_attention"] * 4}, set()),
        ({"layer_types": SLIDING}, {"sliding_attention"}),
        ({"text_config": {"layer_types": STATES}}, {"linear_attention"}),
        ({"layer_types": "full_attention"}, set()),
        ([], set()),
    ],
)
def test_other_layers_are_those_that_the_configuration_names(tmp_path: Path, config: Any, others: set[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert other_layers(str(tmp_path)) == others


def test_other_layers_of_a_model_of_another_machine_are_unknown() -> None:
    assert other_layers("openai/gpt-oss-120b") == set()


class Server:
    """Answers ``/server_info``."""

    def __init__(self, **info: Any) -> None:
        self.target = SimpleNamespace(host="127.0.0.1")
        self._info = info

    async def ask_if_there(self, path: str, kind: type[Any]) -> Any:
        events = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:5557"})
        return kind(page_size=16, kv_events_config=events, **self._info)


@pytest.mark.parametrize(
    ("types", "keeps_all", "hidden"),
    [
        (["full_attention"], False, ""),
        (SLIDING, False, "sliding_attention"),
        (SLIDING, True, ""),
        ([*SLIDING, *STATES], True, "linear_attention"),
    ],
)
async def test_events_of_sglang_are_followed_where_they_say_of_all_layers(
    tmp_path: Path, types: list[str], keeps_all: bool, hidden: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": types}))
    server: Any = Server(model_path=str(tmp_path), disable_hybrid_swa_memory=keeps_all)
    facts = await sglang.learn(server, ListedModel("tiny"))

    assert bool(facts.events_missing) == bool(hidden)
    assert hidden in facts.events_missing
