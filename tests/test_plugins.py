"""Plug-in folders: without one of them everything else starts, and what is absent is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

import poolgrid
from poolgrid.server.frontend.api_endpoint import ApiEndpoint
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.process.plugins import ENDPOINTS, has_plugin, load_plugin, plugin_names

PACKAGE = Path(poolgrid.__file__).parent
ROOT = Path(__file__).parents[1]
NAMES = sorted(path.parent.name for path in (PACKAGE / "plugins").glob("*/__init__.py"))

MEETS = {"simulation": ("bench", "simulated")}
"""Plug-ins that cannot do without others: ``MAY_IMPORT`` in ``test_architecture.py`` says what they take of them."""


class Refusal(NamedTuple):
    """A command that needs a plug-in, and the words that refuse it."""

    plugin: str
    command: tuple[str, ...]
    words: str


TRTLLM_POOL = ("up", "--engine", "trtllm", "--model-path", str(TINY_MODEL_PATH))

REFUSALS = (
    Refusal("bench", ("bench",), "bench: not installed (there is no poolgrid.plugins.bench)"),
    Refusal("doctor", ("doctor",), "doctor: not installed (there is no poolgrid.plugins.doctor)"),
    Refusal("endpoint_picker", ("router", "--ext-proc-port", "0"), "the plug-in 'endpoint-picker' is not installed"),
    Refusal("engine_check", ("engine-check", "--url", "http://h"), "engine-check: not installed"),
    Refusal(
        "grid_builder",
        ("config", "build", __file__, "--out", "grid.json"),
        "loading the plug-in 'grid-builder' of poolgrid.parts",
    ),
    Refusal(
        "kubernetes",
        ("router", "--names", "kubernetes"),
        "loading the plug-in 'kubernetes' of poolgrid.discovery",
    ),
    Refusal(
        "nats",
        ("consolidator", "--event-plane", "nats", "--nats-url", "nats://127.0.0.1:1"),
        "loading the plug-in 'nats' of poolgrid.event_planes",
    ),
    Refusal(
        "parsers",
        ("router", "--reasoning-parser", "qwen3"),
        "loading the plug-in 'reasoning' of poolgrid.parsers",
    ),
    Refusal("policies", ("router", "--policy", "round-robin"), "--policy round-robin"),
    Refusal("responses_api", ("router", "--response-store-bytes", "1"), "the plug-in 'responses' is not installed"),
    Refusal("simulated", ("worker", "--consolidator", "127.0.0.1:1"), "--engine is simulated, which is not installed"),
    Refusal("simulated", ("up",), "--engine is simulated, which is not installed"),
    Refusal("simulation", ("what-if", "dir"), "what-if: not installed (there is no poolgrid.plugins.simulation)"),
    Refusal("trtllm", ("engine-config", "check", "x"), "engine-config: not installed"),
    Refusal("trtllm", (*TRTLLM_POOL, "--gpus", "0"), "--engine is trtllm, which is not installed"),
)

NOT_SERVED = {
    "messages_api": ("messages", "messages/count_tokens"),
    "responses_api": ("responses", "responses/input_tokens"),
    "tasks": ("embeddings", "images/generations", "videos", "videos/video_0/content"),
}
"""Paths below ``/v1/`` that need a plug-in, which the answer names by the first part of the path."""

SILENT = {"fleet_page"}
"""Without them something is not offered, and nobody has asked for it."""

EVERY_MODULE = """
import importlib, pkgutil, sys
import poolgrid
def every_module(package):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""

WITHOUT_PLUGINS = (
    EVERY_MODULE
    + """
import asyncio, contextlib, httpx, io, json, os
from prometheus_client import CollectorRegistry
assert poolgrid.__file__.startswith(sys.argv[1]), poolgrid.__file__
every_module(poolgrid)
from poolgrid.server.cli.main import app
with contextlib.redirect_stdout(io.StringIO()) as help:
    app(["--help"], standalone_mode=False)
assert "Operate:" in help.getvalue()
for number, command in enumerate(json.loads(sys.argv[2])):
    if not os.fork():
        sys.stderr = open(f"{number}.stderr", "w", buffering=1)
        app(command, prog_name="poolgrid")
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
class Tiny:
    def models(self):
        return (poolgrid.kernel.requests.inference.ServedModel("tiny", 0, 4096),)
async def ask():
    front = poolgrid.server.frontend.app.create_app(
        Tiny(), {}, settings=poolgrid.server.frontend.settings.FrontendSettings(), registry=CollectorRegistry()
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://h/v1/") as client:
        for path in json.loads(sys.argv[3]):
            print((await client.post(path, json={})).text)
    state = front.front
    reader = poolgrid.server.proxy.prompt_reading.PromptReader(state.preparation, state.tokenization, state.domains, 99)
    for path in ("responses", "messages"):
        found = await reader.read("/v1/" + path, b'{"model": "tiny", "input": "a text", "messages": []}', "r")
        print(found.why, found.request.by_text)
    await front.close()
asyncio.run(ask())
"""
)
"""Import everything, ask for help, and run commands and requests, which are to be refused."""

