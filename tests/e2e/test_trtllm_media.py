"""A picture that a TensorRT-LLM worker has cached is found by its router: real processes, the contract fake as 1.3."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Process, eventually, metric, worker_rows
from tests.fakes import FAKES_PATH
from tests.frontend.media.samples import data_url
from tests.trtllm.seeing import make_model, picture

pytestmark = pytest.mark.e2e

BLOCK = 8
LENGTHY = "Look closely at every part of it, and say what you see. "


class Pool:
    """A router that keeps tenants apart, and one worker."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, name: str, colour: str, tenant: str = "a") -> dict[str, Any]:
        content = [
            {"type": "image_url", "image_url": {"url": data_url(picture(colour))}},
            {"type": "text", "text": LENGTHY},
        ]
        body = {"model": "eyes", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        headers = {"x-request-id": name, "x-tenant": tenant}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    def decision(self, name: str) -> dict[str, Any]:
        found = httpx.get(f"{self.url}/v1/decisions/{name}").json()
        attempt: dict[str, Any] = found["attempts"][0]
        return attempt


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    model: Path = make_model(tmp_path_factory.mktemp("models") / "eyes")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("TRTLLM_FAKE", json.dumps({"version": "1.3", "vocabulary_size": 4096}))
        isolated = ("--isolate-tenants", "--tenant-header", "x-tenant")
        router = stack.enter_context(
            Process("router", "--port", "0", "--model-path", str(model), *isolated)
        ).wait_ready()
        stack.enter_context(
            Process(
                *("worker", "--engine", "trtllm", "--worker-id", "w", "--model-path", str(model)),
                *("--served-model-name", "eyes", "--modality", "multimodal", "--kv-block-size", str(BLOCK)),
                *("--max-batch-size", "64", "--consolidator", router.word("ingest")),
            )
        ).wait_ready()
        eventually(
            "the worker is reachable", lambda: [row["state"] for row in worker_rows(router.url).values()] == ["ready"]
        )
        yield Pool(router.url)


def test_the_router_finds_a_picture_again_but_no_other_and_none_of_another_tenant(pool: Pool) -> None:
    usage = pool.ask("first", "red")
    blocks = usage["prompt_tokens"] // BLOCK
    assert pool.decision("first")["overlap_blocks"] == 0
    eventually("the router knows the blocks", lambda: worker_rows(pool.url)["w"]["cached_blocks"] >= blocks)

    again, other, foreign = pool.ask("again", "red"), pool.ask("other", "blue"), pool.ask("foreign", "red", "b")

    assert pool.decision("again")["overlap_blocks"] == blocks
    assert again["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
    head = pool.decision("other")["overlap_blocks"]
    assert head < blocks
    assert other["prompt_tokens_details"]["cached_tokens"] == head * BLOCK
    assert pool.decision("foreign")["overlap_blocks"] == 0
    assert foreign["prompt_tokens_details"]["cached_tokens"] == 0

    seen = {"items": 1, "compared_blocks": blocks}
    assert [pool.decision(name)["media"] for name in ("first", "again", "other", "foreign")] == [seen] * 4
    assert metric(pool.url, "poolgrid_frontend_media_uncounted_total", kind="image") == 0
