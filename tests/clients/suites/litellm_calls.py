"""litellm: its OpenAI-compatible and Anthropic providers."""

from __future__ import annotations

import litellm
from pydantic import BaseModel

PACKAGE = "litellm"
HI = [{"role": "user", "content": "Where is the next station?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Station(BaseModel):
    name: str
    platforms: list[int]


def _ask(url, **more):
    return litellm.completion(
        model="hosted_vllm/tiny", api_base=f"{url}/v1", api_key="none", messages=HI, timeout=60, **more
    )


def check_completion(url):
    assert _ask(url).choices[0].message.content


def check_stream(url):
    assert list(_ask(url, max_tokens=20, stream=True))


def check_tools(url):
    assert _ask(url, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls


def check_response_format(url):
    Station.model_validate_json(_ask(url, response_format=Station).choices[0].message.content)


def check_response_format_beside_tools(url):
    message = _ask(url, response_format=Station, tools=[TOOL]).choices[0].message
    if not message.tool_calls:
        Station.model_validate_json(message.content)


def check_anthropic_messages(url):
    answer = litellm.completion(
        model="anthropic/tiny", api_base=url, api_key="none", messages=HI, max_tokens=50, timeout=60
    )
    assert answer.choices[0].message.content


def check_responses(url):
    response = litellm.responses(model="openai/tiny", api_base=f"{url}/v1", api_key="none", input="Hello", timeout=60)
    assert response.status == "completed"


def check_context_overflow_is_seen(url):
    try:
        _ask(url, max_tokens=10_000_000)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("it was not seen")
