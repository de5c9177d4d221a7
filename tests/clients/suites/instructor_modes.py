"""instructor: its modes for these APIs in which a model that writes at random under a guide can give a good answer.

Left out are those that ask for an object in words (``JSON``, ``MD_JSON``, ``JSON_O1``, ``ANTHROPIC_JSON``), that hope
for calls by themselves (``PARALLEL_TOOLS``, ``ANTHROPIC_PARALLEL_TOOLS``, ``ANTHROPIC_REASONING_TOOLS``), that need
tools of a provider's own (``RESPONSES_TOOLS_WITH_INBUILT_TOOLS``), ``functions``, which tools replaced (``FUNCTIONS``),
and those of other providers.
"""

from __future__ import annotations

import anthropic
import instructor
import openai
from pydantic import BaseModel

PACKAGE = "instructor"
MESSAGES = [{"role": "user", "content": "Where is the next station?"}]


class Station(BaseModel):
    name: str
    platforms: list[int]


def _openai(url, mode):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
    return instructor.from_openai(client, mode=mode)


def _gets_a_station(client, **more):
    station = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_model=Station, max_retries=2, **more
    )
    assert isinstance(station, Station)


def check_tools(url):
    _gets_a_station(_openai(url, instructor.Mode.TOOLS))


def check_tools_strict(url):
    _gets_a_station(_openai(url, instructor.Mode.TOOLS_STRICT))


def check_json_schema(url):
    _gets_a_station(_openai(url, instructor.Mode.JSON_SCHEMA))


def check_responses_tools(url):
    _gets_a_station(_openai(url, instructor.Mode.RESPONSES_TOOLS))


def check_streamed_partial(url):
    client = _openai(url, instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(model="tiny", messages=MESSAGES, response_model=Station))
    assert parts[-1].name is not None


def check_anthropic_tools(url):
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=url, api_key="none"), mode=instructor.Mode.ANTHROPIC_TOOLS
    )
    _gets_a_station(client, max_tokens=512)
