"""Requests in vLLM's words, and its answers as they were recorded of real servers."""

from __future__ import annotations

import json
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
)
from poolgrid.wire.trace_context import TraceContext
from poolgrid.workers.core.refusal import RefusedError, UnableError
from poolgrid.workers.engines.server.core.calls import ServerAnswerPiece
from poolgrid.workers.engines.server.core.openai_words import refusal_of, retry_after_ms
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
