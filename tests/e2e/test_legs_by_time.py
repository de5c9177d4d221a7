"""One leg or two by expected time, in started processes: `up` with prefill and decode workers, one of them killed."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.disturbed_load import assert_unharmed, load_while
from tests.e2e.processes import PATIENT, Process, assert_decisions_replay, eventually, metric, ready_workers

pytestmark = pytest.mark.e2e

ONE_LEG = ("local_prefill", "overflow", "no_prefill_worker")


def legs(url: str, *reasons: str) -> float:
    return sum(metric(url, "poolgrid_router_legs_total", reason=reason) for reason in reasons)


def test_a_killed_prefill_worker_fails_no_request_and_decode_workers_compute_prompts(tmp_path: Path) -> None:
    options = ("--port", "0", "--prefill", "2", "--decode", "2", "--speedup", "5", "--data-dir", str(tmp_path))
    with Process("up", *options, *PATIENT) as up:
        up.wait_ready()
        url = up.url
        eventually("every worker is reachable", lambda: len(ready_workers(url)) == 4)
        prefill = up.child("worker", "prefill")
        whole = 0.0

        def kill() -> None:
            nonlocal whole
            whole = legs(url, *ONE_LEG)
            prefill.kill()

        assert_unharmed(load_while(url, kill, requests=120))

        assert legs(url, *ONE_LEG) > whole
        assert legs(url, "disaggregated") > 0
        eventually("the worker is back", lambda: len(ready_workers(url)) == 4)
        body = {"model": "tiny", "prompt": list(range(100, 3000)), "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        first = httpx.get(f"{url}/v1/decisions/{answer.headers['x-request-id']}").json()["attempts"][0]
        for name, further in (("one", "pause_ms"), ("two", "transfer_ms")):
            leg = first["legs"][name]
            terms = leg["terms"]
            expected = terms["queue_ms"] + terms["prompt_ms"] + leg["weight"] * terms[further]
            assert leg["cost_ms"] == pytest.approx(expected)
        one, two = (first["legs"][name]["cost_ms"] for name in ("one", "two"))
        assert (first["stage"] == "prefill") == (two < one), json.dumps(first["legs"])
        assert up.stop()[0] == 0
    assert assert_decisions_replay(tmp_path) > 0
