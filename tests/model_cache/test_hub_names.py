"""A model by its name on a hub is brought into the cache of the machine before anything that needs it starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.workers import model_fetch
from poolgrid.workers.engines.trtllm.definition import ENGINE
from poolgrid.workers.engines.trtllm.settings import TrtllmWorkerSettings
from tests.model_cache.file_server import FileServer, file_server

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
        "POOLGRID_MODEL_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": FAKES,
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


def cached(tmp_path: Path) -> dict[str, set[str]]:
    cache = tmp_path / "cache"
    return {each.name: {file.name for file in each.iterdir()} for each in cache.iterdir() if each.name[0] != "."}


def test_a_router_fetches_a_model_without_its_weights(hub: FileServer, tmp_path: Path) -> None:
    ports = ("--port", "0")
    status, out, said = poolgrid(hub, tmp_path, "router", *ports, "--model-path", NAME)
    assert (status, out.split()[0]) == (0, "ready"), said
    (files,) = cached(tmp_path).values()
    assert "tokenizer.json" in files
    assert "model.safetensors" not in files
    asked = len(hub.asked)
    assert poolgrid(hub, tmp_path, "router", *ports, "--model-path", NAME)[0] == 0
    assert len(hub.asked) == asked, "what is there is not asked for again"


def test_up_serves_a_model_by_the_name_that_was_given(hub: FileServer, tmp_path: Path) -> None:
    words = ("up", "--engine", "trtllm", "--workers", "1", "--port", "0", "--gpus", "0", "--log-dir", str(tmp_path))
    status, out, said = poolgrid(hub, tmp_path, *words, "--model-path", NAME)
    assert (status, out.split()[0]) == (0, "ready"), said
    assert NAME in said, "the greeting names the model as clients ask for it"
    assert any("model.safetensors" in files for files in cached(tmp_path).values())


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
    assert "--model-path org/none: listing hub:org/none" in said or "--model-path org/none: listing" in said


def test_a_worker_loads_a_hub_model_out_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POOLGRID_MODEL_CACHE_DIR", str(tmp_path))
    asked: list[tuple[Path | None, str]] = []

    async def fetch(settings: TrtllmWorkerSettings, source: str, start: object) -> Path:
        asked.append((settings.model_cache_dir, source))
        return tmp_path / "there"

    monkeypatch.setattr(model_fetch, "_fetch", fetch)
    for model, path in ((NAME, str(tmp_path / "there")), ("m", "m"), ("/models/m", "/models/m")):
        settings = TrtllmWorkerSettings(model_path=model)
        made = asyncio.run(model_fetch.cached_model(settings, model, ENGINE.with_model, None))  # type: ignore[arg-type]
        assert (made.model_path, made.model_name) == (path, model)
    assert asked == [(tmp_path, NAME)]
