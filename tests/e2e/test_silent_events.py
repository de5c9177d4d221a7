"""TensorRT-LLM's silent failure: an engine that reuses its cache and never says what is in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from poolgrid.plugins.doctor.command import examine_journal, examine_url
from tests.e2e.processes import Process, eventually, metric, ready_workers, worker_rows
from tests.fakes import FAKES_PATH

pytestmark = pytest.mark.e2e


def complete(url: str, number: int, receipt: bool = False) -> httpx.Response:
    prompt = [5 + (place % 1000) for place in range(320)] + [number + 5] * 20
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    headers = {"x-poolgrid-receipt": "1"} if receipt else {}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers)


def stream(url: str) -> dict[str, Any]:
    (row,) = worker_rows(url).values()
    told = row["stream"]
    assert isinstance(told, dict)
    return told


def test_an_event_stream_that_never_fills_is_found_out_and_the_routers_own_choices_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")]))
    with Process("router", "--port", "0", "--data-dir", str(tmp_path)) as router:
        router.wait_ready()
        options = ("--engine", "trtllm", "--model-path", "tiny", "--kv-block-size", "16", "--worker-id", "w")
        silent = ("--no-publish-events-and-metrics", "--consolidator", router.word("ingest"))
        with Process("worker", *options, *silent) as worker:
            worker.wait_ready()
            eventually("the worker is ready", lambda: ready_workers(router.url) == ["w"])
            reused = [
                complete(router.url, number).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                for number in range(24)
            ]
            assert max(reused) >= 320 - 16, "the engine reuses its cache"
            eventually("the router has found out", lambda: not stream(router.url)["trusted"])
            told = stream(router.url)
            assert (told["predicted_tokens"], told["disagreement"]) == (0, 1.0)
            assert "the index predicted 0 cached tokens" in told["untrusted_because"]
            assert metric(router.url, "poolgrid_router_untrusted_workers") == 1

            def verdict_after(number: int) -> str:
                complete(router.url, number)
                return str(worker_rows(router.url)["w"]["verdict"])

            # Events may be late: for six seconds that none came is no evidence.
            assert verdict_after(30) == "reuses-more"
            eventually("the cause is named", lambda: verdict_after(31) == "no-events")
            assert examine_url(router.url, as_json=True) == 1
            (verdict,) = json.loads(capsys.readouterr().out)["data"]
            assert (verdict["cause"], verdict["promised_tokens"]) == ("no-events", 0)
            assert metric(router.url, "poolgrid_router_reuse_verdict") == 1
            assert metric(router.url, "poolgrid_router_uncached_tokens_total") > 0
            (receipt,) = complete(router.url, 50, receipt=True).json()["usage"]["poolgrid_receipt"]
            assert receipt["worker"] == "w"
            assert receipt["promised_tokens"] == receipt["reported_tokens"] == 320

            # From now on what was sent there is believed to be there.
            complete(router.url, 100)
            assert complete(router.url, 101).headers["x-poolgrid-decision"].endswith("-predicted")
            newest = httpx.get(f"{router.url}/v1/decisions").json()["data"][0]
            assert newest["overlap_blocks"] == 320 // 16
        assert router.stop()[0] == 0  # what it recorded last is written then

    assert examine_journal(str(tmp_path), as_json=True) == 1
    (verdict,) = json.loads(capsys.readouterr().out)["data"]
    assert verdict["cause"] == "no-events", "the recorded journal gives the same verdict"
