"""The Responses API, through the official client and by hand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.server.frontend.prompt_encoder import PromptEncoder
from tests.frontend.fake_backend import FakeBackend, Step, speak
from tests.frontend.server import application, in_process, post_to_shared, prompt_of, served_in_thread
from tests.frontend.weather_tool import TOOL
from tests.installed import needs_parsers

ARGUMENTS = '{"city": "Pärïs\u2028"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
ANSWER = f"<think>\nLook it up.\n</think>\n\nLet me look.\n{CALL}"


class Weather(pydantic.BaseModel):
    city: str


def script(request: InferenceRequest) -> list[Step]:
    if request.sampling.guided_json is not None:
        return speak('{"city": "Paris"}')
    return speak(ANSWER, cached_tokens=2)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        served_in_thread(application(FakeBackend(script), reasoning_parser="qwen3")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai_client,
    ):
        yield openai_client


def post(backend: FakeBackend, **body: Any) -> httpx.Response:
    return post_to_shared(backend, "/v1/responses", json={"model": "tiny", "input": "hi", **body})


@needs_parsers
def test_the_client_gets_reasoning_text_and_calls_as_items(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hi", tools=[TOOL], instructions="Be brief.")

    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == ["Look it up."]
    assert message.type == "message"
    assert response.output_text == "Let me look."
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


@needs_parsers
@pytest.mark.parametrize("stream", [False, True])
async def test_the_tokens_of_long_reasoning_are_counted_in_a_thread(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[tuple[int, str]] = []
    encode = PromptEncoder.encode

    def watched(self: PromptEncoder, text: str, *args: Any, **options: Any) -> bytes:
        where.append((threading.get_ident(), text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(PromptEncoder, "encode", watched)
    backend = FakeBackend(lambda request: speak("<think>" + "Look it up. " * 4000 + "</think>Done."))

    async with in_process(application(backend, reasoning_parser="qwen3")) as http:
        assert (
            await http.post("/v1/responses", json={"model": "tiny", "input": "hi", "stream": stream})
        ).status_code == 200

    [thread] = [each for each, text in where if text.strip() == ("Look it up. " * 4000).strip()]
    assert thread != threading.get_ident()


@needs_parsers
def test_the_clients_streaming_helper_comes_to_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="hi", tools=[TOOL])
    with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()

    def content(response: Any) -> list[Any]:
        return [{**item.to_dict(), "id": "", "call_id": "", "parsed_arguments": None} for item in response.output]

    assert [item["type"] for item in content(final)] == ["reasoning", "message", "function_call"]
    for streamed, given in zip(content(final), content(whole), strict=True):
        assert given.items() <= streamed.items() or streamed["type"] == "message"
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 3, "arguments come while they are written"
    assert "".join(deltas) == ARGUMENTS
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"


def test_a_conversation_of_items_becomes_messages() -> None:
    backend = FakeBackend(lambda _: speak("Fine."))
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Moment."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    response = post(backend, input=items, instructions="Be brief.", tools=[TOOL])
    assert response.status_code == 200
    assert response.json()["output"][0]["content"][0]["text"] == "Fine."
    turns = prompt_of(backend).split("<|im_start|>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert turns[2].count("<tool_call>") == 2
    assert "Moment." in turns[2]


def test_an_answer_that_hits_its_limit_is_incomplete() -> None:
    backend = FakeBackend(lambda _: speak("Once upon", finish_reason="length"))
    body = post(backend, max_output_tokens=3).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert backend.requests[0].sampling.max_tokens == 3
    assert (
        post(backend, max_output_tokens=3, stream=True)
        .text.rstrip()
        .rpartition("event: ")[2]
        .startswith("response.incomplete")
    )


def test_a_stream_that_fails_ends_with_the_failed_response() -> None:
    steps = speak("Hello, world!")[:2]
    backend = FakeBackend(lambda _: [*steps, RuntimeError("gone")])
    last = post(backend, stream=True).text.rstrip().splitlines()[-1]
    event = json.loads(last.removeprefix("data: "))
    assert event["type"] == "response.failed"
    assert event["response"]["error"]["code"] == "server_error"
    assert event["response"]["output"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"type": 3}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "item_reference"}]}, "input[1].id"),
        ({"input": [{"id": 3}]}, "input[0].id"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "input[0]"),
        ({"input": [{"role": "assistant", "content": "x", "tool_calls": [{"id": 3}]}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": 3}]}]}, "input[0].content[0].type"),
        ({"instructions": [{"role": "robot", "content": "x"}]}, "instructions[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": ""}]}, "input[0].name"),
        ({"tools": [{"type": 3}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": ""}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 5_000_000}, "input"),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    response = post(backend, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not backend.requests
