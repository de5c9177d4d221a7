"""The official client of OpenAI's API."""

from __future__ import annotations

import json

import openai
from pydantic import BaseModel

PACKAGE = "openai"
MODEL = "tiny"
HI = [{"role": "user", "content": "Where is the next station?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMETERS}}
FLAT_TOOL = {"type": "function", "name": "get_weather", "strict": True, "parameters": PARAMETERS}


class Station(BaseModel):
    name: str
    platforms: list[int]


def _client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def check_chat_without_a_limit(url):
    answer = _client(url).chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].finish_reason == "stop", answer.choices[0].finish_reason


def check_chat_stream(url):
    stream = _client(url).chat.completions.create(model=MODEL, messages=HI, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def check_parse(url):
    answer = _client(url).chat.completions.parse(model=MODEL, messages=HI, response_format=Station)
    assert isinstance(answer.choices[0].message.parsed, Station)


def check_parse_beside_tools(url):
    kinds = set()
    for seed in range(12):
        answer = _client(url).chat.completions.parse(
            model=MODEL, messages=HI, response_format=Station, tools=[TOOL], seed=seed
        )
        message = answer.choices[0].message
        if message.tool_calls:
            assert "city" in message.tool_calls[0].function.parsed_arguments
        else:
            assert isinstance(message.parsed, Station)
        kinds.add(bool(message.tool_calls))
    assert kinds == {True, False}, "with auto either comes"


def check_allowed_tools(url):
    other = json.loads(json.dumps(TOOL).replace("get_weather", "get_time"))
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]},
    }
    answer = _client(url).chat.completions.create(model=MODEL, messages=HI, tools=[TOOL, other], tool_choice=choice)
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"get_time"}


def check_streamed_tool_call(url):
    with _client(url).chat.completions.stream(model=MODEL, messages=HI, tools=[TOOL], tool_choice="required") as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.tool_calls


def check_responses(url):
    response = _client(url).responses.create(model=MODEL, input="Hello")
    assert response.status == "completed", response.status
    assert response.output_text


def check_responses_parse_beside_tools(url):
    for _ in range(4):
        response = _client(url).responses.parse(model=MODEL, input="Hello", text_format=Station, tools=[FLAT_TOOL])
        called = [item for item in response.output if item.type == "function_call"]
        assert called or isinstance(response.output_parsed, Station)


def check_responses_stream(url):
    with _client(url).responses.stream(model=MODEL, input="Hello", max_output_tokens=20) as stream:
        assert [event.type for event in stream][-1] in ("response.completed", "response.incomplete")


def check_previous_response(url):
    client = _client(url)
    first = client.responses.create(model=MODEL, input="Hello")
    second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert len(list(client.responses.input_items.list(second.id))) == 3
    client.responses.delete(second.id)
    try:
        client.responses.retrieve(second.id)
    except openai.NotFoundError:
        return
    raise AssertionError("it is still there")


def check_item_reference(url):
    client = _client(url)
    first = client.responses.create(model=MODEL, input="Hello")
    items = [*(item.id for item in client.responses.input_items.list(first.id)), *(item.id for item in first.output)]
    references = [{"type": "item_reference", "id": each} for each in items]
    second = client.responses.create(model=MODEL, input=[*references, {"role": "user", "content": "And?"}])
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


async def check_async(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=20, stream=True)
        assert [chunk async for chunk in stream]


def check_completions_and_models(url):
    client = _client(url)
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=5).choices[0].text
    assert MODEL in [model.id for model in client.models.list()]
