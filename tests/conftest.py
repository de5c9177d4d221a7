"""What all tests need."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import zmq.asyncio
from hypothesis import HealthCheck, settings

from tests.examples import examples


def _leave(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Leave a context that nobody ended to the end of the process.

    A test that fails may leave one behind. pyzmq ends it when it is collected, which waits for its sockets; those that
    are collected with it are closed only afterwards, so the whole run waits for ever, in whatever test comes next.
    """


zmq.Context.__del__ = _leave  # type: ignore[method-assign]

_wake_up = asyncio.Server._wakeup  # type: ignore[attr-defined]


def _wake_up_once(server: Any) -> None:
    """Wake up who waits for a server's end, also when all of them were before.

    From Python 3.13 on a server does so again, and fails, when a connection is collected that a test's loop ended with:
    whatever test runs when that happens would fail for it.
    """
    if server._waiters is not None:
        _wake_up(server)


asyncio.Server._wakeup = _wake_up_once  # type: ignore[attr-defined]

TEST_TIMEOUT_S = 270
"""After so long a test that is a coroutine has failed: one that waits for ever is named, and holds up nobody."""

ANSWER_TIMEOUT_S = 120.0
"""What an answer may take where a test does not set a time. httpx gives up after five seconds, for which a process may
get no CPU on a busy machine."""

for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, ANSWER_TIMEOUT_S)

gc.set_threshold(10_000, 20, 10)
gc.disable()  # until all is imported and collected, which lives as long as the process
"""Tests that look for what is left behind collect by themselves; for all others it is some percent of the CPU."""

# How long an example takes says nothing on a machine that others use too.
settings.register_profile(
    "poolgrid", deadline=None, max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("poolgrid")


def keep_compiled() -> None:
    """Let every process that tests start find compiled what it imports, also where the environment says otherwise.

    Images for containers do. Each of hundreds of processes would compile a thousand modules, and take twice the CPU to
    start.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Let files come in our order, and clients trust one authority, which nobody is, instead of all of the world's.

    Every client reads them when it is made, also one that never speaks TLS: 20 ms of CPU, for each ``httpx.get``. What
    tests do with TLS brings its own authority. Processes that tests start inherit this one.
    """
    if hasattr(config, "workerinput"):
        return  # told by the process that started this one
    keep_compiled()
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist: files in the order in which we put them
    directory = tempfile.TemporaryDirectory(prefix="poolgrid-tests-")
    config.add_cleanup(directory.cleanup)
    path = Path(directory.name) / "authority.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    os.environ["SSL_CERT_FILE"] = str(path)
    if not any(Path(__file__).parent.glob("__pycache__/test_*-pytest-*.pyc")):
        turn_to_collect(path.parent).touch()


def turn_to_collect(directory: Path) -> Path:
    """Return the file that one of xdist's processes at a time holds, where nothing is compiled yet."""
    return directory / "collected"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """On a fresh checkout let the first of xdist's processes collect alone: the others find compiled what it compiled.

    To rewrite and compile all tests and all that they import takes longer than to import it, and each process would.
    """
    path = turn_to_collect(Path(os.environ["SSL_CERT_FILE"]).parent)
    if not hasattr(session.config, "workerinput") or not path.exists():
        return (yield)
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        is_first = not file.read()
        if not is_first:
            fcntl.flock(file, fcntl.LOCK_UN)
        collected = yield
        if is_first:
            file.write("once")
    return collected


def unit_of(nodeid: str) -> str:
    """Return what one of xdist's processes runs whole: a file, or all tests of a pool that modules share.

    Each process that has such a test starts the pool.
    """
    shared = re.match(r"tests/proxy/.*?\[((?:global )?router)\b", nodeid)
    return nodeid.partition("::")[0] if shared is None else shared[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give xdist's processes whole units."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = unit_of  # groups by marks, the public means, are lost in pytest 9
    return scheduler


SPREAD = 0.7
"""The share of the run over which units that start processes begin."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix units that start processes with the others, which compute while those wait, the longest first.

    In the end come only others: one that takes half a minute and comes last leaves a core idle.
    """
    units = list(dict.fromkeys(unit_of(item.nodeid) for item in items))
    with_processes = {unit_of(item.nodeid) for item in items if item.get_closest_marker("e2e") is not None}
    waiting = sorted((unit for unit in units if unit in with_processes), key=lambda unit: unit.endswith(".py"))
    computing = [unit for unit in units if unit not in with_processes]
    place = {unit: SPREAD * number / len(waiting) for number, unit in enumerate(waiting)}
    place |= {unit: number / len(computing) for number, unit in enumerate(computing)}
    items.sort(key=lambda item: place[unit_of(item.nodeid)])


def pytest_collection_finish() -> None:
    """Take what was imported and collected out of the collector's sight: it lives as long as the process.

    A full collection takes a second otherwise, and the tests that look for what is left behind need dozens.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    """Return a context of ZMQ, whose sockets are closed at the end."""
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), TEST_TIMEOUT_S))
    return True
