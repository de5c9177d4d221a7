"""The disk takes nothing any more: the pool serves on, says so loudly, and loses no event when the disk is back."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from poolgrid.cli.main import app
from poolgrid.tools.bench.command import measure_one
from poolgrid.tools.bench.settings import BenchSettings
from tests.e2e.disturbed_load import assert_unharmed
from tests.e2e.expectation import Verifier
from tests.e2e.processes import eventually, is_settled, metric, running_pool

pytestmark = pytest.mark.e2e


def let_files_grow(process: psutil.Process, to_bytes: int) -> None:
    """Set the size beyond which this process can write no file; writes fail as they do on a full disk."""
    process.rlimit(resource.RLIMIT_FSIZE, (to_bytes, resource.RLIM_INFINITY))


def verified_load(url: str) -> None:
    settings = BenchSettings(url=url, concurrency=(8,), isl=400, osl=20, requests=40)
    assert_unharmed(measure_one(settings, verify=Verifier()))


def test_a_full_disk_stops_no_request_is_said_and_is_caught_up(tmp_path: Path) -> None:
    with running_pool("--data-dir", str(tmp_path), workers=2) as up:
        verified_load(up.url)
        eventually("it is recorded", lambda: metric(up.url, "poolgrid_router_recorded_decisions_total") == 40)
        writers = [up.child("consolidator"), up.child("router")]
        for writer in writers:
            let_files_grow(writer, 100)
        verified_load(up.url)
        eventually(
            "the router says so of both", lambda: len(httpx.get(f"{up.url}/health").json().get("troubles", [])) == 2
        )
        assert metric(up.url, "poolgrid_router_journal_trouble") == 1
        pool = httpx.get(f"{up.url}/v1/pool").json()
        health = httpx.get(f"{up.url}/health")
        stalled_at = pool["journal"]["offset"]
        verified_load(up.url)

        assert "cannot write its journal" in pool["journal"]["trouble"]
        assert "File too large" in pool["decisions"]["trouble"]
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert httpx.get(f"{up.url}/v1/pool").json()["journal"]["offset"] == stalled_at

        for writer in writers:
            let_files_grow(writer, resource.RLIM_INFINITY)
        eventually("the state is current", lambda: httpx.get(f"{up.url}/health").json()["status"] == "ok")
        eventually("the index is true", lambda: is_settled(up.url))
        verified_load(up.url)
        assert httpx.get(f"{up.url}/v1/pool").json()["journal"]["offset"] > stalled_at

    verify = CliRunner().invoke(app, ["journal", "verify", str(tmp_path), "--json"])
    replay = CliRunner().invoke(app, ["replay", str(tmp_path), "--json"])
    told = json.loads(replay.stdout)["routers"]["router"]
    assert verify.exit_code == 0, verify.output
    assert replay.exit_code == 0, replay.output
    assert told["lost_decisions"] > 0
    assert told["identical"] >= 80
    assert told["identical"] + told["not_derivable"] + told["lost_decisions"] == 160
