"""A pool in front of two scripted servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
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


@contextmanager
def scripted_pool(front: str, log: Path, options: tuple[str, ...] = ()) -> Iterator[ScriptedPool]:
    """Two scripted servers behind a router, or behind a global router with a router for each."""
    servers = [ScriptedServer(str(TINY_MODEL_PATH), f"adapter-{name}") for name in "ab"]
    fronts = [word for each in servers for word in ("--engine-url", each.url)]
    if front == "global router":
        document = log.with_name("pools.json")
        document.write_text(json.dumps(TWO_POOLS))
        fronts = [f"--engine-url={name}={each.url}" for name, each in zip(POOLS, servers, strict=True)]
        fronts += ["--pools", str(document)]
    parts = ("router", "global-router") if front == "global router" else ("router",)
    settings = [word for part in parts for each in options for word in ("--part-option", f"{part}.{each}")]
    words = ("--port", "0", "--model-path", str(TINY_MODEL_PATH), *PATIENT, *settings)
    environment = {"POOLGRID_ENGINE_API_KEY": SERVER_KEY}
    try:
        with Process("up", *fronts, *words, log=log, environment=environment) as up:
            yield ScriptedPool(up.wait_ready(), servers, log)
            status, _ = up.stop()
            assert status == 0
            assert_log_is_good(log)
    finally:
        for each in servers:
            each.close()


def assert_log_is_good(log: Path) -> None:
    said = log.read_text()
    assert "this is a bug" not in said
    assert "Traceback" not in said
    assert SERVER_KEY not in said.replace("\\/", "/"), "a key is in the log"


@pytest.fixture(scope="session")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ScriptedPool]]:
    """The pool of all modules that need no settings of their own: starting one takes up to four seconds of CPU."""
    with ExitStack() as opened:

        @cache
        def pool_behind(front: str) -> ScriptedPool:
            return opened.enter_context(scripted_pool(front, tmp_path_factory.mktemp("pool") / "log"))

        yield pool_behind


@pytest.fixture(scope="module")
def module_pool(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    pool_options: tuple[str, ...],
    shared_pool: Callable[[str], ScriptedPool],
) -> Iterator[ScriptedPool]:
    """One for all tests of a module."""
    if pool_options:
        with scripted_pool(request.param, tmp_path_factory.mktemp("pool") / "log", pool_options) as own:
            yield own
        return
    shared = shared_pool(request.param)
    yield shared
    assert_log_is_good(shared.log)


@pytest.fixture
def pool(module_pool: ScriptedPool) -> Iterator[ScriptedPool]:
    """The pool as the tests before have left it: with both servers, and without requests."""
    module_pool.begin()
    yield module_pool
    module_pool.end()
