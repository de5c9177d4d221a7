"""Embeddings of a TensorRT-LLM encode worker reach a worker on another machine: real processes, the contract fake."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Process, eventually, metric, worker_rows
from tests.fakes import FAKES_PATH
from tests.frontend.media.samples import data_url
from tests.trtllm.seeing import make_model, picture

pytestmark = pytest.mark.e2e

TRANSPORT = os.environ.get("POOLGRID_TEST_TENSOR_TRANSPORT", "zmq")
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
