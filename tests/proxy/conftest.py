"""A pool in front of two scripted servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import PATIENT, Process
from tests.proxy.pool import POOLS, SERVER_KEY, TWO_POOLS, ScriptedPool
from tests.proxy.scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def pool_options() -> tuple[str, ...]:
    """Settings of the routers of a module, as ``name=value``; a module may have its own."""
    return ()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a module behind a router and behind a global router, or only behind what its ``FRONTS`` names."""
    if "module_pool" in metafunc.fixturenames:
        fronts = getattr(metafunc.module, "FRONTS", ("router", "global router"))
        metafunc.parametrize("module_pool", fronts, indirect=True, scope="module")


@pytest.fixture(scope="module")
def module_pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool_options: tuple[str, ...]
) -> Iterator[ScriptedPool]:
    """One for all tests of a module."""
    servers = [ScriptedServer(str(TINY_MODEL_PATH), f"adapter-{name}") for name in "ab"]
    log: Path = tmp_path_factory.mktemp("pool") / "log"
    fronts = [word for each in servers for word in ("--engine-url", each.url)]
    if request.param == "global router":
        document = log.with_name("pools.json")
        document.write_text(json.dumps(TWO_POOLS))
        fronts = [f"--engine-url={name}={each.url}" for name, each in zip(POOLS, servers, strict=True)]
        fronts += ["--pools", str(document)]
    parts = ("router", "global-router") if request.param == "global router" else ("router",)
    settings = [word for part in parts for each in pool_options for word in ("--part-option", f"{part}.{each}")]
    options = ("--port", "0", "--model-path", str(TINY_MODEL_PATH), *PATIENT, *settings)
    environment = {"POOLGRID_ENGINE_API_KEY": SERVER_KEY}
    try:
        with Process("up", *fronts, *options, log=log, environment=environment) as up:
            yield ScriptedPool(up.wait_ready(), servers)
            status, errors = up.stop()
            assert status == 0, errors
            assert "this is a bug" not in errors
            assert "Traceback" not in errors
            assert SERVER_KEY not in errors.replace("\\/", "/"), "a key is in the log"
    finally:
        for each in servers:
            each.close()


@pytest.fixture
def pool(module_pool: ScriptedPool) -> Iterator[ScriptedPool]:
    """The pool as the tests before have left it: with both servers, and without requests."""
    module_pool.begin()
    yield module_pool
    module_pool.end()
