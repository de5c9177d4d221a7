"""A model by its name on a hub is brought into the cache of the machine before anything that needs it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.workers.hub_server import COMMIT, FileServer, file_server

NAME = "org/tiny-model"
FILES = {each.name: each.read_bytes() for each in TINY_MODEL_PATH.iterdir() if each.is_file()}
FAKES = str(Path(__file__).parents[1] / "fakes")
LIB = Path(__file__).parents[2] / "launch"


@pytest.fixture
def hub() -> Iterator[FileServer]:
    with file_server() as served:
        served.serve_model(NAME, {**FILES, "model.safetensors": bytes(1000)})
        yield served


def poolgrid(hub: FileServer, tmp_path: Path, *words: str, **more: str) -> tuple[int, str, str]:
    """Return how a command ends that is told to stop once it is ready."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("POOLGRID_", "HF_"))},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": os.pathsep.join([FAKES, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        **more,
    }
    words = words if words[0].endswith(".sh") else (sys.executable, "-m", "poolgrid", *words)
    with TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        out = process.stdout.readline()
        if out.startswith("ready"):
            process.terminate()
        # Not `communicate`: it reads on from the pipe, and loses what came together with the first line.
        with process.stdout:
            out += process.stdout.read()
        status = process.wait(timeout=120)
        errors.seek(0)
        return status, out, errors.read()


def cached(tmp_path: Path) -> set[str]:
    """The files of the model that are on this machine."""
    snapshot = tmp_path / "hf" / "hub" / "models--org--tiny-model" / "snapshots" / COMMIT
    return {each.name for each in snapshot.iterdir()}


def test_a_router_fetches_a_model_without_its_weights(hub: FileServer, tmp_path: Path) -> None:
    ports = ("--port", "0")
    status, out, said = poolgrid(hub, tmp_path, "router", *ports, "--model-path", NAME)
    assert (status, out.split()[0]) == (0, "ready"), said
    files = cached(tmp_path)
    assert "tokenizer.json" in files
    assert "model.safetensors" not in files
    hub.asked.clear()
    assert poolgrid(hub, tmp_path, "router", *ports, "--model-path", NAME)[0] == 0
    assert not [path for path, _, _ in hub.asked if "/resolve/" in path], "what is there is not fetched again"
    gone = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    assert poolgrid(hub, tmp_path, "router", *ports, "--model-path", NAME, **gone)[0] == 0, "without the hub too"


def test_up_serves_a_model_by_the_name_that_was_given(hub: FileServer, tmp_path: Path) -> None:
    words = ("up", "--engine", "trtllm", "--workers", "1", "--port", "0", "--gpus", "0", "--log-dir", str(tmp_path))
    status, out, said = poolgrid(hub, tmp_path, *words, "--model-path", NAME)
    assert (status, out.split()[0]) == (0, "ready"), said
    assert NAME in said, "the greeting names the model as clients ask for it"
    assert "model.safetensors" in cached(tmp_path)


@pytest.mark.parametrize("script", ["", "agg.sh"])
def test_a_dry_run_finds_what_the_start_would_find(hub: FileServer, tmp_path: Path, script: str) -> None:
    def dry_run(name: str) -> tuple[int, str, str]:
        if script:
            command = f"{sys.executable} -m poolgrid"
            given = {"MODEL_PATH": name, "POOLGRID": command, "GPUS": "0"}
            return poolgrid(hub, tmp_path, str(LIB / script), "--dry-run", **given)
        words = ("up", "--engine", "trtllm", "--workers", "1", "--gpus", "0", "--dry-run")
        return poolgrid(hub, tmp_path, *words, "--model-path", name)

    status, out, said = dry_run(NAME)
    assert status == 0, said
    assert f"--served-model-name={NAME}" in out
    assert not any(path.endswith("tokenizer.json") for path, _, _ in hub.asked), "nothing was fetched"
    status, _, said = dry_run("org/none")
    assert status == 2
    assert f"--model-path org/none: looking for org/none at {hub.url}: " in said
