"""pydantic-ai: agents with outputs by schema, by tool and by text, on OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

PACKAGE = "pydantic-ai-slim"
LIMITS = UsageLimits(request_limit=60)


class Report(BaseModel):
    city: str
    degrees: int


def _chat(url):
    return OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def _responses(url):
    return OpenAIResponsesModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


def _anthropic(url):
    return AnthropicModel("tiny", provider=AnthropicProvider(base_url=url, api_key="none"))


def _reporter(model, output):
    agent = Agent(model, output_type=output, retries=5)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        return "It rains."

    return agent


async def _reports(model, output):
    result = await _reporter(model, output).run("How is the weather?", usage_limits=LIMITS)
    assert isinstance(result.output, Report), result.output


async def check_native_output_beside_tools_on_chat(url):
    await _reports(_chat(url), NativeOutput(Report))


async def check_native_output_beside_tools_on_responses(url):
    await _reports(_responses(url), NativeOutput(Report))


async def check_tool_output_beside_tools_on_chat(url):
    await _reports(_chat(url), ToolOutput(Report))


async def check_tool_output_beside_tools_on_responses(url):
    await _reports(_responses(url), ToolOutput(Report))


async def check_text_on_chat(url):
    assert isinstance((await Agent(_chat(url)).run("Hello")).output, str)


async def check_streamed_native_output(url):
    agent = Agent(_chat(url), output_type=NativeOutput(Report))
    async with agent.run_stream("How is the weather?") as stream:
        assert isinstance(await stream.get_output(), Report)


async def check_tool_output_on_anthropics_api(url):
    await _reports(_anthropic(url), ToolOutput(Report))


async def check_text_on_anthropics_api(url):
    assert isinstance((await Agent(_anthropic(url)).run("Hello")).output, str)
