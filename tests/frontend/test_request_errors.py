"""Everything that can be wrong in a request is answered with OpenAI's error shape and the name of the field."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Query
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.requests.inference import Refused, ServedModel
from poolgrid.server.frontend import chat_endpoint
from poolgrid.server.frontend.api_endpoint import installed_endpoints
from poolgrid.server.frontend.field_words import words_at
from poolgrid.server.frontend.preparation import CHOICES_MAX, STOP_STRINGS_MAX
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.schema import (
    ChatBody,
    CompletionBody,
    Nvext,
    refusals_of,
)
from poolgrid.server.frontend.tokenizer_endpoints import DetokenizeBody, TokenizeBody
from tests.examples import examples
from tests.frontend.fake_backend import TINY, FakeBackend, speak, with_logprobs
from tests.frontend.inference_requests import fields_of
from tests.frontend.server import FrontEnd, application, front_end, in_process, post_to_shared
from tests.frontend.untold_fields import fields_without_words

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
JSON = {"content-type": "application/json"}


def post(
    path: str,
    content: bytes,
    *,
    backend: FakeBackend | None = None,
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> httpx.Response:
    return post_to_shared(backend, path, settings, content=content, headers=JSON if headers is None else headers)


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as made:
        yield made


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()


def response_body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "input": "hi", **fields}).encode()


RETENTION = "nvext.kv_cache_retention_config"
RANGES = f"{RETENTION}.token_range_retention_configs"


def retained(*ranges: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"nvext": {"kv_cache_retention_config": {"token_range_retention_configs": list(ranges), **fields}}}


SHARED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 129}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 262_144}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, "logit_bias.9999"),
    ({"stop": ["a", "b" * 257]}, "stop[1]"),
    ({"stop": list("abcdefghijklmnopq")}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [4096]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [5] * 513}, "stop_token_ids"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"max_tokens": 8.5}, "max_tokens"),
    ({"max_tokens": 8.0, "n": 1.5}, "n"),
    ({"max_tokens": 1e300}, "max_tokens"),
    ({"max_tokens": 262_144.0}, "max_tokens"),
    ({"model": 2.0}, "model"),
    ({"cache_salt": "s" * 257}, "cache_salt"),
    ({"nvext": {"agent_hints": {"priority": 2**31}}}, "nvext.agent_hints.priority"),
    ({"nvext": {"agent_hints": {"osl": 0}}}, "nvext.agent_hints.osl"),
    ({"nvext": {"dp_rank": 1}}, "nvext.dp_rank"),
    ({"nvext": {"kv_cache_retention_config": []}}, "nvext.kv_cache_retention_config"),
    (retained(decode_retention_priority=101), f"{RETENTION}.decode_retention_priority"),
    (retained(decode_duration_ms=0), f"{RETENTION}.decode_duration_ms"),
    (retained(transfer_mode="GDS"), f"{RETENTION}.transfer_mode"),
    (retained(directory="/tmp"), f"{RETENTION}.directory"),
    (retained({"token_end": 4}), f"{RANGES}[0].token_start"),
    (retained({"token_start": -1}), f"{RANGES}[0].token_start"),
    (retained({"token_start": 0, "priority": -1}), f"{RANGES}[0].priority"),
    (retained({"token_start": 4, "token_end": 4}), RANGES),
    (retained({"token_start": 8}, {"token_start": 0, "token_end": 9}), RANGES),
    (retained({"token_start": 0}, {"token_start": 9}), RANGES),
    (retained(*({"token_start": at, "token_end": at + 1} for at in range(65))), RANGES),
    ({"model": 5}, "model"),
]

CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    *(
        ({"messages": [{"role": "user", "content": [part]}]}, f"messages[0].content[0].{place}")
        for part, place in (
            ({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}, "type"),
            ({"type": "file", "file": {"file_id": "f"}}, "file.file_id"),
            ({"type": "file"}, "file.file_data"),
            ({"type": "file", "file": {"file_data": "JVBERi0xLjQ="}}, "file.file_data"),
            ({"type": "file", "file": {"file_data": "data:image/png;base64,iVBORw0KGgo="}}, "file.file_data"),
            ({"type": "file", "file": {"file_data": "no base64!"}}, "file.file_data"),
        )
    ),
    ({"messages": [{"role": "assistant", "function_call": {"name": ""}}]}, "messages[0].function_call.name"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 262_144}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]

COMPLETION_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [4096]}, "prompt[0]"),
    ({"prompt": [5, -1]}, "prompt[1]"),
    ({"prompt": [5, 2**70]}, "prompt[1]"),
    ({"prompt": [5, 1.5]}, "prompt[1]"),
    ({"prompt": [[5], [6, 4096]]}, "prompt[1][1]"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a"] * 129}, "n"),
    ({"prompt": ["a"] * 65, "n": 2}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [(CHAT, chat(**fields), param) for fields, param in SHARED_FIELDS + CHAT_FIELDS]
    + [(COMPLETIONS, completion(**fields), param) for fields, param in SHARED_FIELDS + COMPLETION_FIELDS],
)
def test_a_wrong_field_is_named_and_nothing_is_dispatched(path: str, body: bytes, param: str) -> None:
    backend = FakeBackend()

    response = post(path, body, backend=backend)

    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "allowed" in error["message"] or "not supported" in error["message"] or "needs" in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *((CHAT, chat(**{name: {"asks": "for it"}}), name) for name in refusals_of(ChatBody)),
        *((COMPLETIONS, completion(**{name: {"asks": "for it"}}), name) for name in refusals_of(CompletionBody)),
        *((CHAT, chat(nvext={name: ["x"]}), f"nvext.{name}") for name in refusals_of(Nvext)),
    ],
)
def test_a_feature_that_is_not_served_is_refused_by_name(path: str, body: bytes, param: str) -> None:
    response = post(path, body)

    assert response.status_code == 400
    assert error_of(response)["code"] == "unsupported_parameter"
    assert error_of(response)["param"] == param


def test_a_refused_field_that_asks_for_nothing_is_accepted() -> None:
    inert = {name: values[0] if values else None for name, (_, values) in refusals_of(ChatBody).items()}
    assert post(CHAT, chat(**inert)).status_code == 200
    inert = {name: values[0] if values else None for name, (_, values) in refusals_of(CompletionBody).items()}
    assert post(COMPLETIONS, completion(**inert, best_of=1)).status_code == 200


def test_empty_stop_strings_are_ignored() -> None:
    for stop in ("", [], ["", ""], ["", "b"]):
        for path, body in ((CHAT, chat(stop=stop)), (COMPLETIONS, completion(stop=stop))):
            assert post(path, body).status_code == 200


def test_unknown_fields_are_ignored() -> None:
    assert post(CHAT, chat(metadata={"a": "b"}, user="me", next_years_field=[1])).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"model": NaN}', chat() + b"x", b'{"model":"\xff"}', b'{"model":"\\ud800"}'],
)
def test_a_body_that_is_not_json_is_said_to_be(body: bytes) -> None:
    response = post(CHAT, body)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    response = post(CHAT, b'{"model":"tiny","audio":' + b"[" * 20_000)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")


def test_a_body_that_is_no_object_is_refused() -> None:
    response = post(CHAT, b"[1]")
    assert (response.status_code, error_of(response)["param"]) == (400, "body")


@pytest.mark.parametrize(("missing", "path"), [("model", CHAT), ("messages", CHAT), ("prompt", COMPLETIONS)])
def test_a_missing_field_is_named(missing: str, path: str) -> None:
    body = json.loads(chat() if path == CHAT else completion())
    del body[missing]

    error = error_of(post(path, json.dumps(body).encode()))

    assert (error["param"], error["code"]) == (missing, "missing_required_parameter")


def test_an_offending_value_is_quoted_but_not_at_length() -> None:
    message = error_of(post(CHAT, chat(temperature="x" * 10_000)))["message"]
    assert '"xxx' in message
    assert "… (10000 characters)" in message


def test_the_wrong_content_type_is_refused_with_the_right_one() -> None:
    response = post(CHAT, chat(), headers={"content-type": "application/x-www-form-urlencoded"})
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.api+json", None])
def test_json_content_types_and_none_at_all_are_accepted(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert post(CHAT, chat(), headers=headers).status_code == 200


def test_a_body_that_is_too_large_is_refused_before_and_while_reading() -> None:
    async def chunked() -> httpx.Response:
        async def parts() -> Any:
            for _ in range(4):
                yield b" " * 1000

        async with in_process(application(FakeBackend(), max_body_bytes=2000)) as client:
            return await client.post(CHAT, content=parts(), headers=JSON)

    for response in (post(CHAT, chat(user="x" * 3000), max_body_bytes=2000), asyncio.run(chunked())):
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
        assert "2000" in error_of(response)["message"]


def test_an_unknown_model_is_not_found_and_those_served_are_named() -> None:
    response = post(CHAT, chat(model="gpt-9"))
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    assert "tiny" in error_of(response)["message"]


def test_a_known_model_without_workers_is_unavailable_not_unknown() -> None:
    response = post(CHAT, chat(), backend=FakeBackend(served=()))
    assert (response.status_code, error_of(response)["code"]) == (503, "no_worker")
    assert response.headers["retry-after"] == "5"


def test_a_served_model_without_a_tokenizer_is_unavailable() -> None:
    response = post(CHAT, chat(), models={})
    assert (response.status_code, error_of(response)["code"]) == (503, "no_prompt_model")


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_both_lengths() -> None:
    backend = FakeBackend(served=[ServedModel("tiny", 0, 8)])

    for path, body, param in ((CHAT, chat(), "messages"), (COMPLETIONS, completion(prompt=[5] * 8), "prompt")):
        error = error_of(post(path, body, backend=backend))
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 8 tokens. However, ")


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (CHAT, {"max_tokens": 100}, "max_tokens", "in the messages, 100 in the completion"),
        (CHAT, {"max_completion_tokens": 100}, "max_completion_tokens", "in the messages, 100 in the completion"),
        (COMPLETIONS, {"max_tokens": 100}, "max_tokens", "in the prompt, 100 in the completion"),
        (RESPONSES, {"max_output_tokens": 100}, "max_output_tokens", "in the input, 100 in the completion"),
    ],
)
def test_more_output_than_there_is_room_for_is_said_in_the_words_that_clients_know(
    path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    body = {CHAT: chat, COMPLETIONS: completion, RESPONSES: response_body}[path](**fields)

    error = error_of(post(path, body, backend=FakeBackend(served=[ServedModel("tiny", 0, 64)])))

    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    # litellm looks for the words, LangChain for the code in the text of openai's exception, agents for the numbers.
    assert "context_length_exceeded" in error["message"]
    assert re.match(
        r"This model's maximum context length is 64 tokens\. However, you requested \d+ tokens \(\d+ ", error["message"]
    )
    assert said in error["message"]
    assert "rate limit" not in error["message"], "litellm takes that for 429, whatever the status"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"max_tokens": 8.0, "seed": 3.0, "n": 1.0, "top_k": -1.0, "logprobs": True, "top_logprobs": 2.0}),
        (CHAT, {"max_completion_tokens": 1e1, "nvext": {"agent_hints": {"osl": 4.0, "priority": 1.0}}}),
        (COMPLETIONS, {"max_tokens": 8.0, "min_tokens": 2.0, "logprobs": 1.0}),
    ],
)
def test_an_integer_may_be_written_as_a_float(path: str, fields: dict[str, Any]) -> None:
    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: whole(each) for name, each in value.items()}
        return int(value) if isinstance(value, float) else value

    dispatched = []
    for each in (fields, whole(fields)):
        backend = FakeBackend(lambda request: with_logprobs(speak("hi"), request.sampling.logprobs or 0))
        assert post(path, (chat if path == CHAT else completion)(**each), backend=backend).status_code == 200
        dispatched.append({**fields_of(backend.requests[0]), "request_id": "of each"})

    assert dispatched[0] == dispatched[1]


def test_arguments_that_a_model_wrote_wrong_do_not_end_the_conversation() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "arguments are no JSON"},
    ]

    assert post(CHAT, chat(messages=said)).status_code == 200


def test_a_response_with_a_schema_format_and_no_schema_is_refused() -> None:
    for text_format in ({"type": "json_schema", "name": "x"}, {"type": "json_schema", "name": "x", "schema": None}):
        error = error_of(post(RESPONSES, response_body(text={"format": text_format})))
        assert (error["param"], error["code"]) == ("text.format.schema", "missing_required_parameter")


def test_a_model_without_a_chat_template_answers_completions_only() -> None:
    bare = PromptModel("tiny", TINY.tokenizer, TINY.vocab_size, 1024, byte_table=TINY.byte_table)
    assert error_of(post(CHAT, chat(), models={"tiny": bare}))["code"] == "no_chat_template"
    assert post(COMPLETIONS, completion(), models={"tiny": bare}).status_code == 200


def test_a_full_fleet_is_busy_and_says_when_to_come_back() -> None:
    response = post(CHAT, chat(), backend=FakeBackend(refusal=Refused(429, "busy", "all workers are busy", 1.2)))
    assert (response.status_code, error_of(response)["code"]) == (429, "busy")
    assert error_of(response)["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize(("code", "after_s"), [("no_worker", 5), ("not_ready", 1)])
def test_a_refusal_that_passes_by_itself_tells_when_to_come_back(code: str, after_s: int) -> None:
    response = post(CHAT, chat(stream=True), backend=FakeBackend(refusal=Refused(503, code, "not now")))
    assert (response.status_code, error_of(response)["code"]) == (503, code)
    assert error_of(response)["type"] == "server_error"
    assert response.headers["retry-after"] == str(after_s)
    known = post(CHAT, chat(), backend=FakeBackend(refusal=Refused(503, code, "not now", 17.0)))
    assert known.headers.get_list("retry-after") == ["17"]


def test_when_a_later_choice_is_refused_the_earlier_ones_are_cancelled() -> None:
    backend = FakeBackend(refusal=Refused(429, "busy", "busy", 1), refuse_from=2)

    response = post(CHAT, chat(n=3), backend=backend)

    assert response.status_code == 429
    assert [stream.cancels for stream in backend.streams] == [1, 1]


def test_what_no_endpoint_answers_has_the_same_shape_and_a_name() -> None:
    app = application(FakeBackend())

    @app.get("/counted")
    async def counted(limit: Annotated[int, Query(ge=1)] = 1) -> None:
        raise ZeroDivisionError

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = [("GET", "/v1/nothing"), ("GET", CHAT), ("GET", "/counted?limit=abc"), ("GET", "/counted?limit=0")]
            asked += [("GET", "/counted"), ("DELETE", "/live")]
            return [await client.request(method, path, headers={"x-request-id": "mine"}) for method, path in asked]

    answers = asyncio.run(go())
    assert [(answer.status_code, error_of(answer)["code"], error_of(answer)["param"]) for answer in answers] == [
        (404, "not_found", None),
        (405, "method_not_allowed", None),
        (400, "invalid_value", "limit"),
        (400, "invalid_value", "limit"),
        (500, "internal_error", None),
        (405, "method_not_allowed", None),
    ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine"] * len(answers)
    assert '"abc"' in error_of(answers[2])["message"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    field=st.sampled_from([*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__]),
    value=JSON_VALUES,
    path=st.sampled_from([CHAT, COMPLETIONS]),
)
@settings(max_examples=examples(30))
def test_no_value_of_any_field_is_an_internal_error(front: FrontEnd, field: str, value: Any, path: str) -> None:
    body = json.loads(chat(prompt="hi") if path == CHAT else completion())
    body[field] = value

    response = front.post(FakeBackend(), path, content=json.dumps(body).encode(), headers=JSON)

    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        error_of(response)


def test_every_field_says_in_words_what_it_may_be() -> None:
    apis = [api.description for api in (chat_endpoint.CHAT, *installed_endpoints()) if api.prompts]
    for body in (TokenizeBody, DetokenizeBody, *(body for api in apis for body in api.bodies)):
        refused = {*refusals_of(body), "best_of", *(f"nvext.{name}" for name in refusals_of(Nvext))}
        untold = set(fields_without_words(body)) - refused
        assert not untold, f"say what {sorted(untold)} of {body.__name__} may be: Annotated[..., allowed(...)]"


def test_what_a_request_may_ask_for_is_bounded() -> None:
    assert error_of(post(CHAT, chat(n=CHOICES_MAX + 1)))["param"] == "n"
    assert error_of(post(CHAT, chat(stop=["a"] * (STOP_STRINGS_MAX + 1))))["param"] == "stop"


def test_more_prompts_than_answers_are_allowed_are_refused_before_any_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looked_at(body: CompletionBody) -> list[tuple[str | list[int], str]]:
        raise AssertionError("too many to look at")

    monkeypatch.setattr("poolgrid.server.frontend.prompts._prompts", looked_at)

    monkeypatch.setattr("poolgrid.server.frontend.preparation.CHOICES_MAX", 2)
    many: list[list[Any]] = [["x"] * 3, [[1, 2]] * 3]
    for prompts in many:
        error = error_of(post(COMPLETIONS, completion(prompt=prompts)))
        assert error["message"].startswith("n is 1 for 3 prompt(s): allowed are 2")
    mixtures: list[list[Any]] = [[], ["x", 1], ["x", [1]]]
    for prompts in mixtures:
        assert error_of(post(COMPLETIONS, completion(prompt=prompts)))["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("stream", "true or false"),
        ("min_p", "a number from 0 to 1"),
        ("top_p", "a number above 0 and up to 1"),
        ("n", "an integer from 1"),
        ("top_logprobs", "an integer from 0 to 20"),
        ("seed", "a signed 64-bit integer"),
        ("nvext.agent_hints.priority", "a signed 32-bit integer"),
        ("stop", "a string or a list of strings"),
        ("tools", "a list of objects"),
        ("stop_token_ids", "a list of at most 512 token ids"),
        ("messages[3].role", "assistant, developer, function, system, tool or user"),
        ("messages[0].content[1].text", "a string"),
        ("guided_regex", "a regular expression"),
        ("nothing.of.the.kind", None),
    ],
)
def test_a_field_says_what_it_may_be(path: str, words: str | None) -> None:
    assert words_at(ChatBody, path) == words


def test_a_name_that_two_bodies_have_means_what_it_means_in_each() -> None:
    assert words_at(ChatBody, "logprobs") == "true or false"
    assert words_at(CompletionBody, "logprobs") == "an integer from 0 to 20"
