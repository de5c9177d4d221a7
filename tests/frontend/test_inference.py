"""Answers of the two inference endpoints, streaming and not, over a fake router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poolgrid.kernel.requests.inference import InferenceRequest, ServedModel, StreamDelta
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.kernel.wire.identifiers import name_of
from poolgrid.kernel.wire.requests import KvRetention, RetainedTokens, TokenLogprobs
from tests.examples import examples
from tests.frontend.fake_backend import TINY, FakeBackend, Script, Step, speak, with_logprobs
from tests.frontend.server import FrontEnd, application, front_end, in_process, post_once

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
END_OF_TURN = 2


Front = FrontEnd | None
"""Who is asked: an application of its own for one question, or one for all examples of a test."""


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as made:
        yield made


def post(
    backend: FakeBackend, path: str, headers: dict[str, str] | None = None, front: Front = None, **fields: Any
) -> httpx.Response:
    if front is not None:
        return front.post(backend, path, json={"model": "tiny", **fields}, headers=headers)
    return post_once(backend, path, json={"model": "tiny", **fields}, headers=headers)


def ask(backend: FakeBackend, **fields: Any) -> dict[str, Any]:
    response = post(backend, CHAT, messages=[{"role": "user", "content": "hi"}], **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(backend: FakeBackend, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    response = post(backend, COMPLETIONS, prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(text: str) -> list[dict[str, Any]]:
    lines = text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    if data[-1] == "[DONE]":
        data.pop()
    return [json.loads(item) for item in data]


def streamed(backend: FakeBackend, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    response = post(backend, path, stream=True, **{**prompt, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("data: [DONE]\n\n")
    return events(response.text)


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


def script(text: str, **options: Any) -> Script:
    return lambda request: speak(text, **options)


def test_a_chat_answer_has_text_usage_and_names_its_worker() -> None:
    backend = FakeBackend(script("Hello, wörld! 😀", cached_tokens=4))

    response = post(backend, CHAT, messages=[{"role": "user", "content": "hi"}])

    answer = response.json()
    (request,) = backend.requests
    isl = len(request.token_ids) // 4
    osl = len(TINY.encode("Hello, wörld! 😀")) // 4
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, wörld! 😀", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": isl,
        "completion_tokens": osl,
        "total_tokens": isl + osl,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert response.headers["x-poolgrid-worker"] == "worker-0"
    assert response.headers["x-poolgrid-decision"] == "lowest_cost"
    assert response.headers["x-request-id"] == request.request_id
    assert answer["id"] == f"chatcmpl-{request.request_id}"


def test_a_chat_prompt_is_what_the_models_template_makes_of_it() -> None:
    backend = FakeBackend()

    ask(backend, chat_template_kwargs={"ignored": 1})

    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert backend.requests[0].token_ids == TINY.encode(expected)


def test_messages_with_parts_tools_and_calls_reach_the_template() -> None:
    backend = FakeBackend()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "the time?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    tools = [{"type": "function", "function": {"name": "now"}}]

    response = post(backend, CHAT, messages=messages, tools=tools)

    assert response.status_code == 200
    prompt = TINY.tokenizer.decode(unpack_tokens(backend.requests[0].token_ids), skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.\n\nYou may call these functions:\n"
        '{"type": "function", "function": {"name": "now"}}<|im_end|>\n'
        "<|im_start|>user\nWhat is the time?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_finish_reason() -> None:
    chunks = streamed(FakeBackend(script("Hello, world!", finish_reason="length")))

    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == "Hello, world!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_a_stream_with_usage_ends_with_a_chunk_of_counts() -> None:
    chunks = streamed(FakeBackend(script("Hello", cached_tokens=3)), stream_options={"include_usage": True})

    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert chunks[-1]["usage"]["completion_tokens"] == len(TINY.encode("Hello")) // 4


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_a_stream_that_asks_for_it_counts_in_every_chunk(tools: list[dict[str, Any]] | None) -> None:
    asks = {"include_usage": True, "continuous_usage_stats": True}
    osl = len(TINY.encode("Hello, world!")) // 4
    for sequences in (1, 2):
        chunks = streamed(FakeBackend(script("Hello, world!")), stream_options=asks, n=sequences, tools=tools)

        *written, last = chunks
        assert last["usage"]["completion_tokens"] == sequences * osl
        for index in range(sequences):
            counts = [chunk["usage"] for chunk in written if chunk["choices"][0]["index"] == index]
            told = [each["completion_tokens"] for each in counts]
            assert told == sorted(told)
            assert told[-1] == osl
            assert sequences > 1 or told[0] == 1, "several are written together when they come together"
            assert all(each["prompt_tokens"] == last["usage"]["prompt_tokens"] for each in counts)
            assert all(each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in counts)

    alone = streamed(FakeBackend(script("Hello")), stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in alone), "as elsewhere it needs include_usage"


def test_no_chunk_is_sent_while_a_character_is_incomplete() -> None:
    chunks = streamed(FakeBackend(script("\U0001f9a9")))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "\U0001f9a9"]


def test_text_that_looks_like_a_line_end_stays_inside_its_event() -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne"
    response = post(FakeBackend(script(text)), CHAT, messages=[{"role": "user", "content": "hi"}], stream=True)

    assert len(response.text.splitlines()) == response.text.count("\n")
    assert text_of(events(response.text)) == text


@given(
    text=st.text("abe ,é\U0001f9a9", max_size=30),
    stop=st.lists(st.text("ab ,e", min_size=1, max_size=3), max_size=3),
    stride=st.integers(1, 5),
    stream=st.booleans(),
)
@settings(max_examples=examples(40))
def test_text_and_usage_do_not_depend_on_how_tokens_were_batched_or_sent(
    front: FrontEnd, text: str, stop: list[str], stride: int, stream: bool
) -> None:
    reference = ask(FakeBackend(script(text)), front=front, stop=stop)
    backend = FakeBackend(script(text, tokens_per_delta=stride))

    if stream:
        chunks = streamed(backend, front=front, stop=stop, stream_options={"include_usage": True})
        shown, counts = text_of(chunks), chunks[-1]["usage"]
    else:
        answer = ask(backend, front=front, stop=stop)
        shown, counts = answer["choices"][0]["message"]["content"], answer["usage"]

    assert shown == reference["choices"][0]["message"]["content"]
    assert counts == reference["usage"]
    ends = [text.find(item) + len(item) for item in stop if item in text]
    assert len(shown) < len(text) if ends else shown == text


def test_a_stop_string_ends_the_answer_and_frees_the_worker() -> None:
    for stream in (False, True):
        backend = FakeBackend(script("one two three four"))

        if stream:
            chunks = streamed(backend, stop=["three"])
            shown, reason = text_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = ask(backend, stop="three")["choices"]
            shown, reason = choice["message"]["content"], choice["finish_reason"]

        assert (shown, reason) == ("one two ", "stop")
        assert [item.cancels for item in backend.streams] == [1]


def test_stop_strings_count_only_after_min_tokens() -> None:
    backend = FakeBackend(script("aXbXc"))
    assert ask(backend, stop="X")["choices"][0]["message"]["content"] == "a"
    assert ask(backend, stop="X", min_tokens=3)["choices"][0]["message"]["content"] == "aXb"


def test_the_token_that_stopped_the_answer_is_counted_but_not_shown() -> None:
    stop_token = unpack_tokens(TINY.encode("!"))[0]
    says = TINY.encode("Hi!")

    def ends_with_stop_token(request: InferenceRequest) -> list[Step]:
        return [[StreamDelta(says, finish_reason="stop")]]

    for extra in ({}, {"logprobs": 0}):
        backend = FakeBackend(ends_with_stop_token)
        answer = complete(backend, stop_token_ids=[stop_token], **extra)
        assert answer["choices"][0]["text"] == "Hi"
        assert answer["usage"]["completion_tokens"] == len(says) // 4
        assert backend.requests[0].stop_token_ids == (stop_token, END_OF_TURN, 0)


def test_ignore_eos_leaves_only_the_clients_stop_tokens() -> None:
    backend = FakeBackend()
    complete(backend, ignore_eos=True, stop_token_ids=[7, 7])
    assert backend.requests[0].stop_token_ids == (7,)
    assert backend.requests[0].sampling.ignore_eos


def test_sampling_fields_reach_the_router() -> None:
    backend = FakeBackend()

    ask(
        backend,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        min_tokens=2,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
        cache_salt="tenant",
        nvext={"agent_hints": {"priority": 5, "osl": 100}},
    )

    (request,) = backend.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 40)
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    assert sampling.engine_fields == {"min_p": 0.1, **penalties}
    assert (sampling.min_tokens, sampling.logit_bias) == (2, {5: -100})
    assert (sampling.seed, sampling.logprobs) == (7, 3)
    assert (request.cache_salt, request.priority, request.expected_output_tokens) == ("tenant", 5, 100)


def test_how_long_blocks_stay_is_asked_for_in_the_words_of_tensorrt_llm() -> None:
    backend = FakeBackend()
    ranges = [{"token_start": 4, "priority": 5, "duration_ms": 7}, {"token_start": 0, "token_end": 3, "priority": 80}]
    far = {"token_start": 50, "token_end": 60}
    complete(backend, prompt=list(range(10)), nvext={"kv_cache_retention_config": {}})
    asked = {"token_range_retention_configs": [*ranges], "decode_retention_priority": 10, "decode_duration_ms": 9}
    complete(backend, prompt=list(range(10)), nvext={"kv_cache_retention_config": asked})
    only_far = {"token_range_retention_configs": [far]}
    complete(backend, prompt=list(range(10)), nvext={"kv_cache_retention_config": only_far})
    complete(backend, prompt=list(range(10)))

    assert [request.retention for request in backend.requests] == [
        KvRetention(),
        KvRetention((RetainedTokens(0, 3, 80), RetainedTokens(4, 10, 5, 7)), 10, 9),
        KvRetention(),
        None,
    ]


def test_without_a_limit_a_chat_may_fill_the_context_and_a_completion_has_sixteen_tokens() -> None:
    backend = FakeBackend()
    ask(backend)
    complete(backend)
    chat, completion = backend.requests
    assert chat.sampling.max_tokens == 262_144 - len(chat.token_ids) // 4
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.seed is None


def test_top_k_that_means_no_limit_is_none() -> None:
    backend = FakeBackend()
    ask(backend, top_k=-1)
    ask(backend, top_k=0)
    assert [request.sampling.top_k for request in backend.requests] == [None, None]


def test_a_lora_adapter_is_asked_for_by_its_name() -> None:
    backend = FakeBackend()

    response = post(backend, COMPLETIONS, prompt="hi", model="tiny-lora")

    assert response.json()["model"] == "tiny-lora"
    assert (backend.requests[0].model, backend.requests[0].lora_name) == ("tiny", "tiny-lora")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_told_apart_by_index_id_and_seed(stream: bool) -> None:
    backend = FakeBackend(lambda request: speak(f"I am {request.request_id[-1]}"))

    if stream:
        chunks = streamed(backend, n=3, seed=10)
        texts = [text_of(chunks, index) for index in range(3)]
    else:
        texts = [choice["message"]["content"] for choice in ask(backend, n=3, seed=10)["choices"]]

    assert texts == ["I am 0", "I am 1", "I am 2"]
    assert [request.request_id for request in backend.requests] == ["id-1-0", "id-1-1", "id-1-2"]
    assert [request.sampling.seed for request in backend.requests] == [10, 11, 12]


def test_choices_without_a_seed_get_different_seeds_that_follow_from_the_request_id() -> None:
    seeds = []
    for _ in range(2):
        backend = FakeBackend()
        ask(backend, n=3)
        seeds.append([request.sampling.seed for request in backend.requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


async def test_everything_that_arrived_together_is_one_chunk_per_choice_and_one_write() -> None:
    token_ids = TINY.encode("Hello, world!")

    def at_once(request: InferenceRequest) -> list[Step]:
        return [[StreamDelta(token_ids[at : at + 4]) for at in range(0, len(token_ids), 4)], [StreamDelta(b"", "stop")]]

    writes: list[bytes] = []

    app = application(FakeBackend(at_once))
    body = json.dumps({"model": "tiny", "prompt": "hi", "stream": True}).encode()
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            writes.append(message["body"])

    await app({"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}, receive, send)
    assert [text_of(events(item.decode())) for item in writes] == ["Hello, world!", ""]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", [TINY.encode("hi")]),
        (["hi", "there"], [TINY.encode("hi"), TINY.encode("there")]),
        ([5, 6, 4095], [pack_tokens([5, 6, 4095])]),
        ([[5], [6, 7]], [pack_tokens([5]), pack_tokens([6, 7])]),
    ],
)
def test_completion_prompts_may_be_strings_or_token_ids(prompt: Any, prompts: list[bytes]) -> None:
    backend = FakeBackend()

    answer = complete(backend, prompt=prompt, n=2)

    assert [request.token_ids for request in backend.requests] == [item for item in prompts for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(len(item) // 4 for item in prompts)


@pytest.mark.parametrize("prompt", ["say ", unpack_tokens(TINY.encode("say "))])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_before_the_answer(prompt: Any, stream: bool) -> None:
    backend = FakeBackend(script("hello"))
    if stream:
        assert text_of(streamed(backend, COMPLETIONS, prompt=prompt, echo=True)) == "say hello"
    else:
        assert complete(backend, prompt=prompt, echo=True)["choices"][0]["text"] == "say hello"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_log_probabilities_name_token_bytes_and_alternatives(stream: bool) -> None:
    backend = FakeBackend(lambda request: with_logprobs(speak("é!"), alternatives=2))

    if stream:
        chunks = streamed(backend, logprobs=True, top_logprobs=2)
        content = [
            entry for chunk in chunks if (found := chunk["choices"][0]["logprobs"]) for entry in found["content"]
        ]
    else:
        content = ask(backend, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]

    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é!"
    assert [entry["logprob"] for entry in content] == [-0.5] * len(content)
    assert content[0]["top_logprobs"][0]["logprob"] == -9999.0
    assert len(content[0]["top_logprobs"]) == 2


def test_completion_log_probabilities_say_where_each_token_begins() -> None:
    backend = FakeBackend(lambda request: with_logprobs(speak("Hello, world"), alternatives=1))

    answer = complete(backend, logprobs=1)

    logprobs = answer["choices"][0]["logprobs"]
    text = answer["choices"][0]["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset:].startswith(token)
    assert len(logprobs["top_logprobs"]) == len(logprobs["token_logprobs"]) == len(logprobs["tokens"])


def failing(request: InferenceRequest) -> list[Step]:
    return [*speak("Hel")[:1], [StreamDelta(b"", "error", error="worker-0 ran out of memory")]]


def test_a_generation_that_fails_is_a_server_error_with_its_reason() -> None:
    response = post(FakeBackend(failing), COMPLETIONS, prompt="hi")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
    assert "worker-0 ran out of memory" in response.json()["error"]["message"]


def test_a_request_whose_last_worker_left_may_be_sent_again() -> None:
    gone = [StreamDelta(b"", "error", error="worker-0 was lost", no_worker=True)]
    response = post(FakeBackend(lambda request: [gone]), COMPLETIONS, prompt="hi")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
    assert "worker-0 was lost" in response.json()["error"]["message"]


def refusing(request: InferenceRequest) -> list[Step]:
    return [[StreamDelta(b"", "error", error="guided_regex is set, and this engine has no guides", unsupported=True)]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_workers_were_lost_with_is_a_422_which_no_client_library_sends_again_by_itself(
    stream: bool,
) -> None:
    def poison(request: InferenceRequest) -> list[Step]:
        return [[StreamDelta(b"", "error", error="2 workers (a, b) were lost", poison=True)]]

    response = post(FakeBackend(poison), COMPLETIONS, prompt="hi", stream=stream)

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (422, "workers_lost", "invalid_request_error")
    assert "2 workers (a, b) were lost" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"seed": 3}, "seed"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "guided_json"),
        ({"seed": 3, "temperature": 0}, ""),
        ({"frequency_penalty": 0.0}, ""),
        ({"n": 2}, ""),
    ],
)
def test_what_no_worker_of_a_model_can_do_is_answered_at_once(fields: dict[str, Any], param: str) -> None:
    unable = tuple((name, "and no engine does it") for name in ("guided_decoding", "seed", "frequency_penalty"))
    backend = FakeBackend(served=[ServedModel("tiny", 1, 4096, inabilities=unable)])
    response = post(backend, CHAT, messages=[{"role": "user", "content": "hi"}], **fields)
    if param:
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_by_worker", param)
        assert "no engine does it. The request was not run." in error["message"]
    assert bool(backend.requests) is not bool(param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_what_a_worker_cannot_do_is_the_requests_fault_with_the_workers_reason(n: int, stream: bool) -> None:
    response = post(FakeBackend(refusing), COMPLETIONS, prompt="hi", stream=stream, n=n)

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_by_worker")
    assert error["type"] == "invalid_request_error"
    assert "guided_regex is set, and this engine has no guides" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_found_no_room_is_a_429_with_a_time_to_come_back(n: int, stream: bool) -> None:
    backend = FakeBackend(lambda request: [[StreamDelta(b"", "error", error="no room", retry_after_s=6.2)]])

    response = post(backend, COMPLETIONS, prompt="hi", stream=stream, n=n)

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (429, "busy", "rate_limit_error")
    assert (response.headers["retry-after"], response.headers["x-poolgrid-refusal"]) == ("7", "busy")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_no_room_and_an_unknown_model_keep_their_meaning_on_every_api(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    last = [StreamDelta(b"", "error", error="no room", retry_after_s=2.0)]
    full = post(FakeBackend(lambda request: [last]), path, **body, stream=stream)
    gone = [StreamDelta(b"", "error", error="no such adapter", unsupported=True, unknown_model=True)]
    unknown = post(FakeBackend(lambda request: [gone]), path, **body, stream=stream)

    told = full.json()["error"]
    assert (full.status_code, told["code"], full.headers["retry-after"]) == (429, "busy", "2")
    assert told["type"] == ("overloaded_error" if path == "/v1/messages" else "rate_limit_error")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_stream_that_waits_in_the_queue_has_no_status_before_it_has_a_worker() -> None:
    room, full = asyncio.Event(), [StreamDelta(b"", "error", error="no room", retry_after_s=2.0)]
    backend = FakeBackend(lambda request: [room, full])

    async with in_process(application(backend, keep_alive_interval_s=0.05)) as client:
        fields = {"model": "tiny", "prompt": "hi", "stream": True}
        answer = asyncio.ensure_future(client.post(COMPLETIONS, json=fields))
        await backend.submitted.wait()
        backend.streams[0].waits_for_room = True
        await asyncio.sleep(0.4)  # longer than a head waits, and than several comments
        room.set()
        assert (await answer).status_code == 429


@pytest.mark.parametrize(("code", "why"), [("busy", {"retry_after_s": 2.0}), ("no_worker", {"no_worker": True})])
async def test_no_room_amid_a_stream_is_an_event_and_counts_as_a_failed_request(code: str, why: dict[str, Any]) -> None:
    backend = FakeBackend(lambda request: [*speak("Hel")[:1], [StreamDelta(b"", "error", error="lost", **why)]])
    async with in_process(application(backend)) as client:
        response = await client.post(COMPLETIONS, json={"model": "tiny", "prompt": "hi", "stream": True})
        counted = (await client.get("/metrics")).text

    assert (response.status_code, events(response.text)[-1]["error"]["code"]) == (200, code)
    assert 'poolgrid_frontend_requests_total{endpoint="completions",status="500",streaming="true"} 1.0' in counted


def test_what_a_worker_cannot_do_is_an_event_of_a_stream_that_has_begun() -> None:
    backend = FakeBackend(lambda request: [*speak("Hel")[:1], *refusing(request)])

    response = post(backend, COMPLETIONS, prompt="hi", stream=True)

    assert (response.status_code, events(response.text)[-1]["error"]["code"]) == (200, "unsupported_by_worker")


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_fails_ends_with_an_error_event_and_without_done(n: int) -> None:
    backend = FakeBackend(lambda request: [asyncio.Event()] if request.request_id == "id-1-1" else failing(request))

    response = post(backend, COMPLETIONS, prompt="hi", stream=True, n=n)

    chunks = events(response.text)
    assert response.status_code == 200
    assert chunks[-1]["error"]["code"] == "generation_failed"
    assert text_of(chunks[:-1]) != ""
    assert "[DONE]" not in response.text
    assert [stream.cancels for stream in backend.streams] == [0, 1][:n]


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [[StreamDelta(b"", "cancelled")]],
        [[StreamDelta(b"", "what")]],
        [RuntimeError("broken")],
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_router_that_breaks_its_promise_costs_one_request_only(steps: list[Step], n: int) -> None:
    response = post(FakeBackend(lambda request: list(steps)), COMPLETIONS, prompt="hi", n=n)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


def test_the_clients_request_id_is_honoured_when_it_is_sane() -> None:
    backend = FakeBackend()

    good = post(backend, COMPLETIONS, headers={"x-request-id": "trace-1.a:b_c-d"}, prompt="hi")
    bad = post(backend, COMPLETIONS, headers={"x-request-id": "no spaces, please"}, prompt="hi")

    assert good.headers["x-request-id"] == "trace-1.a:b_c-d"
    assert bad.headers["x-request-id"] == "id-1"
    assert [name_of(request.request_id) for request in backend.requests] == ["trace-1.a:b_c-d", "id-1"]


async def test_the_same_request_id_twice_at_once_is_two_requests() -> None:
    hold = asyncio.Event()
    backend = FakeBackend(lambda request: [hold, *speak("hello")])
    async with in_process(application(backend)) as client:

        async def one() -> httpx.Response:
            return await client.post(
                COMPLETIONS, json={"model": "tiny", "prompt": "hi"}, headers={"x-request-id": "same"}
            )

        first = asyncio.ensure_future(one())
        await backend.submitted.wait()
        backend.submitted.clear()
        second = asyncio.ensure_future(one())
        await backend.submitted.wait()
        hold.set()
        for response in (await first, await second):
            assert response.headers["x-request-id"] == "same"
        await one()
    ids = [request.request_id for request in backend.requests]
    assert [name_of(each) for each in ids] == ["same"] * 3
    assert len(set(ids)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_prompt_has_log_probabilities_where_the_worker_reports_them(stream: bool) -> None:
    prompt = list(unpack_tokens(TINY.encode("Once upon a time")))

    def script(request: InferenceRequest) -> list[Step]:
        steps = with_logprobs(speak(", said"), 1)
        assert isinstance(steps[0], list)
        steps[0][0].prompt_logprobs = tuple(TokenLogprobs(token, -0.25, ((token, -0.25),)) for token in prompt[1:])
        return steps

    backend = FakeBackend(script)
    answer = post(backend, COMPLETIONS, prompt=prompt, echo=True, logprobs=1, stream=stream)
    assert backend.requests[0].sampling.prompt_logprobs == 1
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = [chunk["choices"][0] for chunk in chunks]
    else:
        parts = answer.json()["choices"]
    text = "".join(part["text"] for part in parts)
    placed = [part["logprobs"] for part in parts if part["logprobs"]]
    tokens = [token for logprobs in placed for token in logprobs["tokens"]]
    offsets = [offset for logprobs in placed for offset in logprobs["text_offset"]]
    values = [value for logprobs in placed for value in logprobs["token_logprobs"]]
    assert text == "Once upon a time, said" == "".join(tokens)
    assert [text[offset : offset + len(token)] for offset, token in zip(offsets, tokens, strict=True)] == tokens
    assert values[0] is None
    assert values[1 : len(prompt)] == [-0.25] * (len(prompt) - 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_with_echo_the_prompt_may_be_asked_for_alone(stream: bool, logprobs: int | None) -> None:
    prompt = unpack_tokens(TINY.encode("Once upon a time"))

    def script(request: InferenceRequest) -> list[Step]:
        steps = speak(" unseen") if logprobs is None else with_logprobs(speak(" unseen"), logprobs)
        assert isinstance(steps[0], list)
        if logprobs is not None:
            steps[0][0].prompt_logprobs = tuple(TokenLogprobs(token, -0.25, ()) for token in prompt[1:])
        return steps

    backend = FakeBackend(script)
    body: dict[str, Any] = {"prompt": "Once upon a time", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    if stream:
        answer = post(backend, COMPLETIONS, **body, stream=True, stream_options={"include_usage": True})
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        usage = chunks[-1]["usage"]
    else:
        whole = post(backend, COMPLETIONS, **body).json()
        parts, usage = whole["choices"], whole["usage"]

    assert backend.requests[0].sampling.max_tokens == 1
    assert "".join(part["text"] for part in parts) == "Once upon a time"
    assert parts[-1]["finish_reason"] == "length"
    assert usage["completion_tokens"] == 0
    placed = [part["logprobs"] for part in parts if part["logprobs"]]
    assert "".join(token for each in placed for token in each["tokens"]) == ("Once upon a time" if placed else "")
    assert bool(placed) is (logprobs is not None)


def test_nothing_to_generate_needs_a_prompt_to_repeat() -> None:
    backend = FakeBackend()
    answers = [
        post(backend, COMPLETIONS, prompt="hi", max_tokens=0),
        post(backend, COMPLETIONS, prompt="hi", max_tokens=-1, echo=True),
        post(backend, CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=0),
    ]

    assert [answer.status_code for answer in answers] == [400, 400, 400]
    assert [answer.json()["error"]["param"] for answer in answers] == ["max_tokens"] * 3
    assert "with echo also 0" in answers[0].json()["error"]["message"]
    assert "an integer from 1, or with echo also 0 for the prompt alone" in answers[1].json()["error"]["message"]
    assert not backend.requests


def test_a_worker_that_leaves_out_log_probabilities_of_the_prompt_fails_the_request() -> None:
    backend = FakeBackend(lambda _: with_logprobs(speak("Hello"), 0))
    answer = post(backend, COMPLETIONS, prompt="hi", echo=True, logprobs=0)
    assert answer.status_code == 500
    assert "log probabilities of the prompt" in answer.json()["error"]["message"]
