"""Whole pools on an address of IPv6, as pods of a cluster without IPv4 have: planes, events, tensors, fleets."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.fleet import POOL_CONFIGS
from tests.e2e.processes import PATIENT, Process, eventually, index_equals_workers, ready_workers, worker_rows
from tests.fakes.engine_server.threaded import servers_in_thread
from tests.fakes.engine_server.vllm import Options

pytestmark = pytest.mark.e2e

HOST = "::1"


def completed(url: str, prompt: list[int]) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_a_pool_with_prefill_and_decode_workers_serves_and_its_index_is_what_they_hold() -> None:
    with Process("up", "--host", HOST, "--port", "0", "--prefill", "1", "--decode", "1", *PATIENT) as up:
        up.wait_ready()
        assert up.url.startswith(f"http://[{HOST}]:")
        assert all(HOST in str(row["http_endpoint"]) for row in worker_rows(up.url).values())
        for number in range(3):
            assert completed(up.url, list(range(100 * number, 100 * number + 80))).status_code == 200
        eventually("the index is what the workers hold", lambda: index_equals_workers(up.url))
        assert sum(int(str(row["indexed_blocks"])) for row in worker_rows(up.url).values()) > 0
        status, errors = up.stop()
        assert status == 0, errors


def test_events_of_an_engine_server_arrive() -> None:
    with servers_in_thread(Options(block_size=16, host=HOST)) as running:
        (server,) = running.servers
        options = ("--engine-url", server.url, "--model-path", str(TINY_MODEL_PATH))
        with Process("up", "--host", HOST, "--port", "0", *options, *PATIENT) as up:
            up.wait_ready()
            assert completed(up.url, list(range(100, 180))).status_code == 200
            blocks = len(server.caches[0].names())
            assert blocks >= 5

            def held() -> list[object]:
                return [row["indexed_blocks"] for row in worker_rows(up.url).values()]

            eventually("the index is what the server holds", lambda: held() == [blocks])
            running.do(server.reset_prefix_cache())
            eventually("what it forgets is forgotten", lambda: held() == [0])


def test_a_global_router_reaches_its_pools(tmp_path: Path) -> None:
    with Process("up", "--host", HOST, "--port", "0", "--workers", "1", *PATIENT) as up:
        up.wait_ready()
        document = json.loads((POOL_CONFIGS / "short_and_long.json").read_text())
        document["aggregated"]["pools"] = [{"name": "six", "url": up.url}]
        document["aggregated"] |= {"isl_resolution": 1, "mapping": [[["six"]]]}
        pools = tmp_path / "pools.json"
        pools.write_text(json.dumps(document))
        with Process("global-router", "--host", HOST, "--port", "0", "--config", str(pools)) as router:
            router.wait_ready()
            eventually(
                "a request is answered through the global router",
                lambda: completed(router.url, list(range(40))).status_code == 200,
            )
        assert ready_workers(up.url) == ["worker-0"]
