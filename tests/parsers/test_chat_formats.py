"""Chat answers with reasoning and tool calls, through the endpoint and the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.server.frontend.chat_template import ChatTemplate
from poolgrid.server.frontend.prompt_model import PromptModel
from tests.frontend.fake_backend import TINY, FakeBackend, Step, speak, with_logprobs
from tests.frontend.server import application, in_process, served_in_thread

ARGUMENTS = '{"city": "Pärïs 😀"}'
CALL = f'Let me look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HI = [{"role": "user", "content": "hi"}]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def says(text: str) -> FakeBackend:
    def script(request: InferenceRequest) -> list[Step]:
        steps = speak(text)
        return with_logprobs(steps, 0) if request.sampling.logprobs is not None else steps

    return FakeBackend(script)


async def post(backend: FakeBackend, models: dict[str, PromptModel] | None = None, **body: Any) -> httpx.Response:
    settings = {name: body.pop(name) for name in ("reasoning_parser", "tool_call_parser") if name in body}
    async with in_process(application(backend, models=models, **settings)) as client:
        return await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, **body})


def the_call(calls: Any) -> Any:
    """Return the only call of a message; the client's own types allow other kinds of calls, which do not occur."""
    assert len(calls) == 1
    assert calls[0].type == "function"
    return calls[0]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def client_of(backend: FakeBackend, **settings: Any) -> Iterator[openai.OpenAI]:
    with (
        served_in_thread(application(backend, **settings)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def calling() -> Iterator[openai.OpenAI]:
    yield from client_of(says(CALL))


def test_a_tool_call_is_no_content(calling: openai.OpenAI) -> None:
    choice = calling.chat.completions.create(model="tiny", messages=HI, tools=[TOOL]).choices[0]  # type: ignore[arg-type,list-item]

    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    call = the_call(choice.message.tool_calls)
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert call.id.startswith("call_")


def test_the_streaming_helper_accumulates_the_same_call(calling: openai.OpenAI) -> None:
    whole = calling.chat.completions.create(model="tiny", messages=HI, tools=[TOOL]).choices[0]  # type: ignore[arg-type,list-item]
    with calling.chat.completions.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:  # type: ignore[arg-type,list-item]
        events = list(stream)
        final = stream.get_final_completion().choices[0]

    assert final.finish_reason == "tool_calls"
    assert final.message.content == whole.message.content
    call = the_call(final.message.tool_calls)
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    parts = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len([part for part in parts if part]) > 3, "arguments come while they are written"
    assert "".join(parts) == ARGUMENTS


@pytest.mark.anyio
async def test_values_in_tags_are_what_the_tools_of_the_request_say() -> None:
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    response = await post(says(text), tools=[TOOL], tool_call_parser="qwen3_coder")
    call = the_message_call(response)
    assert json.loads(call["function"]["arguments"]) == {"city": "12", "days": 12}


@pytest.mark.anyio
async def test_kimis_ids_count_the_calls_of_the_whole_conversation() -> None:
    earlier = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"},
    ]
    text = "<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    response = await post(says(text), tools=[TOOL], messages=messages, tool_call_parser="kimi_k2")
    assert the_message_call(response)["id"] == "functions.get_weather:1"


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_goes_on_inside_the_assistants_reasoning_is_reasoning(stream: bool) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{# <think> </think> #}"
    model = marked(template=template)
    messages = [*HI, {"role": "assistant", "content": "<think>Hm,"}]
    response = await post(
        says(" yes</think>So"), {"tiny": model}, messages=messages, continue_final_message=True,
        add_generation_prompt=False, stream=stream,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    answers = [json.loads(line) for line in re.findall(r"(?:data: )?(\{.*\})", response.text)]
    parts = [answer["choices"][0]["delta" if stream else "message"] for answer in answers]
    assert "".join(part.get("reasoning_content") or "" for part in parts) == "yes"
    assert "".join(part.get("content") or "" for part in parts) == "So"


def the_message_call(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    return dict(call)


@pytest.mark.anyio
async def test_without_tools_the_text_stays_content() -> None:
    bodies: list[dict[str, Any]] = [{}, {"tools": [TOOL], "tool_choice": "none"}]
    for body in bodies:
        answer = (await post(says(CALL), **body)).json()["choices"][0]
        assert answer["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert answer["finish_reason"] == "stop"


@pytest.mark.anyio
async def test_one_call_when_the_client_wants_no_parallel_ones() -> None:
    body: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False}
    message = (await post(says(CALL + CALL[12:]), **body)).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    both = (await post(says(CALL + CALL[12:]), tools=[TOOL])).json()["choices"][0]["message"]
    assert len({call["id"] for call in both["tool_calls"]}) == 2


@pytest.mark.anyio
async def test_a_required_call_is_guided_and_read() -> None:
    backend = says(f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}]')
    choice = (await post(backend, tools=[TOOL], tool_choice="required")).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "tool_calls"
    schema = json.loads(backend.requests[0].sampling.guided_json or b"")
    assert schema["items"]["properties"]["parameters"] == TOOL["function"]["parameters"]
    assert "maxItems" not in schema


@pytest.mark.anyio
async def test_a_named_call_is_guided_by_the_schema_of_its_function() -> None:
    backend = says(ARGUMENTS)
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = (await post(backend, tools=[TOOL], tool_choice=named)).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert json.loads(backend.requests[0].sampling.guided_json or b"") == TOOL["function"]["parameters"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "guided_json", b'{"type":"object"}'),
        ({"guided_json": {"type": "integer"}}, "guided_json", b'{"type":"integer"}'),
        ({"guided_json": '{"type": "integer"}'}, "guided_json", b'{"type":"integer"}'),
        ({"guided_regex": "a+"}, "guided_regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "guided_choice", ("a", "b")),
        ({"guided_grammar": "root ::= 'a'"}, "guided_grammar", "root ::= 'a'"),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "guided_regex", "a+"),
        ({"nvext": {"guided_decoding": {"choice": ["a"]}}}, "guided_choice", ("a",)),
        ({"response_format": {"type": "regex", "regex": "a"}}, "guided_regex", "a"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "structural_tag", None),
    ],
)
async def test_every_spelling_of_a_guide_reaches_the_engine(body: dict[str, Any], field: str, value: Any) -> None:
    backend = says("{}")
    assert (await post(backend, **body)).status_code == 200
    given = getattr(backend.requests[0].sampling, field)
    assert given == value if value is not None else json.loads(given) == body["response_format"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": "json"}, "response_format"),
        ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [TOOL], "guided_grammar": "root ::= 'a'"}, "guided_grammar"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [TOOL], "tool_choice": allowed("maybe", "get_weather")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": [TOOL], "tool_choice": allowed("auto", "f")},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    backend = says("{}")
    response = await post(backend, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not backend.requests


def other_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_model_that_must_call_is_guided_to_the_call_whatever_an_answer_were_to_be(choice: Any) -> None:
    backend = says(ARGUMENTS if choice != "required" else "[]")
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    response = await post(backend, tools=[TOOL], tool_choice=choice, response_format=wanted)
    assert response.status_code == 200
    guide = json.loads(backend.requests[0].sampling.guided_json or b"")
    assert guide in (
        TOOL["function"]["parameters"],
        guide | {"type": "array"},
    )


@pytest.mark.anyio
async def test_a_model_that_may_call_is_guided_to_a_call_or_an_answer() -> None:
    backend = says(CALL.removeprefix("Let me look.\n"))
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    message = (await post(backend, tools=[TOOL], response_format=wanted)).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    told = backend.requests[0].sampling
    assert told.guided_json is None
    answer, calls = json.loads(told.structural_tag or "")["format"]["elements"]
    assert answer == {"type": "json_schema", "json_schema": {"type": "integer"}}
    one, _several = calls["elements"]
    assert one["begin"].startswith('<tool_call>\n{"name": "get_weather"')
    assert one["content"]["json_schema"] == TOOL["function"]["parameters"]


@pytest.mark.anyio
async def test_a_model_whose_calls_are_not_read_is_guided_to_the_answer() -> None:
    backend = says("3")
    body: dict[str, Any] = {"tools": [TOOL], "guided_json": {"type": "integer"}, "tool_call_parser": "none"}
    assert (await post(backend, **body)).json()["choices"][0]["message"]["content"] == "3"
    assert backend.requests[0].sampling.guided_json == b'{"type":"integer"}'


@pytest.mark.anyio
async def test_of_allowed_tools_only_these_are_called_and_the_prompt_shows_all() -> None:
    tools = [TOOL, other_tool("get_time")]
    text = CALL + '\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    everything, some = says(text), says(text)
    assert len((await post(everything, tools=tools)).json()["choices"][0]["message"]["tool_calls"]) == 2
    choice = (await post(some, tools=tools, tool_choice=allowed("auto", "get_time"))).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_time"]
    assert some.requests[0].token_ids == everything.requests[0].token_ids

    must = says('[{"name": "get_time", "parameters": {}}]')
    choice = (await post(must, tools=tools, tool_choice=allowed("required", "get_time"))).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_time"]
    assert b"get_weather" not in (must.requests[0].sampling.guided_json or b"")


@pytest.mark.anyio
async def test_arguments_of_earlier_calls_that_are_no_json_are_shown_as_they_are() -> None:
    def conversation(arguments: str) -> list[dict[str, Any]]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "no"},
        ]

    backend = says("Fine.")
    broken = '{"city": "Pa'
    assert (await post(backend, messages=conversation(broken))).status_code == 200
    prompt = TINY.decode(backend.requests[0].token_ids)
    assert json.dumps(broken)[1:-1] in prompt

    strict = marked(
        template="{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}"
        "{% if c.function.arguments is string %}{{ raise_exception('no object') }}{% endif %}{% endfor %}{% endfor %}hi"
    )
    assert (await post(backend, {"tiny": strict}, messages=conversation('{"city": 1}'))).status_code == 200
    error = (await post(backend, {"tiny": strict}, messages=conversation(broken))).json()["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.anyio
async def test_reasoning_is_told_apart_streaming_and_not() -> None:
    text = "<think>\nTwo is even.\n</think>\n\nYes."
    body: dict[str, Any] = {"reasoning_parser": "qwen3", "n": 2}
    whole = (await post(says(text), **body)).json()["choices"]
    assert [choice["message"]["reasoning_content"] for choice in whole] == ["Two is even."] * 2
    assert [choice["message"]["content"] for choice in whole] == ["Yes."] * 2
    stream = (await post(says(text), stream=True, logprobs=True, **body)).text
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in choices]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two is even."
        assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
        tokens = [entry["bytes"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert bytes(byte for token in tokens for byte in token).decode() == text
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert stream.endswith("data: [DONE]\n\n")


def marked(*special: str, template: str = "{{ messages[-1].content }}", window: bool = False) -> PromptModel:
    """Return the tiny model with further special tokens; ``window``: without its table of bytes."""
    tokenizer = Tokenizer.from_str(TINY.tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    table = None if window or TINY.byte_table is None else (*TINY.byte_table(), *(b"" for _ in special))
    return PromptModel(
        name="tiny",
        tokenizer=tokenizer,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=4096,
        template=ChatTemplate(template),
        byte_table=None if table is None else lambda: table,
    )


@pytest.mark.anyio
@pytest.mark.parametrize("window", [False, True])
async def test_markers_that_are_special_tokens_are_seen_by_the_parser_only(window: bool) -> None:
    model = marked("[TOOL_CALLS]", "[ARGS]", window=window)
    text = f"Sure 😀[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"
    backend = FakeBackend(lambda _: speak(text, model=model))
    choice = (await post(backend, {"tiny": model}, tools=[TOOL])).json()["choices"][0]
    assert choice["message"]["content"] == "Sure 😀"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9
    plain = (await post(backend, {"tiny": model})).json()["choices"][0]
    assert plain["message"]["content"] == f"Sure 😀get_weather{ARGUMENTS}"


@pytest.mark.anyio
async def test_a_prompt_that_opens_the_reasoning_is_noticed() -> None:
    model = marked(template="{{ messages[-1].content }}<think>\n{# </think> #}")
    message = (await post(says("Hm.</think>Yes."), {"tiny": model})).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


@pytest.mark.anyio
async def test_the_assistants_last_words_are_continued() -> None:
    backend = says(" world.")
    messages = [*HI, {"role": "assistant", "content": "Hello,  "}]
    answer = await post(backend, messages=messages, continue_final_message=True)
    assert answer.json()["choices"][0]["message"]["content"] == " world."
    prompt = TINY.tokenizer.decode(list(memoryview(backend.requests[0].token_ids).cast("I")), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nHello,  ")


@pytest.mark.anyio
async def test_a_stream_that_fails_inside_a_call_ends_with_the_error() -> None:
    steps = speak(CALL)[:-3]
    backend = FakeBackend(lambda _: [*steps, RuntimeError("gone")])
    text = (await post(backend, tools=[TOOL], stream=True)).text
    assert '"arguments":""' in text
    assert text.splitlines()[-2].startswith('data: {"error"')
