"""What a newcomer sees: one command, a pool that answers, and nothing left behind after Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.expectation import MODEL, expected_text
from tests.e2e.processes import Process, eventually, is_settled, pool_is_quiet, ready_workers, running_pool
from tests.frontend.media.samples import data_url, png

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def pool() -> Iterator[Process]:
    with running_pool(workers=2) as up:
        yield up


@pytest.fixture
def client(pool: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_openai_client_gets_the_engines_answer_streaming_or_not(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a radix tree? 🌳"}]
    prompt = MODEL.encode("<|im_start|>user\nWhat is a radix tree? 🌳<|im_end|>\n<|im_start|>assistant\n")
    right = expected_text(prompt, 40)

    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=40)
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    assert whole.choices[0].message.content == right
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == right
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40


def test_a_chat_without_a_limit_ends_by_itself_and_its_text_is_the_tokens_that_it_was(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me everything."}]

    answer = client.chat.completions.create(model="tiny", messages=messages)

    content = answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert content is not None
    assert answer.usage is not None
    # The token that ended it is counted, and is no text.
    assert answer.usage.completion_tokens == len(MODEL.encode(content)) // 4 + 1
    assert 54 <= answer.usage.completion_tokens <= 1417


def test_the_log_probability_of_a_text_is_what_it_was_when_the_engine_wrote_it(client: openai.OpenAI) -> None:
    prompt = "Once upon a time there was"
    written = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, logprobs=1).choices[0]
    read = client.completions.create(model="tiny", prompt=prompt + written.text, max_tokens=0, logprobs=1, echo=True)

    assert read.choices[0].text == prompt + written.text
    assert read.usage is not None
    assert read.usage.completion_tokens == 0
    assert written.logprobs is not None
    assert read.choices[0].logprobs is not None
    assert written.logprobs.token_logprobs is not None
    assert read.choices[0].logprobs.token_logprobs is not None
    assert read.choices[0].logprobs.token_logprobs[0] is None
    assert read.choices[0].logprobs.token_logprobs[-8:] == written.logprobs.token_logprobs


def test_a_repeated_prompt_is_served_from_the_same_workers_cache(client: openai.OpenAI, pool: Process) -> None:
    tokens = list(range(1000, 1640))
    first = client.completions.with_raw_response.create(model="tiny", prompt=tokens, max_tokens=2)
    holder = first.headers["x-poolgrid-worker"]
    eventually("the router knows what is cached", lambda: is_settled(pool.url))
    second = client.completions.with_raw_response.create(model="tiny", prompt=tokens, max_tokens=2)

    assert second.headers["x-poolgrid-worker"] == holder
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 608  # 19 of 20 blocks of 32: one token must be computed


def test_every_decision_can_be_explained(client: openai.OpenAI, pool: Process) -> None:
    answer = client.completions.with_raw_response.create(model="tiny", prompt="explain me", max_tokens=1)
    request_id = answer.headers["x-request-id"]

    explained = httpx.get(f"{pool.url}/v1/decisions/{request_id}").json()
    listed = httpx.get(f"{pool.url}/v1/decisions?limit=1").json()["data"]

    assert explained["attempts"][0]["worker"] == answer.headers["x-poolgrid-worker"]
    assert len(explained["attempts"][0]["rows"]) == 2
    assert set(explained["attempts"][0]["rows"][0]["terms"]) >= {"again_ms", "next_ms"}
    assert listed[0]["request_id"] == request_id
    assert httpx.get(f"{pool.url}/v1/decisions/unheard-of").status_code == 404


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_worker(pool: Process, streaming: bool) -> None:
    body = {"model": "tiny", "prompt": "long", "max_tokens": 100_000, "ignore_eos": True, "stream": streaming}
    # The whole answer takes minutes; this client gives up long before.
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{pool.url}/v1/completions", json=body, timeout=0.5) as answer,
    ):
        next(answer.iter_raw())

    eventually("the worker is idle again", lambda: pool_is_quiet(pool.url))


def test_a_pool_of_all_roles_answers_and_ctrl_c_ends_everything_and_leaves_no_process() -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(png())}}
    question = {"type": "text", "text": "What is to be seen here? " * 60}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [image, question]}], "max_tokens": 8}
    with Process("up", "--port", "0", "--prefill", "1", "--decode", "1", "--encode", "1", "--speedup", "50") as up:
        up.wait_ready()
        answer = httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 8
        legs = httpx.get(f"{up.url}/v1/decisions/{answer.headers['x-request-id']}").json()["attempts"]
        assert [leg["worker"] for leg in legs] == ["encode-0", "prefill-0", "decode-0"]
        below = up.descendants()
        assert len(below) == 5

        up.signal(signal.SIGINT)

        assert up.wait() == 0
        assert not [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_parts_end_when_up_itself_is_killed() -> None:
    with Process("up", "--port", "0", "--workers", "1") as up:
        up.wait_ready()
        below = up.descendants()

        up.signal(signal.SIGKILL)

        _, alive = psutil.wait_procs(below, timeout=120)
        assert not alive


def test_a_further_worker_joins_where_up_says(pool: Process) -> None:
    joins = ("--worker-id", "worker-9", "--served-model-name", "tiny", "--consolidator", pool.word("ingest"))
    with Process("worker", *joins) as worker:
        worker.wait_ready()
        eventually("it joins", lambda: ready_workers(pool.url) == ["worker-0", "worker-1", "worker-9"])
    eventually("it leaves", lambda: ready_workers(pool.url) == ["worker-0", "worker-1"])


def test_a_port_that_is_taken_is_a_clear_error(pool: Process) -> None:
    port = pool.url.rpartition(":")[2]
    with Process("router", "--port", port) as router:
        status = router.wait()
        _, errors = router.stop()

    assert status == 1
    assert f"--port: 127.0.0.1:{port} cannot be used" in errors
    assert ready_workers(pool.url) == ["worker-0", "worker-1"]
