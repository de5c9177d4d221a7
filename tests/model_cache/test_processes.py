"""`poolgrid model` in processes of its own: two at once, one that is killed, and what the command says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from poolgrid.cli.main import app
from tests.e2e.processes import eventually
from tests.model_cache.file_server import COMMIT, FileServer, file_server

pytestmark = pytest.mark.e2e

WEIGHTS = bytes(range(256)) * 12_000
TIMEOUT_S = 120.0


@contextmanager
def fetching(server: FileServer, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `poolgrid model fetch` of a model of the hub."""
    words = ["model", "fetch", "org/model", "--cache-dir", str(cache), "--progress-lines", "--json"]
    mine = {"HF_ENDPOINT": server.url, "HF_HOME": str(cache.parent / "hf"), "NO_PROXY": "127.0.0.1,localhost"}
    process = subprocess.Popen(
        [sys.executable, "-m", "poolgrid", *words],
        env={**os.environ, **mine},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def until(process: subprocess.Popen[str], phase: str) -> None:
    """Read a process's progress until it says that it is in a phase."""
    assert process.stderr is not None
    for line in process.stderr:
        if json.loads(line)["phase"] == phase:
            return
    raise AssertionError(f"it ended with {process.wait()} before {phase}")


def model(*words: str) -> Result:
    return CliRunner().invoke(app, ["model", *words], env={"COLUMNS": "300"})  # the table names paths


def test_one_that_is_killed_leaves_nothing_whole_and_of_two_at_once_one_fetches(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with file_server() as server:
        server.serve_model("org/model", {"config.json": b"{}", "m.safetensors": WEIGHTS})
        server.holds["/store/m.safetensors"] = 1_000_000
        with fetching(server, cache) as killed:
            until(killed, "fetch")
            assert server.held.wait(TIMEOUT_S)
            partial = cache / ".poolgrid" / "partial" / "org--model"
            eventually("the small file is there", (partial / "config.json").exists)
            now = json.loads(model("list", "--cache-dir", str(cache), "--json").stdout)
            assert (now["models"], now["partial"][0]["fetching"]) == ([], True)
            killed.send_signal(signal.SIGKILL)
            killed.wait(TIMEOUT_S)
        listed = model("list", "--cache-dir", str(cache))
        assert "broken off" in listed.stdout
        assert model("verify", "org--model", "--cache-dir", str(cache)).exit_code == 1
        server.asked.clear()
        server.held.clear()

        with fetching(server, cache) as first:
            until(first, "fetch")
            assert server.held.wait(TIMEOUT_S)
            with fetching(server, cache) as second:
                until(second, "wait")
                server.go_on.set()
                answers = [json.loads(each.communicate(timeout=TIMEOUT_S)[0]) for each in (first, second)]

        assert [each.returncode for each in (first, second)] == [0, 0]
        assert answers[0] == answers[1]
        assert (answers[0]["path"], answers[0]["revision"]) == (str(cache / "org--model"), COMMIT)
        assert server.ranges("/store/m.safetensors") == [""], "fetched once"
        assert server.ranges(f"/org/model/resolve/{COMMIT}/config.json") == [], "which was whole"
    assert (cache / "org--model" / "m.safetensors").read_bytes() == WEIGHTS


def test_the_command_fetches_lists_verifies_and_mends(tmp_path: Path) -> None:
    source = tmp_path / "little"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "w.bin").write_bytes(b"12345")
    cache = ("--cache-dir", str(tmp_path / "cache"))

    fetched = model("fetch", str(source), *cache)
    assert (fetched.exit_code, fetched.stdout) == (0, f"{tmp_path}/cache/little\n"), fetched.output
    listed = model("list", *cache)
    assert "little" in listed.stdout
    assert "whole" in listed.stdout
    assert str(source) in listed.stdout
    assert model("verify", *cache).stdout == "little: 2 files as fetched, 7 B\n"

    wrong = tmp_path / "cache" / "little" / "w.bin"
    wrong.write_bytes(b"12346")
    verified = model("verify", *cache)
    assert verified.exit_code == 1
    assert f"{wrong}: its content is not what was fetched" in verified.stderr
    answer = json.loads(model("verify", "--json", *cache).stdout)
    assert answer == [{"name": "little", "files": 2, "wrong": {"w.bin": "its content is not what was fetched"}}]
    assert model("fetch", str(source), "--check", *cache).exit_code == 0
    assert wrong.read_bytes() == b"12345"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fetch", "/nowhere/m"], "reading /nowhere/m: it is no directory that is there"),
        (["fetch", "not a source"], "the source of the model is 'not a source': allowed are"),
        (["fetch", ".", "--name", "../x"], "the model's name is '../x': allowed are"),
        (["verify", "absent"], "absent is no whole model"),
    ],
)
def test_what_cannot_be_is_said_with_its_place_and_ends_with_1(words: list[str], said: str, tmp_path: Path) -> None:
    answer = model(*words, "--cache-dir", str(tmp_path / "cache"))

    assert answer.exit_code == 1
    assert said in answer.stderr
    assert not (tmp_path / "cache" / "m").exists()
