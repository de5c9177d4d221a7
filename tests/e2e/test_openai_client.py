"""The official client's structured output and forced tool calls, through `poolgrid up`, also when a worker dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionToolParam
from pydantic import BaseModel, Field

from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.kernel.wire.requests import Generate, Sampling
from poolgrid.plugins.simulated.core.guided_tokens import GuidedTokens
from poolgrid.plugins.simulated.core.next_token import Vocabulary
from poolgrid.plugins.simulated.guides import LazyGuides
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import Process, eventually, is_settled, running_pool, worker_rows
from tests.frontend.fake_backend import TINY
from tests.installed import needs, needs_parsers

pytestmark = pytest.mark.e2e

QUESTION: Any = [{"role": "user", "content": "Where is the next train station?"}]
MAX_TOKENS = 512


class Kind(Enum):
    TRAIN = "train"
    TRAM = "tram"


class Stop(BaseModel):
    name: str
    kind: Kind
    platforms: list[int]


class Journey(BaseModel):
    reason: str
    stops: list[Stop] = Field(min_length=1)
    kilometres: float
    price: float | None


WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: ChatCompletionToolParam = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def pool() -> Iterator[Process]:
    with running_pool("--prefill", "1", "--decode", "1", workers=1) as up:
        yield up


@pytest.fixture(scope="module")
def client(pool: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_parse_returns_an_object_of_the_callers_own_class(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.parse(
            model="tiny", messages=QUESTION, response_format=Journey, seed=seed, max_tokens=MAX_TOKENS
        )
        for seed in (1, 2, 3, 1)
    ]

    parsed = [answer.choices[0].message.parsed for answer in answers]
    assert all(isinstance(journey, Journey) for journey in parsed)
    assert parsed[0] == parsed[3]
    assert parsed[0] != parsed[1], "the seed decides"
    assert [answer.choices[0].finish_reason for answer in answers] == ["stop"] * 4


@needs_parsers
def test_a_model_that_may_call_calls_or_answers_with_an_object_of_the_callers_own_class(client: openai.OpenAI) -> None:
    strict: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    called = set()
    for seed in range(10):
        answer = client.chat.completions.parse(
            model="tiny",
            messages=QUESTION,
            tools=[strict],
            response_format=Journey,
            seed=seed,
            max_tokens=MAX_TOKENS,
        )
        choice = answer.choices[0]
        called.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            calls = choice.message.tool_calls or []
            assert all(set(call.function.parsed_arguments) == {"city", "unit"} for call in calls)  # type: ignore[call-overload]
        else:
            assert isinstance(choice.message.parsed, Journey)
    assert called == {"tool_calls", "stop"}


@needs("/v1/messages")
@needs_parsers
def test_anthropics_client_has_a_conversation_with_a_tool(pool: Process) -> None:
    tool: Any = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    with anthropic.Anthropic(base_url=pool.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(
            model="tiny", max_tokens=MAX_TOKENS, messages=QUESTION, tools=[tool], tool_choice={"type": "any"}
        ) as stream:
            first = stream.get_final_message()
        assert first.stop_reason == "tool_use"
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
            for block in first.content
            if block.type == "tool_use"
        ]
        messages: Any = [
            *QUESTION,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        eventually("the router knows what is cached", lambda: is_settled(pool.url))
        counted = client.messages.count_tokens(model="tiny", messages=messages, tools=[tool]).input_tokens
        second = client.messages.create(model="tiny", max_tokens=8, messages=messages, tools=[tool])
    assert second.stop_reason == "max_tokens"
    assert counted == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)
    assert second.usage.cache_read_input_tokens, "the second turn finds the first in a cache"


@needs("/v1/responses")
def test_a_conversation_goes_on_from_a_response_and_its_blocks_are_found_again(
    client: openai.OpenAI, pool: Process
) -> None:
    first = client.responses.create(model="tiny", input="Where to? " * 20, max_output_tokens=40)
    eventually("the router knows what is cached", lambda: is_settled(pool.url))
    second = client.responses.create(
        model="tiny", input="And then?", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0


@needs_parsers
def test_a_required_tool_call_is_made_with_arguments_that_fit_the_tool(client: openai.OpenAI) -> None:
    names = set()
    for seed in range(6):
        answer = client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            tools=[WEATHER, TIME],
            tool_choice="required",
            seed=seed,
            max_tokens=MAX_TOKENS,
        )
        choice = answer.choices[0]
        assert choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            names.add(call.function.name)
            if call.function.name == "get_weather":
                assert set(arguments) == {"city", "unit"}
                assert arguments["unit"] in ("C", "F")
    assert names == {"get_weather", "get_time"}


def test_a_guided_answer_goes_on_unbroken_when_its_worker_is_killed() -> None:
    prompt = (5, 6, 7)
    sampling = Sampling(400, guided_regex="([a-z]+ ){80}end")
    vocabulary = Vocabulary(TINY.vocab_size, 3, 2)
    right = GuidedTokens(
        vocabulary,
        pack_tokens(prompt),
        Generate("r", pack_tokens(prompt), sampling),
        LazyGuides(TINY_MODEL_PATH, vocabulary),
    )
    right.generate_to(400)
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 400, "guided_regex": sampling.guided_regex, "stream": True
    }  # fmt: skip
    text = ""
    killed = ""
    # At this speed a token takes a few milliseconds, so that the answer is under way when its worker dies.
    with (
        running_pool(workers=2, speedup=1.0) as up,
        httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=60) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if not killed and len(text) > 60:
                    killed = next(name for name, row in worker_rows(up.url).items() if row["active_requests"])
                    up.child("worker", killed).kill()

    assert killed
    assert text == TINY.tokenizer.decode(list(unpack_tokens(bytes(right.output))))
    assert text.endswith("end")
