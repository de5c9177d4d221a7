"""The commands that `poolgrid up` prints first show what they promise: in a pool with keys, settings and a disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from tests.e2e.processes import Process, eventually

pytestmark = pytest.mark.e2e


class Pool:
    """A disaggregated pool with keys, and what it said when it began."""

    def __init__(self, up: Process, key: str, directory: Path) -> None:
        self.url = up.url
        self.key = key
        self.directory = directory
        self._up = up
        self.said = up.errors_so_far()

    def has_said(self, words: str) -> bool:
        self.said += self._up.errors_so_far()
        return words in self.said

    def environment(self) -> dict[str, str]:
        return {**os.environ, "POOLGRID_API_KEY": self.key, "COLUMNS": "80"}

    def command(self, number: int) -> str:
        """Return the command under a number of the greeting."""
        found = re.search(rf"^{number}\. .*\n((?:   .*\n)+)", self.said, re.MULTILINE)
        assert found is not None, self.said
        return found[1]

    def typed(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], env=self.environment(), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    directory = tmp_path_factory.mktemp("first")
    keys, settings = directory / "keys.json", directory / "tuned.toml"
    made = CliRunner().invoke(app, ["keys", "create", str(keys), "acme", "--operator"])
    settings.write_text('policy = "least-loaded"\nmax_queue_requests = 7\n')
    arguments = [
        "--prefill",
        "1",
        "--decode",
        "1",
        "--speedup",
        "50",
        "--port",
        "0",
        "--part-option",
        "router.access-log",
        "--part-option",
        "router.legs=two",
    ]
    arguments += ["--api-keys", str(keys), "--settings-file", str(settings), "--data-dir", str(directory / "data")]
    with Process("up", *arguments) as up:
        up.wait_ready()
        yield Pool(up, made.stdout.split()[0], directory)
        status, errors = up.stop()
        assert status == 0, errors


def test_of_the_second_turn_what_the_first_one_sent_is_cached(pool: Pool) -> None:
    first, second = (int(line.partition(":")[2]) for line in pool.typed(pool.command(1)).splitlines())

    assert first == 0
    assert second > 1000
    drawn = pool.typed(pool.command(2).replace(" explain turn-2", " explain turn-1"))
    assert "prefill: worker prefill-0" in drawn
    assert "decode: worker decode-0" in drawn
    assert max(map(len, drawn.splitlines())) <= 80
    for turn in (1, 2):
        line = f"request turn-{turn} completions 200 model=tiny tenant=acme isl="
        eventually("the access log has the request", lambda line=line: pool.has_said(line))  # type: ignore[misc]


def test_top_is_let_in_by_the_key_that_the_greeting_names(pool: Pool) -> None:
    assert "export POOLGRID_API_KEY=" in pool.said

    shown = pool.typed(pool.command(3).strip() + " --once")
    assert "prefill-0" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_settings_come_from_the_file_and_keys_are_asked_for(pool: Pool) -> None:
    assert httpx.get(f"{pool.url}/v1/workers").status_code == 401
    answer = httpx.get(f"{pool.url}/v1/workers", headers={"authorization": f"Bearer {pool.key}"}).json()
    assert answer["queue"]["requests_max"] == 7
    assert [row["state"] for row in answer["data"]] == ["ready", "ready"]
    assert list((pool.directory / "data").glob("*.segment"))


def test_an_answer_is_explained_by_the_id_in_its_body_with_and_without_its_index(pool: Pool) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "n": 2}
    headers = {"authorization": f"Bearer {pool.key}"}
    answer = httpx.post(f"{pool.url}/v1/chat/completions", json=body, headers=headers)
    by_header = answer.headers["x-request-id"]

    def explained(name: str) -> list[str]:
        done = CliRunner().invoke(app, ["explain", name, "--url", pool.url, "--json"], env=pool.environment())
        assert done.exit_code == 0, done.output
        # A leg each.
        return list(dict.fromkeys(attempt["request_id"] for attempt in json.loads(done.stdout)["attempts"]))

    both = explained(answer.json()["id"])
    assert both == [f"{by_header}-0", f"{by_header}-1"]
    assert explained(by_header) == both

    unknown = CliRunner().invoke(app, ["explain", "gone", "--url", pool.url], env=pool.environment())
    assert unknown.exit_code == 1
    assert re.search(
        r"'gone' is kept: the last \d+ are, since [-\d]{10} [:\d]{8} UTC; older ones are in the recording",
        unknown.output,
    )
    assert explained(f"{by_header}-1") == both[1:]
