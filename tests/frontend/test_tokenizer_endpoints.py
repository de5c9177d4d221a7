"""What ``/tokenize`` says is what a worker gets."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from poolgrid.kernel.requests.inference import ServedModel
from poolgrid.kernel.wire.hashing import unpack_tokens
from poolgrid.server.frontend import tokenizer_endpoints
from poolgrid.server.frontend.tokenization import TokenizationPool
from tests.frontend.fake_backend import TINY, FakeBackend
from tests.frontend.server import application, in_process

HI = [{"role": "user", "content": "hällo 😀"}]


def post(
    path: str,
    *,
    raw: bytes | None = None,
    headers: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
    **body: Any,
) -> httpx.Response:
    async def go() -> httpx.Response:
        async with in_process(application(FakeBackend(), max_body_bytes=10_000, **(settings or {}))) as client:
            content = raw if raw is not None else json.dumps({"model": "tiny", **body}).encode()
            return await client.post(
                path, content=content, headers={"content-type": "application/json", **(headers or {})}
            )

    return asyncio.run(go())


def test_a_prompt_becomes_its_token_ids_and_back() -> None:
    answer = post("/tokenize", prompt="hällo 😀", return_token_strs=True).json()
    assert answer["tokens"] == list(unpack_tokens(TINY.encode("hällo 😀", add_special_tokens=True)))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 262_144
    assert post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "hällo 😀"}


@pytest.mark.parametrize("strings", [True, False, None])
@pytest.mark.parametrize("text", ["", 'hällo 😀 "x" ' * 5])
def test_a_long_answer_is_encoded_in_steps_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, strings: bool | None, text: str
) -> None:
    monkeypatch.setattr(tokenizer_endpoints, "TOKENS_PER_STEP", 7)
    threads: set[str] = set()
    encode = tokenizer_endpoints._inside

    def inside(values: Sequence[int | str]) -> bytes:
        assert len(values) <= 7
        threads.add(threading.current_thread().name)
        return encode(values)

    monkeypatch.setattr(tokenizer_endpoints, "_inside", inside)
    monkeypatch.setattr(TokenizationPool.__init__, "__defaults__", (256, 0))  # nothing is short
    answer = post("/tokenize", prompt=text, return_token_strs=strings)
    found = msgspec.json.decode(answer.content, type=tokenizer_endpoints.Tokenized)
    assert found.tokens == list(unpack_tokens(TINY.encode(text, add_special_tokens=True)))
    assert found.count == len(found.tokens)
    expected = [TINY.token_bytes(token).decode("utf-8", "replace") for token in found.tokens] if strings else None
    assert found.token_strs == expected
    assert all(name.startswith("tokenizer") for name in threads)


def test_a_chat_becomes_what_the_worker_gets() -> None:
    async def go() -> tuple[list[int], list[int]]:
        backend = FakeBackend()
        async with in_process(application(backend)) as client:
            body = {"model": "tiny", "messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}
            await client.post("/v1/chat/completions", json=body)
            answer = await client.post("/tokenize", json=body)
        return list(unpack_tokens(backend.requests[0].token_ids)), answer.json()["tokens"]

    dispatched, told = asyncio.run(go())
    assert told == dispatched
    assert "<|im_start|>user" in post("/detokenize", tokens=told).json()["prompt"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/detokenize", {"tokens": [999_999]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
        ("/tokenize", {"prompt": "a" * 20_000}, 413, None),
    ],
)
def test_what_does_not_fit_is_refused_by_name(path: str, body: dict[str, Any], status: int, param: str | None) -> None:
    answer = post(path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_bodies_are_read_as_those_of_the_inference_endpoints() -> None:
    raw = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
    assert post("/tokenize", raw=gzip.compress(raw), headers={"content-encoding": "gzip"}).status_code == 200
    assert post("/tokenize", raw=raw, headers={"content-type": "text/plain"}).status_code == 415
    assert post("/tokenize", raw=b"{").json()["error"]["code"] == "invalid_json"


def test_the_only_model_need_not_be_named() -> None:
    assert post("/tokenize", model=None, prompt="a").json() == post("/tokenize", prompt="a").json()
    assert post("/tokenize", model=None, messages=HI).json() == post("/tokenize", messages=HI).json()
    assert post("/detokenize", raw=b'{"tokens": [300]}').json() == post("/detokenize", tokens=[300]).json()

    async def among(*names: str) -> httpx.Response:
        served = [ServedModel(name, 0, 100) for name in names]
        async with in_process(application(FakeBackend(served=served))) as client:
            return await client.post("/tokenize", json={"prompt": "a"})

    for names in ((), ("tiny", "other")):
        answer = asyncio.run(among(*names))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert str(len(names)) in answer.json()["error"]["message"]
