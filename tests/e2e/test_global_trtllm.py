"""Dynamo's own document of a global router before pools of TensorRT-LLM workers, on the contract fake.

`poolgrid up --engine trtllm --pools` starts all of it: two prefill pools by prompt length and TTFT, one decode pool.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.expectation import PLAIN, expected_text
from tests.e2e.fleet import pools
from tests.e2e.processes import Process, becomes, eventually, metric, pool_is_quiet
from tests.fakes import FAKES_PATH
from tests.global_router.documents import dynamo_disagg

pytestmark = pytest.mark.e2e

PREFILL = ("gp-prefill-0", "gp-prefill-1")
MAPPING = [[0, 1], [1, 0]]
"""By prompt length (below 400 tokens or not) and TTFT target (below 1,505 ms or not)."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory = tmp_path_factory.mktemp("fleet")
    document = dynamo_disagg()
    document["prefill_pool_dynamo_namespaces"] = list(PREFILL)
    document["decode_pool_dynamo_namespaces"] = ["gp-decode-0"]
    document["prefill_pool_selection_strategy"] |= {"isl_max": 800, "prefill_pool_mapping": MAPPING}
    path = directory / "dynamo.json"
    path.write_text(json.dumps(document))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")]))
        fake = {"version": "1.4", "vocabulary_size": 4096, "cancel_breaks_transfer": True}
        patch.setenv("TRTLLM_FAKE", json.dumps(fake))
        words = ("up", "--engine", "trtllm", "--pools", str(path), "--model-path", str(TINY_MODEL_PATH), "--port", "0")
        with Process(*words, "--gpus", "0,1,2", "--log-dir", str(directory / "logs")) as up:
            yield up.wait_ready(180)
            status, errors = up.stop()
            assert status == 0, errors


@pytest.mark.parametrize("length", [300, 500])
@pytest.mark.parametrize("ttft_ms", [100, 2900])
@pytest.mark.parametrize("form", ["extra_args", "nvext", "header"])
def test_the_pool_is_the_one_of_the_grid_and_the_text_that_of_one_worker(
    fleet: Process, length: int, ttft_ms: int, form: str
) -> None:
    prompt = list(range(100 + length, 100 + 2 * length))
    targets = {"ttft_target": ttft_ms}
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    forms: dict[str, dict[str, Any]] = {
        "extra_args": {"extra_args": targets},
        "nvext": {"nvext": {"router": targets}},
    }
    body |= forms.get(form, {})
    headers = {"x-ttft-target-ms": str(ttft_ms)} if form == "header" else {}

    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60)

    assert answer.status_code == 200, answer.text
    prefill = PREFILL[MAPPING[length >= 400][ttft_ms >= 1505]]
    assert answer.headers["x-poolgrid-pool"].split(",") == [prefill, "gp-decode-0"]
    assert answer.json()["choices"][0]["text"] == expected_text(pack_tokens(prompt), 12, vocabulary=PLAIN)


def test_a_repeated_prompt_finds_its_blocks_and_nothing_is_kept(fleet: Process) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": list(range(3000, 3320)),
        "max_tokens": 4,
        "temperature": 0,
        "seed": 3,
    }
    texts, cached = set(), []
    for _ in range(2):
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60).json()
        texts.add(answer["choices"][0]["text"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert len(texts) == 1
    assert cached[0] == 0 < cached[1]
    found = pools(fleet.url)
    assert set(found) == {*PREFILL, "gp-decode-0"}
    guided = {**body, "prompt": "x", "guided_regex": "[ab]{3}", "frequency_penalty": 0.5}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=guided, timeout=60).json()
    assert re.fullmatch("[ab]{3}", answer["choices"][0]["text"]), answer
    for row in found.values():
        rows = httpx.get(f"{row['url']}/v1/workers").json()["data"]
        assert [each["engine"] for each in rows] == ["TensorRT-LLM 1.4.0rc4"]
        eventually("no request is on any worker or book", partial(pool_is_quiet, row["url"]))
        for each in rows:
            kept = partial(metric, each["http_endpoint"], "poolgrid_worker_kept_transfers")
            becomes(kept, 0)


def test_streams_that_clients_leave_cost_no_later_request_an_error(fleet: Process) -> None:
    """A known issue of 1.4.0rc1: the next KV transfer after a cancelled stream fails."""
    body: dict[str, Any] = {"model": "tiny", "temperature": 0}
    moved = metric(fleet.url, "poolgrid_global_router_moves_total")
    for number in range(5):
        left = {**body, "prompt": list(range(500 + number, 900)), "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{fleet.url}/v1/completions", json=left, timeout=60) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()
            [next(lines) for _ in range(4)]
        for row in pools(fleet.url).values():
            eventually("the stream is over", partial(pool_is_quiet, row["url"]))
        prompt = list(range(1000 + number, 1400))
        later = {**body, "prompt": prompt, "max_tokens": 12}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=later, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected_text(pack_tokens(prompt), 12, vocabulary=PLAIN)
    assert metric(fleet.url, "poolgrid_global_router_moves_total") > moved, "the fault was met"
    rows = httpx.get(f"{pools(fleet.url)['gp-decode-0']['url']}/v1/workers").json()["data"]
    assert [row["state"] for row in rows] == ["ready"]


def test_logs_are_a_file_for_each_worker(fleet: Process, tmp_path_factory: pytest.TempPathFactory) -> None:
    logs = Path(fleet.arguments[fleet.arguments.index("--log-dir") + 1])
    assert {each.name for each in logs.iterdir()} == {"gp-prefill-0-0.log", "gp-prefill-1-0.log", "gp-decode-0-0.log"}
