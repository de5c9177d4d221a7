"""Fleets of several pools behind a global router, from a document of ``pool_configs``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.expectation import MODEL, expected_text
from tests.e2e.processes import PATIENCE_MS, PATIENT, Process, is_settled

POOL_CONFIGS = Path(__file__).parents[2] / "pool_configs"


def small_copy(document: Path, directory: Path, **simulate: object) -> Path:
    """Write a document whose pools have one worker each, which takes half a second of CPU to start."""
    grid = json.loads(document.read_text())
    for stage in grid.values():
        for pool in stage.get("pools", ()) if isinstance(stage, dict) else ():
            pool.setdefault("simulate", {}).update(workers=1, **simulate)
    copy = directory / document.name
    copy.write_text(json.dumps(grid))
    return copy


@contextmanager
def running_fleet(path: Path, *arguments: str, speedup: float = 20.0) -> Iterator[Process]:
    """Run `poolgrid up --pools` and end it in good order; it serves, says nothing wrong, and leaves nothing behind."""
    patient = (*PATIENT, "--part-option", f"global-router.worker-timeout-ms={PATIENCE_MS}")
    with Process("up", "--pools", str(path), "--port", "0", "--speedup", str(speedup), *patient, *arguments) as up:
        up.wait_ready()
        yield up
        assert_serves(up.url)
        below = up.descendants()
        status, errors = up.stop()
        assert status == 0, errors
        assert "Traceback" not in errors, errors
        assert not [process for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def assert_serves(url: str) -> None:
    """Ask something, and see that a pool of the fleet gives the answer of its engine."""
    prompt = MODEL.encode("hello")

    answer = complete(url, list(memoryview(prompt).cast("I")), 8)

    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected_text(prompt, 8)
    assert set(answer.headers["x-poolgrid-pool"].split(",")) <= set(pools(url))


def pools(url: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in httpx.get(f"{url}/v1/pools").json()["data"]}


def all_available(url: str) -> bool:
    return all(
        row["state"] == "available"
        and all(role["unreachable"] == 0 for model in row["models"] for role in model["roles"].values())
        for row in pools(url).values()
    )


def is_idle(url: str) -> bool:
    """Tell whether every pool can be used and is settled, and its global router has heard so."""
    rows = pools(url).values()
    roles = [role for row in rows for model in row["models"] for role in model["roles"].values()]
    return (
        all_available(url)
        and not any(role["requests"] for role in roles)
        and not any(row["in_flight"] or row["waiting_requests"] for row in rows)
        and all(is_settled(row["url"]) for row in rows)
    )


def complete(url: str, tokens: list[int], max_tokens: int, **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens}
    return httpx.post(f"{url}/v1/completions", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
