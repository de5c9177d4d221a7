"""Tests."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import httpx
import pytest

from poolgrid.kernel.requests.inference import EVERYBODY, InferenceRequest, ServedModel
from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.server.frontend.chat_template import ChatTemplate
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.prompt_encoder import BatchEncoder
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.prompts import SAMPLE_CHARS_PER_TOKEN, look_up, tokenize
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.tokenization import TokenizationPool
from tests.frontend.fake_backend import TINY, FakeBackend
from tests.frontend.server import application, in_process


def test_short_work_is_done_here_and_long_work_in_a_thread() -> None:
    async def go() -> tuple[int, int]:
        pool = TokenizationPool(threads=1, queue_limit=1, inline_bytes=10)
        try:
            return await pool.run(10, threading.get_ident), await pool.run(11, threading.get_ident)
        finally:
            pool.close()

    here, there = asyncio.run(go())
    assert here == threading.get_ident() != there


async def test_what_does_not_fit_the_queue_is_refused_and_what_was_given_up_leaves_it() -> None:
    pool = TokenizationPool(threads=1, queue_limit=1, inline_bytes=0)
    begun, gate = threading.Event(), threading.Event()

    def hold() -> int:
        begun.set()
        assert gate.wait(5)
        return 1

    running = asyncio.ensure_future(pool.run(1, hold))
    queued = asyncio.ensure_future(pool.run(1, lambda: 2))
    await asyncio.to_thread(begun.wait, 5)
    assert pool.pending == 2
    with pytest.raises(RequestError) as refused:
        await pool.run(1, lambda: 3)
    assert (refused.value.status, refused.value.code) == (429, "tokenizer_busy")
    assert (b"retry-after", b"1") in refused.value.headers

    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    assert pool.pending == 1
    gate.set()
    assert await running == 1
    assert await pool.run(1, lambda: 4) == 4
    pool.close()


async def test_a_request_is_answered_while_a_long_prompt_is_being_tokenized() -> None:
    begun, gate = threading.Event(), threading.Event()

    class Slow:
        """The tiny model's tokenizer, which takes as long over long texts as the test wants."""

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
            if len(texts[0]) > 5000:
                begun.set()
                assert gate.wait(5)
            return TINY.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

        def get_added_tokens_decoder(self) -> object:
            return TINY.tokenizer.get_added_tokens_decoder()

    slow = PromptModel("tiny", Slow(), 4096, 262_144, byte_table=TINY.byte_table)  # type: ignore[arg-type]

    async with in_process(application(FakeBackend(), models={"tiny": slow})) as client:

        async def complete(prompt: str) -> httpx.Response:
            return await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})

        long = asyncio.ensure_future(complete("word " * 2000))
        await asyncio.to_thread(begun.wait, 5)
        short = await complete("hi")
        was_done = long.done()
        gate.set()
        assert (short.status_code, was_done, (await long).status_code) == (200, False, 200)


class Watched:
    """An encoder that notes in which thread it was asked for how much."""

    def __init__(self, encoder: BatchEncoder) -> None:
        self._encoder = encoder
        self._asked: list[tuple[bool, int]] = []
        self._home = threading.get_ident()

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        self._asked.append((threading.get_ident() == self._home, sum(map(len, texts))))
        return self._encoder.encode(texts, add_special_tokens)

    def prompts(self) -> list[tuple[bool, int]]:
        """Return of each prompt whether it was this thread, and the characters; the fake worker's answers are short."""
        return [asked for asked in self._asked if asked[1] > 400]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """What the tiny model's tokenizer is asked, with nothing known."""
    assert TINY.encoder is not None
    TINY.encoder.clear()
    watched = Watched(TINY.encoder._backend.encoder)
    monkeypatch.setattr(TINY.encoder._backend, "encoder", watched)
    return watched


def messages(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


async def test_a_later_turn_of_a_long_conversation_is_tokenized_where_it_arrives(seen: Watched) -> None:
    """Its body is as long as the first turn's, for which a thread was needed; its new text is not."""
    long, answer, short = "many words " * 8_000, "fine " * 80, "and then? " * 40

    backend = FakeBackend()
    async with in_process(application(backend)) as client:
        for said in ([long], [long, answer, short], [long, answer, short, answer, long[5:]]):
            body = {"model": "tiny", "messages": messages(*said)}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompts = [request.token_ids for request in backend.requests]
    assert TINY.template is not None
    for prompt, said in zip(prompts, ([long], [long, answer, short]), strict=False):
        text = TINY.template.render(messages(*said))
        assert prompt == pack_tokens(TINY.tokenizer.encode(text, add_special_tokens=False).ids)
    cold, later, cold_again = seen.prompts()
    assert cold[0] is cold_again[0] is False
    assert min(cold[1], cold_again[1]) >= len(long) - 5
    assert later[0] is True
    assert later[1] < len(answer) + len(short) + 200


async def test_a_rendering_that_takes_long_is_begun_anew_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, seen: Watched
) -> None:
    monkeypatch.setattr("poolgrid.server.frontend.inference_endpoint.LOOK_UP_RENDERING_MS", 0.0)
    slow = "{% for turn in range(1000) %}{% endfor %}{{ messages[0]['content'] }}"
    model = replace(TINY, template=ChatTemplate(slow))

    async with in_process(application(FakeBackend(), models={"tiny": model})) as client:
        body = {"model": "tiny", "messages": messages("hi " * 400)}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert [here for here, _ in seen.prompts()] == [False]


