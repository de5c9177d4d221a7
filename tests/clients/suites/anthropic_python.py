"""The official client of Anthropic's API."""

from __future__ import annotations

import anthropic

PACKAGE = "anthropic"
HI = [{"role": "user", "content": "Where is the next station?"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def _client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


def check_message(url):
    message = _client(url).messages.create(model="tiny", max_tokens=500, messages=HI, system="Be brief.")
    assert message.content[0].type == "text"
    assert message.stop_reason in ("end_turn", "max_tokens")


def check_streamed_message(url):
    with _client(url).messages.stream(model="tiny", max_tokens=30, messages=HI) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason


def check_a_conversation_with_a_tool(url):
    client = _client(url)
    message = client.messages.create(
        model="tiny", max_tokens=500, messages=HI, tools=[TOOL], tool_choice={"type": "any"}
    )
    assert message.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "It rains."}
        for block in message.content
        if block.type == "tool_use"
    ]
    messages = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert client.messages.create(model="tiny", max_tokens=50, messages=messages, tools=[TOOL]).content


def check_streamed_tool_use(url):
    with _client(url).messages.stream(
        model="tiny", max_tokens=500, messages=HI, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}
    ) as stream:
        final = stream.get_final_message()
    assert "city" in final.content[-1].input


def check_stop_sequence(url):
    client = _client(url)
    text = client.messages.create(model="tiny", max_tokens=60, messages=HI).content[0].text
    stop = text[8:11]
    message = client.messages.create(model="tiny", max_tokens=60, messages=HI, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def check_count_tokens(url):
    client = _client(url)
    counted = client.messages.count_tokens(model="tiny", messages=HI, tools=[TOOL]).input_tokens
    usage = client.messages.create(model="tiny", max_tokens=5, messages=HI, tools=[TOOL]).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


async def check_async_stream(url):
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="tiny", max_tokens=20, messages=HI) as stream,
    ):
        assert [event async for event in stream]


def check_an_error_is_the_clients_own_exception(url):
    try:
        _client(url).messages.create(model="nothing", max_tokens=5, messages=HI)
    except anthropic.NotFoundError as error:
        kind = error.body["error"]["type"]
    assert kind == "not_found_error"
