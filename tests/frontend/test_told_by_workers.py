"""Parsers, a template and a bound of media that workers were given: routers use them, unless they have their own."""

from __future__ import annotations

import base64
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.kernel.requests.inference import ServedModel
from poolgrid.kernel.wire.card import ChatSpec, MediaSpec
from tests.frontend.fake_backend import TINY, FakeBackend, speak
from tests.frontend.media.samples import png
from tests.frontend.server import application, in_process
from tests.installed import needs_parsers

HI = [{"role": "user", "content": "hi"}]
SHOUTING = "{{ eos_token }}{% for message in messages %}{{ message.content | upper }}!{% endfor %}"
THOUGHT = "<think>Hmm.</think>Yes."
SERVED = ServedModel("tiny", 1_700_000_000, 262_144)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def told(text: str = THOUGHT, media: MediaSpec = MediaSpec(), **chat: str) -> FakeBackend:  # noqa: B008
    """Return a backend whose workers were given these, and say ``text``."""
    return FakeBackend(lambda _: speak(text), served=[replace(SERVED, chat=ChatSpec(**chat), media=media)])


async def chat(backend: FakeBackend, settings: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
    async with in_process(application(backend, **(settings or {}))) as client:
        return await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, **body})


async def message(backend: FakeBackend, settings: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    answer = await chat(backend, settings, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]["message"]
    return found


@needs_parsers
@pytest.mark.anyio
async def test_parsers_of_the_cards_read_the_answers_of_that_model() -> None:
    found = await message(told(reasoning_parser="qwen3"))
    assert (found["reasoning_content"], found["content"]) == ("Hmm.", "Yes.")

    (call,) = (await message(told("[f(x=1)]", tool_call_parser="pythonic"), tools=[TOOL]))["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("f", '{"x": 1}')


TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}[A]CLOSED"
    "{% elif m.role == 'tool' %}[O]{{ m.content }}[/O]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ONE_TURN = [{"role": "user", "content": "Rome?"}]
AFTER_A_TOOL = [
    *ONE_TURN,
    {"role": "assistant", "content": "Wait."},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]


@needs_parsers
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("closed", "messages", "reasons"),
    [("", ONE_TURN, True), ("", AFTER_A_TOOL, False), ("</think>", ONE_TURN, False), ("</think>", AFTER_A_TOOL, False)],
)
async def test_an_answer_begins_in_reasoning_only_at_the_beginning_of_a_turn(
    closed: str, messages: list[dict[str, Any]], reasons: bool
) -> None:
    template = TURNS.replace("CLOSED", closed)
    found = await message(
        told("18 degrees.", reasoning_parser="deepseek_r1", chat_template=template), messages=messages
    )
    assert found.get("reasoning_content") == ("18 degrees." if reasons else None)
    assert found["content"] == ("" if reasons else "18 degrees.")


@pytest.mark.anyio
async def test_a_parser_of_the_routers_own_wins_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = await message(told(reasoning_parser="qwen3"), {"reasoning_parser": "none"})

    assert found["content"] == THOUGHT
    assert (
        "--reasoning-parser none of this server is used for model 'tiny'; its workers were given 'qwen3'" in caplog.text
    )


@needs_parsers
@pytest.mark.anyio
async def test_what_cards_say_changes_with_the_workers() -> None:
    backend = told(reasoning_parser="qwen3")
    async with in_process(application(backend)) as client:
        body = {"model": "tiny", "messages": HI}
        first = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        backend.served = [SERVED]
        second = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]

    assert (first["content"], second["content"]) == ("Yes.", THOUGHT)


@pytest.mark.anyio
async def test_a_template_of_the_cards_writes_the_prompts_everywhere() -> None:
    backend = told(chat_template=SHOUTING)
    written = TINY.encode("<|im_end|>HI!")
    await message(backend)
    async with in_process(application(backend)) as client:
        shown = (await client.post("/tokenize", json={"model": "tiny", "messages": HI})).json()
        counted = await client.post(
            "/v1/messages/count_tokens", json={"model": "tiny", "messages": HI, "max_tokens": 1}
        )

    assert backend.requests[0].token_ids == written
    assert len(shown["tokens"]) == counted.json()["input_tokens"] == len(written) // 4


@pytest.mark.anyio
async def test_a_template_of_the_routers_own_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own")
    backend = told(chat_template=SHOUTING)
    own = replace(TINY.with_template("own"))
    with caplog.at_level(logging.WARNING):
        async with in_process(application(backend, models={"tiny": own}, chat_template=file)) as client:
            await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HI})

    assert backend.requests[0].token_ids == TINY.encode("own")
    assert f"--chat-template {file} of this server is used" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("broken", [{"chat_template": "{% if %}"}, {"reasoning_parser": "of a later version"}])
async def test_what_this_server_cannot_use_is_reported_and_left_out(
    broken: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    found = await message(told(**broken))  # type: ignore[arg-type]

    assert found["content"] == THOUGHT
    assert "model 'tiny' that its workers were given" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize(("bytes_max", "status"), [(100, 413), (100_000, 200)])
async def test_a_medium_is_as_large_as_the_cards_allow(bytes_max: int, status: int) -> None:
    spec = MediaSpec(("image",), "<image>", None, 4, 0, bytes_max)
    picture = "data:image/png;base64," + base64.b64encode(png(width=300, height=300)).decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}]

    answer = await chat(told(media=spec), messages=[{"role": "user", "content": content}])

    assert answer.status_code == status, answer.text


def test_prompts_of_another_template_are_cut_at_its_own_delimiters() -> None:
    assert TINY.encoder is not None
    other = TINY.with_template("<|im_end|>{{ messages[0].content }}").encoder
    assert other is not None

    assert other.delimiters == ("<|im_end|>",)
    text = "<|im_end|>" + "word " * 400
    assert other.encode(text) == TINY.encode(text)
    assert TINY.encoder.delimiters != other.delimiters


@needs_parsers
@pytest.mark.anyio
async def test_the_parsers_that_a_template_shows_are_logged_with_its_marks(caplog: pytest.LogCaptureFixture) -> None:
    template = TURNS.replace("CLOSED", "</seed:think>") + "{# <seed:think> <seed:tool_call> #}"
    with caplog.at_level(logging.INFO):
        await message(told("Yes.", chat_template=template))

    assert (
        "model 'tiny': reasoning parser seed_oss (by '<seed:think>'), tool-call parser seed_oss (by '<seed:tool_call>')"
        in caplog.text
    )


@needs_parsers
@pytest.mark.anyio
@pytest.mark.parametrize("named", [True, False])
async def test_a_template_whose_calls_no_parser_knows_is_reported(
    named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    template = TURNS.replace("CLOSED", "") + "{% if messages[0].tool_calls %}@call{% endif %}"
    with caplog.at_level(logging.WARNING):
        await message(told("Yes.", chat_template=template), {"tool_call_parser": "none"} if named else {})

    report = (
        "model 'tiny': its chat template has tool_calls in a format that no parser shows: they stay content. "
        "--tool-call-parser names a parser, or none to keep it so"
    )
    assert (report in caplog.text) == (not named)