ONE_PLUGIN = (
    EVERY_MODULE
    + """
import json, os
import poolgrid.kernel, poolgrid.server.cli.commands.up, poolgrid.server.router.bootstrap
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name, needed in json.loads(sys.argv[1]).items():
    absent = {f"poolgrid.plugins.{each}" for each in json.loads(sys.argv[2]) if each != name and each not in needed}
    if not os.fork():
        sys.meta_path.insert(0, Absent())
        every_module(importlib.import_module(f"poolgrid.plugins.{name}"))
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
)
"""Import each plug-in where the others are absent, all but those that it needs."""


def package_without(folders: Iterable[str], place: Path, source: Path = PACKAGE) -> Path:
    """Make a package of links that lacks folders; return the directory to import it from."""
    made = place / source.name
    made.mkdir(parents=True)
    for child in source.iterdir():
        below = [rest for folder, _, rest in (each.partition("/") for each in folders) if folder == child.name]
        if all(below) and below:
            package_without(below, made, child)
        elif not below and child.name != "__pycache__":
            (made / child.name).symlink_to(child.resolve())
    return place


def python(place: Path, *arguments: str, source: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(source or place), "PATH": "/usr/bin:/bin", "HOME": str(place)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_plugins_everything_else_imports_and_what_needs_one_is_refused_by_its_name(tmp_path: Path) -> None:
    place = package_without([f"plugins/{name}" for name in NAMES], tmp_path)
    commands = json.dumps([each.command for each in REFUSALS])
    paths = [path for paths in NOT_SERVED.values() for path in paths]

    done = python(place, "-c", WITHOUT_PLUGINS, str(place), commands, json.dumps(paths))

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["another API True"] * 2, "for engine servers, prompts are compared by their text"
    for path, answer in zip(paths, lines[len(REFUSALS) : -2], strict=True):
        error = json.loads(answer)["error"]
        name = path.partition("/")[0]
        assert error["message"] == f"POST /v1/{path}: the plug-in {name!r} of poolgrid.endpoints is not installed"
        assert error["code"] == "not_found"
    for number, (refusal, status) in enumerate(zip(REFUSALS, lines[: len(REFUSALS)], strict=True)):
        told = (place / f"{number}.stderr").read_text()
        assert status in ("1", "2"), (refusal, told)
        assert refusal.words in " ".join(told.split()), refusal


def test_every_plugin_imports_without_the_others(tmp_path: Path) -> None:
    needs = json.dumps({name: MEETS.get(name, ()) for name in NAMES})

    done = python(tmp_path, "-c", ONE_PLUGIN, needs, json.dumps(NAMES), source=PACKAGE.parent)

    assert done.returncode == 0, done.stderr


def test_every_plugin_has_an_entry_point_a_page_of_its_own_and_words_that_refuse_it() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    named = {value.split(".")[2] for group in groups.values() for value in group.values() if ".plugins." in value}

    assert set(NAMES) == named
    assert {each.plugin for each in REFUSALS} | NOT_SERVED.keys() | SILENT == set(NAMES)
    for name in NAMES:
        page = PACKAGE / "plugins" / name / "README.md"
        lines = page.read_text().splitlines()
        assert lines[0].startswith("# "), name
        assert 8 <= len(lines) <= 30, name
        for place in re.findall(r"`((?:tests|docs|lab)/[\w./]+)`", page.read_text()):
            assert (ROOT / place).exists(), f"{page} names {place}"


@pytest.mark.parametrize("name", [name for name in plugin_names(ENDPOINTS) if has_plugin(ENDPOINTS, name)])
def test_all_paths_of_an_api_are_below_the_name_of_its_entry_point(name: str) -> None:
    """By which the answer to a request without the plug-in names it."""
    api: ApiEndpoint = load_plugin(ENDPOINTS, name)
    made = {each.path for each in api.description.inference}
    paths = made | {each.path for each in api.description.operations} | api.prompts.keys()

    assert made
    assert {path for path in paths if f"{path}/".startswith(f"/v1/{name}/")} == paths


def test_a_pool_serves_with_the_simulated_engine_alone(tmp_path: Path) -> None:
    place = package_without([f"plugins/{name}" for name in NAMES if name != "simulated"], tmp_path)
    program = """
from poolgrid.server.workers.engines.registry import engines, server_kinds
assert "trtllm" not in engines() and {"openai", "vllm"} <= set(server_kinds())
"""
    done = python(place, "-c", program)
    assert done.returncode == 0, done.stderr

    with subprocess.Popen(
        [sys.executable, "-m", "poolgrid", "up", "--port", "0", "--workers", "1"],
        env={"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin", "HOME": str(place)},
        cwd=place,
        stdout=subprocess.PIPE,
    ) as pool:
        assert pool.stdout is not None
        try:
            assert pool.stdout.readline().startswith(b"ready ")
        finally:
            pool.terminate()
