"""OpenAI's agents: a loop of calls and answers, on both of its APIs."""

from __future__ import annotations

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

PACKAGE = "openai-agents"
MODEL = "tiny"
TURNS = 40
"""The simulated model calls in half of its turns, so a run of 40 calls would be one in 10^12."""

set_tracing_disabled(True)


class Report(BaseModel):
    city: str
    degrees: int


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return "It rains."


def _model(url, kind):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    return kind(model=MODEL, openai_client=client)


async def _run(url, kind, **more):
    agent = Agent(name="Reporter", instructions="Report.", model=_model(url, kind), **more)
    return await Runner.run(agent, "How is the weather?", max_turns=TURNS)


async def check_responses_with_tools_and_output_type(url):
    result = await _run(url, OpenAIResponsesModel, tools=[get_weather], output_type=Report)
    assert isinstance(result.final_output, Report)


async def check_chat_with_tools_and_output_type(url):
    result = await _run(url, OpenAIChatCompletionsModel, tools=[get_weather], output_type=Report)
    assert isinstance(result.final_output, Report)


async def check_a_tool_that_must_be_called_first(url):
    settings = ModelSettings(tool_choice="required")
    result = await _run(url, OpenAIResponsesModel, tools=[get_weather], output_type=Report, model_settings=settings)
    assert isinstance(result.final_output, Report)
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


async def check_plain_answer(url):
    assert isinstance((await _run(url, OpenAIResponsesModel)).final_output, str)


async def check_streamed_run(url):
    agent = Agent(name="Reporter", model=_model(url, OpenAIResponsesModel), tools=[get_weather], output_type=Report)
    result = Runner.run_streamed(agent, "How is the weather?", max_turns=TURNS)
    events = [event async for event in result.stream_events()]
    assert events
    assert isinstance(result.final_output, Report)


async def check_handoff(url):
    helper = Agent(name="Helper", model=_model(url, OpenAIChatCompletionsModel))
    agent = Agent(
        name="Front",
        model=_model(url, OpenAIChatCompletionsModel),
        handoffs=[helper],
        model_settings=ModelSettings(tool_choice="required"),
    )
    result = await Runner.run(agent, "Help me.", max_turns=TURNS)
    assert result.last_agent.name == "Helper"


async def check_a_conversation_by_previous_response_id(url):
    agent = Agent(name="Talker", model=_model(url, OpenAIResponsesModel))
    first = await Runner.run(agent, "Hello")
    second = await Runner.run(agent, "And?", previous_response_id=first.last_response_id)
    assert second.last_response_id != first.last_response_id
