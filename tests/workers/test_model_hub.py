"""Models by their names on a hub: which names are such, and what is fetched, found and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolgrid.server.workers import model_hub
from poolgrid.server.workers.model_hub import ModelHubError
from tests.workers.hub_server import COMMIT, FileServer, file_server

FILES = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "m.safetensors": bytes(1000), "original/p.pth": b"1"}
TIMEOUT_S = 120.0


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with file_server() as served:
        served.serve_model("org/model", FILES)
        # As they are with HF_ENDPOINT and HF_HOME, which are read once.
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        yield served


def process(hub: FileServer, tmp_path: Path, model: str = "org/model") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "poolgrid.server.workers.model_hub", model],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("org/model", True),
        ("Qwen/Qwen3-8B@main", True),
        ("org/model@refs/pr/1", True),
        ("model", False),
        ("/models/m", False),
        ("./org/model", False),
        ("../x", False),
        ("org/model/more", False),
        ("hf://org/model", False),
        ("http://host/model", False),
        ("", False),
    ],
)
def test_which_names_are_those_of_a_hub(name: str, is_one: bool) -> None:
    assert model_hub.is_hub_name(name) is is_one


def test_a_directory_here_is_no_name_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert not model_hub.is_hub_name("org/model")


def test_a_model_is_fetched_with_or_without_its_weights(hub: FileServer, tmp_path: Path) -> None:
    assert model_hub.cached("org/model") is None

    tokenizer = model_hub.fetch("org/model", weights=False)
    assert {each.name for each in tokenizer.rglob("*")} == {"config.json", "tokenizer.json"}
    assert model_hub.cached("org/model") == tokenizer

    whole = model_hub.fetch(f"org/model@{COMMIT}")
    assert whole == tokenizer
    assert {path: (whole / path).read_bytes() for path in FILES} == FILES


def test_a_model_that_the_hub_has_is_looked_up_and_not_fetched(hub: FileServer, tmp_path: Path) -> None:
    model_hub.look_up("org/model")

    assert not [path for path, _, _ in hub.asked if "/resolve/" in path]
    assert model_hub.cached("org/model") is None


@pytest.mark.parametrize("doing", ["fetching", "looking for"])
def test_a_model_that_is_not_to_be_had_is_named_with_the_hub(hub: FileServer, doing: str) -> None:
    ask = model_hub.fetch if doing == "fetching" else model_hub.look_up

    with pytest.raises(ModelHubError, match=rf"^{doing} org/none at {hub.url}: [^\n]*404"):
        ask("org/none")


def test_offline_a_model_comes_from_the_cache_or_not_at_all(hub: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_hub.fetch("org/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()

    assert model_hub.fetch("org/model") == directory
    model_hub.look_up("org/model")
    for ask in (model_hub.fetch, model_hub.look_up):
        with pytest.raises(ModelHubError, match="org/none"):
            ask("org/none")
    assert not hub.asked


def test_a_fetch_that_is_killed_leaves_whole_files_for_the_next_one(hub: FileServer, tmp_path: Path) -> None:
    hub.holds["/store/m.safetensors"] = 500
    killed = process(hub, tmp_path)
    assert hub.held.wait(TIMEOUT_S)
    snapshot = tmp_path / "hf" / "hub" / "models--org--model" / "snapshots" / COMMIT
    while not (snapshot / "original" / "p.pth").exists():
        assert killed.poll() is None
        threading.Event().wait(0.05)
    killed.kill()
    killed.communicate(timeout=TIMEOUT_S)
    assert not (snapshot / "m.safetensors").exists()
    hub.go_on.set()
    hub.asked.clear()

    path, said = process(hub, tmp_path).communicate(timeout=TIMEOUT_S)

    assert {name: (Path(path.strip()) / name).read_bytes() for name in FILES} == FILES, said
    assert hub.ranges(f"/org/model/resolve/{COMMIT}/original/p.pth") == []


def test_a_process_that_fetches_reports_bytes_and_ends_with_the_reason_of_a_failure(
    hub: FileServer, tmp_path: Path
) -> None:
    hub.holds["/store/m.safetensors"] = 500
    fetching = process(hub, tmp_path)
    assert fetching.stderr is not None
    total = sum(map(len, FILES.values()))
    for line in fetching.stderr:
        found = json.loads(line)
        if total - 1000 <= found["bytes"] < total:  # all but the file that is held, of which some may be there
            assert found["total_bytes"] == total
            break
    hub.go_on.set()
    assert fetching.communicate(timeout=TIMEOUT_S)[0].strip().endswith(COMMIT)
    assert fetching.returncode == 0

    failed = process(hub, tmp_path, "org/none")
    out, said = failed.communicate(timeout=TIMEOUT_S)
    assert (failed.returncode, out) == (1, "")
    assert said.splitlines()[-1].startswith(f"fetching org/none at {hub.url}: ")
