"""Plug-in folders: without one of them everything else starts, and what is absent is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

import poolgrid
from poolgrid.server.frontend.models import TINY_MODEL_PATH

PACKAGE = Path(poolgrid.__file__).parent

PROCESSES = (
    "poolgrid.server.router.bootstrap",
    "poolgrid.server.global_router.bootstrap",
    "poolgrid.server.consolidator.bootstrap",
    "poolgrid.server.workers.bootstrap",
    "poolgrid.server.cli.commands.up",
)
"""Modules that start each process."""


class Plugin(NamedTuple):
    """A folder, and a command that needs it with the words that refuse it."""

    folder: str
    command: tuple[str, ...] = ()
    words: str = ""


NO_NATS = "loading the plug-in 'nats' of poolgrid.event_planes"
TRTLLM_POOL = ("up", "--engine", "trtllm", "--model-path", str(TINY_MODEL_PATH))

PLUGINS = (
    Plugin("fleet_page"),
    Plugin("kubernetes", ("router", "--names", "kubernetes"), "loading the plug-in 'kubernetes'"),
    Plugin("nats", ("consolidator", "--event-plane", "nats", "--nats-url", "nats://127.0.0.1:1"), NO_NATS),
    Plugin(
        "src/poolgrid/plugins/endpoint_picker",
        ("router", "--ext-proc-port", "0"),
        "poolgrid.plugins.endpoint_picker cannot be",
    ),
    Plugin("src/poolgrid/plugins/policies", ("router", "--policy", "round-robin"), "--policy round-robin"),
    Plugin("tools", ("bench",), "bench: not installed"),
    Plugin("plugins/bench", ("bench",), "bench: not installed"),
    Plugin("plugins/engine_check", ("engine-check", "--url", "http://h"), "engine-check: not installed"),
    Plugin("plugins/simulation", ("what-if", "dir"), "what-if: not installed"),
    Plugin(
        "src/poolgrid/plugins/simulated", ("worker", "--consolidator", "127.0.0.1:1"), "--engine is simulated, which is"
    ),
    Plugin("src/poolgrid/plugins/simulated", ("up",), "--engine is simulated, which is not installed"),
    Plugin("src/poolgrid/plugins/trtllm", ("engine-config", "check", "x"), "engine-config: not installed"),
    Plugin("src/poolgrid/plugins/trtllm", (*TRTLLM_POOL, "--gpus", "0"), "--engine is trtllm, which is not installed"),
)


GROUPS = (
    tuple(each for each in PLUGINS if "tools/" not in each.folder and not each.folder.endswith("trtllm")),
    tuple(each for each in PLUGINS if "tools/" in each.folder or each.folder.endswith("trtllm")),
)
"""Those of a group are absent together, which costs one start: none is below another."""

PROGRAM = """
import contextlib, importlib, io, json, os, sys
import poolgrid
assert poolgrid.__file__.startswith(sys.argv[1]), poolgrid.__file__
for module in json.loads(sys.argv[2]):
    importlib.import_module(module)
from poolgrid.server.cli.main import app
with contextlib.redirect_stdout(io.StringIO()) as help:
    app(["--help"], standalone_mode=False)
assert "Operate:" in help.getvalue()
for number, command in enumerate(json.loads(sys.argv[3])):
    if not os.fork():
        sys.stderr = open(f"{number}.stderr", "w", buffering=1)
        app(command, prog_name="poolgrid")
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""Import what starts each process, ask for help, and run commands, which are to be refused."""


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


def python(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin", "HOME": str(place)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("plugins", GROUPS, ids=["whole", "parts"])
def test_everything_else_starts_without_plugins_that_are_refused_by_name(
    plugins: tuple[Plugin, ...], tmp_path: Path
) -> None:
    place = package_without({each.folder for each in plugins}, tmp_path)
    refused = [each for each in plugins if each.command]
    commands = json.dumps([each.command for each in refused])

    done = python(place, "-c", PROGRAM, str(place), json.dumps(PROCESSES), commands)

    assert done.returncode == 0, done.stderr
    for number, (plugin, status) in enumerate(zip(refused, done.stdout.split(), strict=True)):
        told = (place / f"{number}.stderr").read_text()
        assert status in ("1", "2"), (plugin, told)
        assert plugin.words in " ".join(told.split()), plugin


def test_a_pool_serves_and_every_other_module_imports_without_the_engine_trtllm(tmp_path: Path) -> None:
    place = package_without(["src/poolgrid/plugins/trtllm"], tmp_path)
    program = """
import importlib, pkgutil, poolgrid
for found in pkgutil.walk_packages(poolgrid.__path__, "poolgrid."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
from poolgrid.server.workers.engines.registry import engines, server_kinds
assert "trtllm" not in engines() and set(server_kinds()) == {"openai", "sglang", "trtllm-serve", "vllm"}
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
