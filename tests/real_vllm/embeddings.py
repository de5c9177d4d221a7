"""Vectors of a real vLLM through a pool: those of the server itself, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.processes import Process, eventually, worker_rows
from tests.real_vllm.servers import MODEL, VllmServer

POOLING = ("--runner", "pooling", "--convert", "embed")
INPUTS: tuple[Any, ...] = (["hello world", "a b c"], [[5, 6, 7], [8]], "one", [11, 12])


def embeddings(vllm: Path, model: Path, directory: Path) -> dict[str, Any]:
    """vectors and counts are those of the server itself, texts and token ids alike, and refusals reach the client"""
    server = VllmServer(9, vllm, model, directory, POOLING)
    server.start()
    try:
        server.wait()
        with Process("up", "--port", "0", "--engine-url", server.url) as up:
            url = up.wait_ready().url
            eventually("the server's worker is ready", lambda: _states(url) == ["ready"])
            return _compared(server.url, url)
    finally:
        server.kill()


def _states(url: str) -> list[object]:
    return [row["state"] for row in worker_rows(url).values()]


def _compared(server: str, router: str) -> dict[str, Any]:
    direct, ours = (openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) for url in (server, router))
    vectors = 0
    for given in INPUTS:
        theirs, mine = (each.embeddings.create(model=MODEL, input=given) for each in (direct, ours))
        assert [row.embedding for row in mine.data] == [row.embedding for row in theirs.data]
        assert mine.usage.prompt_tokens == theirs.usage.prompt_tokens > 0
        vectors += len(mine.data)
    for more in ({"input": "x " * 50_000}, {"input": "x", "dimensions": 7}):
        said = []
        for client in (direct, ours):
            with pytest.raises(openai.BadRequestError) as refused:
                client.embeddings.create(model=MODEL, **more)
            said.append(refused.value.body)
        assert said[0] == said[1]
    return {"vectors": vectors}
