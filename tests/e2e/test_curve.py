"""A pool whose planes are closed by CURVE: it serves, and whoever has another key stays outside."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Process, eventually, index_equals_workers, metric, ready_workers
from tests.runtime.test_planes import make_pair

pytestmark = pytest.mark.e2e

BODY = {"model": "tiny", "prompt": "x" * 300, "max_tokens": 8}


def test_a_pool_under_curve_serves_and_keeps_strangers_out(tmp_path: Path) -> None:
    key = ("--curve-key", str(make_pair(tmp_path, "pool")))
    stranger = ("--curve-key", str(make_pair(tmp_path, "stranger")))
    worker = ("worker", "--model", "tiny", "--speedup", "50", "--vocabulary-size", "4096", "--heartbeat-ms", "100")
    with Process("consolidator", *key) as consolidator:
        consolidator.wait_ready()
        feed = ("--feed-endpoint", consolidator.word("feed"), "--query-endpoint", consolidator.word("query"))
        at = ("--consolidator", consolidator.word("ingest"))
        with (
            Process("router", "--port", "0", *feed, *key) as router,
            Process(*worker, "--worker-id", "friend", *at, *key) as friend,
            Process(*worker, "--worker-id", "stranger", *at, *stranger),
            Process(*worker, "--worker-id", "open", *at),
        ):
            router.wait_ready()
            friend.wait_ready()
            eventually("the worker is reachable", lambda: ready_workers(router.url) == ["friend"])
            for _ in range(2):
                answer = httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=30)
                assert answer.status_code == 200
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "events came through as well"
            eventually("the index is true", lambda: index_equals_workers(router.url))

            name = "poolgrid_plane_refused_peers_total"
            # One has no key, the other trusts a server that has another one; neither gets as far as showing its own.
            eventually(
                "both strangers were refused",
                lambda: metric(consolidator.url, name, plane="ingest", reason="handshake_failed") >= 2,
            )
            assert ready_workers(router.url) == ["friend"]
            assert httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=30).status_code == 200
            status, errors = friend.stop()
            assert status == 0, errors
            status, errors = router.stop()
            assert status == 0, errors
        status, errors = consolidator.stop()
        assert status == 0, errors
        assert "refused a peer on the ingest plane" in errors
