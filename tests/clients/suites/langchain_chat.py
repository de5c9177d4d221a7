"""langchain-openai and langchain-anthropic chat models."""

from __future__ import annotations

from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

PACKAGE = "langchain-openai"


class Station(BaseModel):
    """A station."""

    name: str
    platforms: list[int]


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return "It rains."


def _model(url, **more):
    return ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0, **more)


def _claude(url, **more):
    return ChatAnthropic(model="tiny", base_url=url, api_key="none", timeout=60, max_retries=0, max_tokens=500, **more)


def check_invoke(url):
    assert _model(url).invoke("Hello").content


def check_stream(url):
    assert list(_model(url, max_tokens=20).stream("Hello"))


def check_bind_tools(url):
    assert _model(url).bind_tools([get_weather], tool_choice="required").invoke("Hello").tool_calls


def check_structured_output_by_schema(url):
    assert isinstance(_model(url).with_structured_output(Station, method="json_schema").invoke("Hello"), Station)


def check_structured_output_by_tool(url):
    assert isinstance(_model(url).with_structured_output(Station, method="function_calling").invoke("Hello"), Station)


def check_structured_output_beside_tools(url):
    strict = convert_to_openai_tool(get_weather, strict=True)
    model = _model(url).with_structured_output(Station, method="json_schema", include_raw=True, tools=[strict])
    for _ in range(4):
        found = model.invoke("Hello")
        assert found["raw"].tool_calls or isinstance(found["parsed"], Station), found


def check_responses_api(url):
    model = _model(url, use_responses_api=True)
    first = model.invoke("Hello")
    assert first.content
    again = model.invoke("And?", previous_response_id=first.response_metadata["id"])
    assert again.content


async def check_astream(url):
    assert [chunk async for chunk in _model(url, max_tokens=20).astream("Hello")]


def check_anthropic_invoke_and_tools(url):
    assert _claude(url).invoke("Hello").content
    assert _claude(url).bind_tools([get_weather], tool_choice="any").invoke("Hello").tool_calls


def check_anthropic_stream(url):
    assert list(_claude(url).stream("Hello"))


def check_context_overflow_is_seen(url):
    for model, question in ((_model(url, max_tokens=10_000_000), "Hello"), (_claude(url), "Hello " * 200_000)):
        try:
            model.invoke(question)
        except ContextOverflowError:
            continue
        raise AssertionError(f"{type(model).__name__} did not see it")
