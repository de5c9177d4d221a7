"""Workers with TensorRT-LLM as real processes: router, prefill and decode on the contract fake.

``PYTHONPATH`` makes their ``import tensorrt_llm`` find the fake; ``TRTLLM_FAKE`` says how it behaves: as 1.3
here, whose second cache manager publishes the decode engine's events by itself, a stream for each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from poolgrid.kernel.wire.hashing import pack_tokens
from tests.e2e.expectation import PLAIN, expected_text
from tests.e2e.processes import Process, eventually, metric, worker_rows
from tests.fakes import FAKES_PATH
from tests.frontend.media.samples import data_url
from tests.trtllm.seeing import make_model, picture

pytestmark = pytest.mark.e2e

COMMON = ("worker", "--engine", "trtllm", "--model-path", "tiny", "--kv-block-size", "16", "--max-batch-size", "64")
RANKS = 4


@dataclass
class Pool:
    """A router, a prefill worker, and a decode worker with four ranks."""

    router: Process
    prefill: Process
    decode: Process

    @property
    def url(self) -> str:
        return self.router.url

    def complete(self, prompt: list[int], max_tokens: int, **more: object) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    streams = tmp_path_factory.mktemp("streams")
    published = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{streams}/events",
        "replay_endpoint": f"ipc://{streams}/replay",
    }
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("TRTLLM_FAKE", json.dumps({"version": "1.3", "vocabulary_size": 4096}))
        router = stack.enter_context(Process("router", "--port", "0", "--legs", "two")).wait_ready()
        ingest = ("--consolidator", router.word("ingest"))
        prefill = stack.enter_context(Process(*COMMON, *ingest, "--worker-id", "p", "--disaggregation-mode", "prefill"))
        decode = stack.enter_context(
            Process(
                *(*COMMON, *ingest, "--worker-id", "d", "--disaggregation-mode", "decode"),
                *("--enable-attention-dp", "--tensor-parallel-size", str(RANKS)),
                *("--override-engine-args", json.dumps({"kv_cache_config": {"kv_events_config": published}})),
            )
        )
        made = Pool(router, prefill.wait_ready(), decode.wait_ready())
        eventually("every rank is reachable", lambda: states(made.url) == ["ready"] * (RANKS + 1))
        yield made


def states(url: str) -> list[str]:
    return [row["state"] for row in httpx.get(f"{url}/v1/workers").json()["data"]]


def believed_and_held(pool: Pool, rank: int) -> tuple[str, str]:
    return (
        httpx.get(f"{pool.url}/v1/workers/d/blocks?dp_rank={rank}").text,
        httpx.get(f"{pool.decode.url}/blocks?dp_rank={rank}").text,
    )


def legs(pool: Pool) -> dict[str, float]:
    return {stage: metric(pool.url, "poolgrid_router_legs_total", stage=stage) for stage in ("prefill", "decode")}


def is_known(pool: Pool, rank: int) -> bool:
    return len(set(believed_and_held(pool, rank))) == 1


def test_disaggregated_answers_are_those_of_one_worker_token_for_token(pool: Pool) -> None:
    before = legs(pool)
    for at in range(2 * RANKS):
        prompt = [100 + (at * 131 + number) % 3000 for number in range(100 + 50 * at)]
        answer = pool.complete(prompt, 30)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected_text(pack_tokens(prompt), 30, vocabulary=PLAIN)
        assert answer.headers["x-poolgrid-worker"].partition("/")[0] == "d"

    assert {stage: count - before[stage] for stage, count in legs(pool).items()} == {
        "prefill": 2 * RANKS,
        "decode": 2 * RANKS,
    }
    for rank in range(RANKS):
        eventually(f"the router knows what rank {rank} holds", partial(is_known, pool, rank))
    assert any(believed_and_held(pool, rank)[0] for rank in range(1, RANKS)), "other ranks than the first were used"
    feed = httpx.get(f"{pool.decode.url}/health").json()["feed"]
    assert (feed["readers"]["events"], len(feed["ranks"])) == ("stream", RANKS)
    eventually(
        "the prefill worker keeps nothing", lambda: metric(pool.prefill.url, "poolgrid_worker_kept_transfers") == 0
    )
    assert metric(pool.prefill.url, "poolgrid_worker_kv_transfer_timeouts_total") == 0


def test_a_long_stream_frees_the_prefill_worker_long_before_it_ends(pool: Pool) -> None:
    body = {"model": "tiny", "prompt": [5 + at for at in range(200)], "max_tokens": 8000, "stream": True}
    with httpx.stream("POST", f"{pool.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        eventually("the prefill leg is over", lambda: metric(pool.prefill.url, "poolgrid_worker_kept_transfers") == 0)
    eventually("the decode worker is free", lambda: all(row["active_requests"] == 0 for row in rows(pool.url)))


def rows(url: str) -> list[dict[str, object]]:
    return list(worker_rows(url).values())


def test_short_prompts_have_two_legs_too_where_the_router_is_told_so(pool: Pool) -> None:
    before = legs(pool)["prefill"]
    prompt = [9, 8, 7]
    text = pool.complete(prompt, 5).json()["choices"][0]["text"]
    assert text == expected_text(pack_tokens(prompt), 5, vocabulary=PLAIN)
    assert legs(pool)["prefill"] == before + 1


def test_without_the_package_a_worker_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Process(*COMMON) as worker:
        assert worker.wait() == 2
        _, errors = worker.stop()
    assert "the package tensorrt_llm is not installed in this Python" in errors
    assert "Traceback" not in errors


TRANSPORT = os.environ.get("POOLGRID_TRANSPORT_UNDER_TEST", "zmq")
"""How embeddings travel; ``python -m tests.nixl`` says ``nixl``."""


def test_pictures_are_encoded_on_one_machine_and_computed_on_another(tmp_path: Path) -> None:
    """The second machine encodes nothing itself and cannot open the first one's handles: only fetching helps it."""
    model = make_model(tmp_path / "eyes")

    def worker(name: str, *options: str) -> Process:
        environment = {
            "PYTHONPATH": os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")]),
            "TRTLLM_FAKE": json.dumps({"version": "1.3", "vocabulary_size": 4096, "machine": name}),
        }
        return Process(
            *("worker", "--engine", "trtllm", "--worker-id", name, "--model-path", str(model)),
            *("--served-model-name", "eyes", "--modality", "multimodal", "--max-batch-size", "64"),
            *("--tensor-transport", TRANSPORT, "--consolidator", router.word("ingest"), *options),
            environment=environment,
        )

    with contextlib.ExitStack() as stack:
        router = stack.enter_context(Process("router", "--port", "0", "--model-path", str(model))).wait_ready()
        started = [
            stack.enter_context(worker("encoder", "--disaggregation-mode", "encode")),
            stack.enter_context(worker("computer", "--encode-endpoint", "poolgrid.encode.generate")),
        ]
        encoder, computer = [each.wait_ready() for each in started]
        eventually(
            "both are reachable",
            lambda: [row["state"] for row in worker_rows(router.url).values()] == ["ready"] * 2,
        )
        urls = [data_url(picture(colour, 2, 2)) for colour in ("red", "blue")]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"model": "eyes", "messages": [{"role": "user", "content": content}], "max_tokens": 4}

        answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=60)

        assert answer.status_code == 200, answer.text
        fetched = {"transport": TRANSPORT, "outcome": "fetched"}
        assert metric(computer.url, "poolgrid_worker_tensor_fetches_total", **fetched) == 2
        eventually(
            "the encoder keeps nothing",
            lambda: httpx.get(f"{encoder.url}/health").json()["kept_embeddings"] == 0,
        )
