from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from frontend.errors import RequestError
from frontend.prompt_model import PromptModel
from frontend.request_ids import RequestIds
from frontend.tokenization import TokenizationPool
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


def test_what_does_not_fit_the_queue_is_refused_and_what_was_given_up_leaves_it() -> None:
    async def go() -> None:
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

    asyncio.run(go())


def test_a_request_is_answered_while_a_long_prompt_is_being_tokenized() -> None:
    begun, gate = threading.Event(), threading.Event()

    class Slow:
        """The tiny model's tokenizer, which takes as long over long texts as the test wants."""

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
            if len(texts[0]) > 5000:
                begun.set()
                assert gate.wait(5)
            return TINY.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    slow = PromptModel("tiny", Slow(), 4096, 262_144, byte_table=TINY.byte_table)  # type: ignore[arg-type]

    async def go() -> tuple[int, bool, int]:
        async with in_process(application(FakeBackend(), models={"tiny": slow})) as client:

            async def complete(prompt: str) -> httpx.Response:
                return await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})

            long = asyncio.ensure_future(complete("word " * 2000))
            await asyncio.to_thread(begun.wait, 5)
            short = await complete("hi")
            was_done = long.done()
            gate.set()
            return short.status_code, was_done, (await long).status_code

    assert asyncio.run(go()) == (200, False, 200)


def test_request_ids_are_unique_among_those_in_flight() -> None:
    ids = RequestIds("p-")
    assert ids.wanted(None) == "p-1"
    assert ids.wanted(b"mine") == "mine"
    assert ids.wanted(b"x" * 129) == "p-2"
    assert ids.wanted(b"new\r\nline") == "p-3"
    assert ids.claim("mine", 1) == ["mine"]
    assert ids.claim("mine", 2) == ["mine-0", "mine-1"]
    assert ids.claim("mine-1", 1) == ["mine-1.4"]
    ids.release(["mine"])
    assert ids.claim("mine", 1) == ["mine"]
    assert len(ids) == 4