async def test_a_rendering_that_takes_too_long_even_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, seen: Watched
) -> None:
    monkeypatch.setattr("poolgrid.server.frontend.prompts.TIME_LIMIT_MS", 20.0)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    endless = "{% if messages[0]['content'] == 'hi' %}" + loops + "{% endif %}"
    model = replace(TINY, template=ChatTemplate(endless))

    app = application(FakeBackend(), models={"tiny": model})
    async with in_process(app) as client:
        answer = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages("hi")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "chat_template_error")
    assert seen.prompts() == []


def test_work_that_is_due_is_done_however_much_waits() -> None:
    async def go() -> list[int]:
        pool = TokenizationPool(threads=1, queue_limit=0, inline_bytes=0)
        gate = threading.Event()
        try:
            first = asyncio.ensure_future(pool.run_in_thread(lambda: int(gate.wait(30))))
            await asyncio.sleep(0)
            with pytest.raises(RequestError):
                await pool.run_in_thread(lambda: 2)
            due = asyncio.ensure_future(pool.run_in_thread(lambda: 3, is_due=True))
            await asyncio.sleep(0)
            gate.set()
            return [await first, await due]
        finally:
            gate.set()
            pool.close()

    assert asyncio.run(go()) == [1, 3]


async def test_an_array_that_is_too_long_for_the_model_is_refused_before_its_tokens_are_looked_at() -> None:
    backend = FakeBackend(served=[ServedModel("tiny", 0, 100)])
    async with in_process(application(backend)) as client:
        # Its last token is none of the model's, and no text reaches it.
        response = await client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 100 + [9999]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "some words of a text " * 10_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "some words of a text " * 10_000}]}),
    ],
)
async def test_a_text_of_hundreds_of_contexts_is_refused_by_its_beginning(path: str, body: dict[str, object]) -> None:
    backend = FakeBackend(served=[ServedModel("tiny", 0, 100)])
    async with in_process(application(backend)) as client:
        error = (await client.post(path, json={"model": "tiny", **body})).json()["error"]
    found = re.search(r"has more than (\d+) tokens", error["message"])
    assert error["code"] == "context_length_exceeded"
    assert found is not None
    assert 200 < int(found[1]) <= SAMPLE_CHARS_PER_TOKEN * 100, "all of it has 50,000"


SANDBOX = "poolgrid.server.frontend.chat_template"


class Backend:
    def models(self) -> list[ServedModel]:
        return [ServedModel("tiny", 0, 4096)]

    async def submit(self, request: InferenceRequest) -> Any:
        raise AssertionError("nothing is sent")


def job_of(messages: list[dict[str, Any]]) -> PreparedRequest:
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    job = Preparation(Backend(), {"tiny": TINY}, FrontendSettings()).chat(body)
    job.domain = EVERYBODY
    return job


def conversation(messages: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": f"{at} {'words ' * 100}"} for at in range(messages)]


def calls_of_look_up(messages: list[dict[str, Any]]) -> list[str]:
    """Return the front end's functions, but what the template calls, for a conversation that continues."""
    tokenize(job_of(messages[:-2]))
    job = job_of(messages)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if event == "call" and name.startswith("poolgrid.server.frontend") and name != SANDBOX:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        left = look_up(job, 60_000.0)
    finally:
        sys.setprofile(None)
    assert left is not None
    assert left < 2000, "only what is new is left for the tokenizer"
    return called


def test_a_later_turn_takes_as_many_calls_however_many_messages_came_before() -> None:
    assert calls_of_look_up(conversation(12)) == calls_of_look_up(conversation(52))


def test_a_message_of_words_alone_is_shown_to_its_template_as_one_with_an_empty_list_of_calls_is() -> None:
    plain = conversation(4)
    further = [{**message, "tool_calls": []} for message in plain]

    [one], [other] = tokenize(job_of(plain)), tokenize(job_of(further))
    assert (one.token_ids, one.text, one.end) == (other.token_ids, other.text, other.end)
