"""`poolgrid up --engine-url` in front of four servers: what one of them does harms no request of the others'."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import PATIENT, WAIT_TIMEOUT_S, Process, eventually, ready_workers
from tests.fakes.engine_server.http import Reply
from tests.fakes.engine_server.threaded import ServerThread, servers_in_thread
from tests.fakes.engine_server.vllm import Options

pytestmark = pytest.mark.e2e

SERVERS = 4
TOKENS = 24
PROMPTS = [list(range(100 + 40 * number, 180 + 40 * number)) for number in range(16)]
"""More than one for each server, each unlike the others."""


class Front:
    """A pool in front of four servers, the first of which is about to do wrong."""

    def __init__(self, up: Process, running: ServerThread) -> None:
        self.up = up
        self.running = running
        self.bad = running.servers[0]
        self.workers = [each.url.removeprefix("http://").replace(":", "-") for each in running.servers]
        self.texts = self.answers()
        """What undisturbed servers answer."""

    def answers(self) -> list[str]:
        """Ask everything at once; every answer must be whole."""
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(self._ask, PROMPTS))

    def _ask(self, prompt: list[int]) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS}
        answer = httpx.post(f"{self.up.url}/v1/completions", json=body, timeout=WAIT_TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["usage"]["completion_tokens"] == TOKENS
        text: str = found["choices"][0]["text"]
        return text

    def raw_answers(self) -> list[str | None]:
        """Ask everything at once; ``None`` stands for an answer that is not what was asked for."""

        def ask(prompt: list[int]) -> str | None:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS}
            answer = httpx.post(f"{self.up.url}/v1/completions", json=body, timeout=WAIT_TIMEOUT_S)
            try:
                text: str = answer.json()["choices"][0]["text"]
            except (ValueError, KeyError):
                return None
            return text

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(ask, PROMPTS))

    def process(self, command: str) -> psutil.Process:
        (found,) = [each for each in self.up.descendants() if command in each.cmdline()]
        return found

    def until_whole(self) -> None:
        eventually("all four workers are there", lambda: sorted(ready_workers(self.up.url)) == sorted(self.workers))


@pytest.fixture(scope="module")
def pool() -> Iterator[Front]:
    """One for all: each test leaves it as it was."""
    with servers_in_thread(*(Options(block_size=16, step_s=0.01) for _ in range(SERVERS))) as running:
        fronts = [word for each in running.servers for word in ("--engine-url", each.url)]
        with Process("up", *fronts, "--port", "0", "--model-path", str(TINY_MODEL_PATH), *PATIENT) as up:
            yield Front(up.wait_ready(), running)
            status, errors = up.stop()
            assert status == 0, errors


def says(*events: bytes) -> Callable[[Reply], Awaitable[None]]:
    """Return what answers with these events, and with nothing after them."""

    async def answer(reply: Reply) -> None:
        await reply.begin()
        for each in events:
            await reply.event(each)
        await reply.end()

    return answer


HOSTILE = {
    "a token that is none": says(b'{"choices": [{"index": 0, "token_ids": [-1], "finish_reason": null}]}'),
    "no JSON": says(b"\xff\xfe{{{{"),
    "deep nesting": says(b"[" * 100_000),
    "a line of megabytes": says(b'{"choices": [{"index": 0, "text": "' + b"x" * 4_000_000 + b'"}]}'),
    "a number of tokens that overflows": says(
        b'{"choices": [{"index": 0, "token_ids": [], "finish_reason": null}], "usage": '
        b'{"prompt_tokens_details": {"cached_tokens": 1' + b"0" * 4000 + b"}}}"
    ),
}


def test_four_servers_have_two_processes_and_hostile_answers_of_one_reach_its_own_clients_only(pool: Front) -> None:
    assert len(pool.up.descendants()) == 2
    for answer in HOSTILE.values():
        pool.bad.faults.every = answer
        asked = pool.raw_answers()
        whole = [right for got, right in zip(asked, pool.texts, strict=True) if got == right]
        assert 0 < len(whole) < len(pool.texts)
        assert all(got == right or got is None for got, right in zip(asked, pool.texts, strict=True))
    pool.bad.faults.every = None
    pool.until_whole()
    assert pool.answers() == pool.texts


def test_a_server_that_dies_and_comes_back_with_another_model_is_that_models_and_no_other_changes(pool: Front) -> None:
    follower = pool.process("consolidator")
    pool.running.do(pool.bad.stop())
    assert pool.answers() == pool.texts
    eventually("the others are left", lambda: sorted(ready_workers(pool.up.url)) == sorted(pool.workers[1:]))
    pool.bad.options.model = "other"
    pool.running.do(pool.bad.start())
    for _ in range(3):
        assert pool.answers() == pool.texts

    def models() -> dict[str, str]:
        rows = httpx.get(f"{pool.up.url}/v1/workers", timeout=WAIT_TIMEOUT_S).json()["data"]
        return {row["worker_id"]: row["model"] for row in rows}

    expected = dict.fromkeys(pool.workers, "tiny") | {pool.workers[0]: "other"}
    eventually("it is another model's", lambda: models() == expected)
    assert pool.answers() == pool.texts
    pool.running.do(pool.bad.stop())
    pool.bad.options.model = "tiny"
    pool.running.do(pool.bad.start())
    pool.until_whole()
    assert pool.answers() == pool.texts
    assert pool.process("consolidator") == follower


def test_requests_that_have_begun_outlive_the_process_that_follows_all_servers(pool: Front) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as asking:
        begun = threading.Semaphore(0)

        def ask(prompt: list[int]) -> str:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 10 * TOKENS, "stream": True}
            text = ""
            with httpx.stream("POST", f"{pool.up.url}/v1/completions", json=body, timeout=WAIT_TIMEOUT_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        if not text:
                            begun.release()
                        text += json.loads(line[6:])["choices"][0]["text"]
            return text

        answers = [asking.submit(ask, prompt) for prompt in PROMPTS]
        for _ in PROMPTS:
            assert begun.acquire(timeout=WAIT_TIMEOUT_S)
        pool.process("consolidator").kill()
        interrupted = [each.result() for each in answers]
        pool.until_whole()
        assert interrupted == list(asking.map(ask, PROMPTS))


def test_requests_without_a_token_outlive_the_process_that_follows_all_servers(pool: Front) -> None:
    with ThreadPoolExecutor(1) as asking:
        answers = asking.submit(pool.answers)
        eventually("requests run", lambda: any(each.running for each in pool.running.servers))
        pool.process("consolidator").kill()
        assert answers.result() == pool.texts
        pool.until_whole()
