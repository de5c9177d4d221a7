"""Closed pools and fleets, as real processes: they serve, and whoever has another key stays outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app as cli
from tests.e2e.processes import Process, eventually, index_equals_workers, metric, ready_workers
from tests.transport.test_planes import make_pair
from tests.transport.test_tls import Files

pytestmark = pytest.mark.e2e

MAKER = ("--served-model-name", "tiny", "--speedup", "50", "--vocabulary-size", "4096")
BODY = {"model": "tiny", "prompt": "x" * 300, "max_tokens": 8}


def test_a_pool_under_curve_serves_and_keeps_strangers_out(tmp_path: Path) -> None:
    key = ("--curve-key", str(make_pair(tmp_path, "pool")))
    stranger = ("--curve-key", str(make_pair(tmp_path, "stranger")))
    worker = ("worker", *MAKER)
    with Process("consolidator", *key) as consolidator:
        consolidator.wait_ready()
        feed = ("--feed-endpoint", consolidator.word("feed"), "--query-endpoint", consolidator.word("query"))
        at = ("--consolidator", consolidator.word("ingest"))
        with (
            Process("router", "--port", "0", *feed, *key) as router,
            Process(*worker, "--worker-id", "friend", *at, *key) as friend,
            Process(*worker, "--worker-id", "stranger", *at, *stranger),
        ):
            router.wait_ready()
            friend.wait_ready()
            eventually("the worker is reachable", lambda: ready_workers(router.url) == ["friend"])
            answers = [httpx.post(f"{router.url}/v1/completions", json=BODY) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert answers[-1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, (
                "events came through as well"
            )
            eventually("the index is true", lambda: index_equals_workers(router.url))

            name = "poolgrid_plane_refused_peers_total"
            # It trusts a server that has another key, and so does not get as far as showing its own.
            eventually(
                "the stranger was refused",
                lambda: metric(consolidator.url, name, plane="ingest", reason="handshake_failed") >= 1,
            )
            assert ready_workers(router.url) == ["friend"]
            assert httpx.post(f"{router.url}/v1/completions", json=BODY).status_code == 200
            status, errors = friend.stop()
            assert status == 0, errors
            status, errors = router.stop()
            assert status == 0, errors
        status, errors = consolidator.stop()
        assert status == 0, errors
        assert "refused a peer on the ingest plane" in errors


def one_pool(url: str) -> dict[str, Any]:
    return {
        "version": 1,
        "mode": "aggregated",
        "aggregated": {
            "pools": [{"name": "only", "url": url}],
            "isl_min": 0,
            "isl_max": 4000,
            "isl_resolution": 1,
            "ttft_min_ms": 0,
            "ttft_max_ms": 1000,
            "ttft_resolution": 1,
            "itl_min_ms": 0,
            "itl_max_ms": 20,
            "itl_resolution": 1,
            "mapping": [[["only"]]],
        },
    }


def test_a_fleet_with_keys_tls_and_curve_serves_who_has_all_of_them(tmp_path: Path) -> None:
    curve = ("--curve-key", str(make_pair(tmp_path, "fleet")))
    files = Files(tmp_path)
    tls = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    keys = tmp_path / "keys.json"
    operator = CliRunner().invoke(cli, ["keys", "create", str(keys), "ops", "--operator"]).stdout.strip()
    tenant = CliRunner().invoke(cli, ["keys", "create", str(keys), "acme"]).stdout.strip()
    (tmp_path / "operator").write_text(f"{operator}\n")

    with Process("router", "--port", "0", *curve, *tls, "--api-keys", str(keys)) as router:
        router.wait_ready()
        assert router.url.startswith("https://")
        document = tmp_path / "fleet.json"
        document.write_text(json.dumps(one_pool(router.url)))
        fleet = ("--pool-ca", str(files.ca), "--pool-api-key", str(tmp_path / "operator"))
        with (
            Process("worker", *MAKER, "--consolidator", router.word("ingest"), *curve, *tls) as worker,
            Process("global-router", "--port", "0", "--config", str(document), *curve, *fleet) as outer,
            httpx.Client(base_url=router.url, verify=files.trusting()) as client,
        ):
            worker.wait_ready()
            outer.wait_ready()
            eventually("the fleet serves", lambda: httpx.get(f"{outer.url}/ready").status_code == 200)
            assert httpx.post(f"{outer.url}/v1/completions", json=BODY).status_code == 200
            assert metric(outer.url, "poolgrid_global_router_dispatches_total") == 1

            assert client.post("/v1/completions", json=BODY).headers["x-poolgrid-refusal"] == "missing_api_key"
            headers = {"authorization": f"Bearer {tenant}"}
            assert client.get("/v1/workers", headers=headers).headers["x-poolgrid-refusal"] == "operator_only"
            mine = [client.post("/v1/completions", json=BODY, headers=headers) for _ in range(2)]
            assert [answer.status_code for answer in mine] == [200, 200]
            cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in mine]
            assert cached[0] == 0, "what others asked for is not in this tenant's cache"
            assert cached[1] > 0, "what it asked for itself is"
            for process in (outer, worker):
                status, errors = process.stop()
                assert status == 0, errors
        status, errors = router.stop()
        assert status == 0, errors
