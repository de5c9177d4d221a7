"""A pool in front of two scripted servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from poolgrid.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import PATIENT, Process
from tests.proxy.pool import SERVER_KEY, ScriptedPool
from tests.proxy.scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def module_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedPool]:
    """One for all tests of a module."""
    servers = [ScriptedServer(str(TINY_MODEL_PATH), f"adapter-{name}") for name in "ab"]
    fronts = [word for each in servers for word in ("--engine-url", each.url)]
    options = ("--port", "0", "--model-path", str(TINY_MODEL_PATH), *PATIENT)
    log: Path = tmp_path_factory.mktemp("pool") / "log"
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
