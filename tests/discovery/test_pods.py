"""Pods by a label selector, against the stand-in of an API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from poolgrid.plugins.kubernetes.pods import open_pods
from poolgrid.server.discovery.registry import DiscoveryUnavailable
from tests.discovery.api_server import ApiServer


def pod(ip: str, phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", **metadata}, "status": {"phase": phase, "podIP": ip, "conditions": []}}


async def test_pods_count_while_they_run_whatever_their_probes_say(tmp_path: Path) -> None:
    server = ApiServer(tmp_path)
    await server.start()
    try:
        pods = await open_pods("app=vllm", "", server.url, server.account)
        server.pods = [
            pod("10.0.0.2"),
            pod("10.0.0.1"),
            pod("10.0.0.3", phase="Pending"),
            pod("10.0.0.4", deletionTimestamp="2026-01-01T00:00:00Z"),
            {"metadata": {}, "status": {"phase": "Running"}},
        ]
        assert await pods.addresses() == ["10.0.0.1", "10.0.0.2"]
        assert server.asked[-1]["labelSelector"] == "app=vllm"
        pods.close()
    finally:
        await server.stop()


async def test_a_cluster_that_refuses_says_what_the_role_lacks_and_an_answer_that_is_none_is_reported(
    tmp_path: Path,
) -> None:
    server = ApiServer(tmp_path)
    await server.start()
    try:
        elsewhere = await open_pods("app=vllm", "other", server.url, server.account)
        with pytest.raises(DiscoveryUnavailable, match="A Role has to allow this account to list pods there"):
            await elsewhere.addresses()
        elsewhere.close()
        pods = await open_pods("app=vllm", "", server.url, server.account)
        server.pods = [{"metadata": 5}]
        with pytest.raises(DiscoveryUnavailable, match="no list of pods"):
            await pods.addresses()
        pods.close()
    finally:
        await server.stop()


async def test_outside_of_a_cluster_the_entry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match=r"engine_url is k8s\+http:// and KUBERNETES_SERVICE_HOST is not set"):
        await open_pods("app=vllm", "")
