"""A pool under load with a worker killed in the middle of it: every decision is derived again, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from poolgrid.kernel.journal.framing import FILE_HEADER, frame, payload_at, scan
from poolgrid.server.cli.main import app
from poolgrid.server.process.figures import counted
from tests.e2e.disturbed_load import assert_unharmed, kill_at_work, load_while
from tests.e2e.processes import eventually, is_settled, metric, ready_workers, running_pool

pytestmark = pytest.mark.e2e

REQUESTS = 150
EXPLAINED = "explain-me"
FADING = ("expected_ttft_ms", "crowding_ms", "pace", "next_ms")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data_dir of a pool that lost a worker under load and got it back."""
    directory = tmp_path_factory.mktemp("recorded")
    with running_pool("--data-dir", str(directory), workers=3) as up:
        report = load_while(
            up.url, lambda: kill_at_work(up.url, "worker-1", up.child("--worker-id", "worker-1")), requests=REQUESTS
        )
        assert_unharmed(report)
        assert metric(up.url, "poolgrid_router_migrations_total") > 0
        eventually("the worker is back", lambda: len(ready_workers(up.url)) == 3)
        assert metric(up.url, "poolgrid_router_unrecorded_decisions_total") == 0
        _compare_live_dry_run_and_decision(up.url)
    return directory


def _compare_live_dry_run_and_decision(url: str) -> None:
    """A dry run says what the request then gets, leaves no trace, and the answer's headers name the same."""
    # What was sent and how fast it was fade from memory: on a busy machine also between a dry run and its request.
    names = (EXPLAINED, *(f"{EXPLAINED}-{number}" for number in range(2, 20)))
    assert any(_dry_run_and_decision_are_alike(url, name) for name in names)
    ids = httpx.post(f"{url}/v1/route", json={"model": "tiny", "token_ids": [5] * 70}).json()["routes"][0]
    assert (ids["isl"], ids["realised_cached_tokens"]) == (70, None)
    refused = httpx.post(f"{url}/v1/route", json={"model": "other", "token_ids": [5]})
    assert refused.status_code == 404


def _dry_run_and_decision_are_alike(url: str, name: str) -> bool:
    eventually("the pool is settled", lambda: is_settled(url))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "where to? " * 40}], "max_tokens": 4}
    headers = {"x-request-id": name}
    booked = metric(url, "poolgrid_router_decisions_total")
    dry = httpx.post(f"{url}/v1/route", json=body, headers=headers).json()
    again = httpx.post(f"{url}/v1/route", json=body, headers=headers).json()
    assert metric(url, "poolgrid_router_decisions_total") == booked
    assert httpx.get(f"{url}/v1/decisions/{name}").status_code == 404
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
    (attempt,) = httpx.get(f"{url}/v1/decisions/{name}").json()["attempts"]
    (route,) = dry["routes"]
    assert _lasting(again["routes"][0]["rows"]) == _lasting(route["rows"]) == _lasting(attempt["rows"])
    assert answer.headers["x-poolgrid-worker"] == attempt["worker"]
    assert answer.headers["x-poolgrid-decision"] == attempt["reason"]
    assert attempt["runner_up"] != attempt["worker"]
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert attempt["realised_cached_tokens"] == cached
    costs = [row["cost"] for row in route["rows"]]
    is_as_dear = costs == pytest.approx([row["cost"] for row in attempt["rows"]], rel=0.1)
    return is_as_dear and (route["worker"], route["reason"]) == (attempt["worker"], attempt["reason"])


def _lasting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without what changes while nothing happens: what was sent and how fast it was fade from memory."""
    lasting = []
    for row in rows:
        terms = {name: value for name, value in row["terms"].items() if name not in FADING}
        lasting.append({**row, "terms": terms, "cost": None})
    return lasting


def test_a_request_is_explained_from_the_journal_as_the_router_would(recorded: Path) -> None:
    status, out = poolgrid("explain", EXPLAINED, "--journal", recorded, "--json")
    (attempt,) = json.loads(out)["attempts"]

    assert status == 0
    assert attempt["recorded"]["router"] == "router"
    assert attempt["recorded"]["settings"]["policy"] == "kv"
    assert attempt["realised_cached_tokens"] is not None
    reused = attempt["realised_cached_tokens"]
    said = " ".join(poolgrid("explain", EXPLAINED, "--journal", recorded)[1].replace("│", "").split())
    assert f"promised, {counted(reused, 'token')} reported as reused" in said
    assert poolgrid("explain", "nobody", "--journal", recorded)[0] == 1


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
