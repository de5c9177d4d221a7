"""A pool under load with a worker killed in the middle of it: every decision is derived again, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from router.consolidator.journal.framing import FILE_HEADER, frame, payload_at, scan
from tests.e2e.disturbed_load import assert_unharmed, load_while
from tests.e2e.processes import eventually, metric, ready_workers, running_pool

pytestmark = pytest.mark.e2e

REQUESTS = 150


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data_dir of a pool that lost a worker under load and got it back."""
    directory = tmp_path_factory.mktemp("recorded")
    with running_pool("--data-dir", str(directory), workers=3) as up:
        report = load_while(up.url, lambda: up.child("--worker-id", "worker-1").kill(), requests=REQUESTS)
        assert_unharmed(report)
        assert metric(up.url, "poolgrid_router_migrations_total") > 0
        eventually("the worker is back", lambda: len(ready_workers(up.url)) == 3)
        assert metric(up.url, "poolgrid_router_unrecorded_decisions_total") == 0
    return directory


def poolgrid(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout


def test_every_decision_is_identical(recorded: Path) -> None:
    status, out = poolgrid("replay", recorded, "--strict", "--json")

    router = json.loads(out)["routers"]["router"]
    assert status == 0, out
    assert router["identical"] > REQUESTS  # those that moved were decided twice
    assert (router["not_derivable"], router["lost_decisions"], router["difference"]) == (0, 0, None)


def test_the_journal_and_the_decisions_are_sound(recorded: Path) -> None:
    assert poolgrid("journal", "verify", recorded)[0] == 0


def test_a_record_that_somebody_changed_and_sealed_again_is_found(recorded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(recorded, tmp_path / "copy")
    segment = next((copy / "decisions" / "router").glob("*.segment"))
    data = segment.read_bytes()
    positions, _, _ = scan(data, FILE_HEADER.size, 0)
    payloads = [payload_at(data, position) for position in positions]
    at = [number for number, payload in enumerate(payloads) if b"DecisionMade" in payload[:20]][50]
    payloads[at] = payloads[at].replace(b"tiny", b"tinz")
    entries = [frame(payload, number) for number, payload in enumerate(payloads)]
    segment.write_bytes(data[: FILE_HEADER.size] + b"".join(entries))

    status, out = poolgrid("replay", copy)

    assert status == 1
    assert f"DIFFERENT at {segment.name}, entry {at}" in out
    assert "recorded:" in out
    assert "derived:" in out
