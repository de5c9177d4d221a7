"""What a mock worker takes by itself is measured on its real request plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.benchmarks.fleet import Fleet
from lab.benchmarks.peers import OURS, Peers
from lab.benchmarks.worker_load import WorkerLoadSpec


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_a_mock_workers_request_plane_has_its_tokens_one_request_after_the_other(
    tmp_path: Path, stream: bool
) -> None:
    fleet = Fleet(tmp_path)
    try:
        endpoint = Peers("", tmp_path).start_worker(OURS, fleet)
        spec = WorkerLoadSpec(endpoint=endpoint, isl=100, osl=20, stream=stream, warmup_s=0.0, duration_s=0.3)
        measured = fleet.load_worker(spec)
    finally:
        fleet.close()

    assert measured["failure"] == ""
    assert measured["requests"] > 1
    assert 0 < measured["ttft_ms"]["p50"] <= measured["ttft_ms"]["p99"]
