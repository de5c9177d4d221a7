"""A consolidator whose start fails half way, or is given up, closes what it had opened."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from poolgrid.kernel.journal.framing import JournalCorrupt
from poolgrid.kernel.journal.ports import Journal
from poolgrid.server.cli.commands.consolidator import both
from poolgrid.server.consolidator import bootstrap
from poolgrid.server.consolidator import service as service_module
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings, ConsolidatorSettings, Tuning
from tests.process.leftovers import Broken, breaks, ended_leaving_nothing, refused_for_its_port


def starting(
    directory: Path, *, ready: Callable[[bootstrap.ConsolidatorEndpoints], None] = lambda at: None, **settings: Any
) -> Callable[[], Any]:
    """Return what starts a consolidator, and stops it as soon as it is ready."""

    async def serve() -> None:
        stop = asyncio.Event()

        def on_ready(at: bootstrap.ConsolidatorEndpoints) -> None:
            ready(at)
            stop.set()

        values = {"data_dir": directory / "journal", "ingest_port": 0, "http_port": 0, **settings}
        await bootstrap.serve(ConsolidatorProcessSettings(**values), stop, on_ready)

    return serve


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory in which one has begun and ended, so that every other one finds what it left there."""
    directory = tmp_path_factory.mktemp("used")
    ended_leaving_nothing(starting(directory))
    return directory


def test_one_that_is_stopped_leaves_nothing(directory: Path) -> None:
    ended_leaving_nothing(starting(directory))


@pytest.mark.parametrize("port", ["ingest_port", "feed_port", "query_port", "http_port"])
def test_one_whose_port_is_taken_leaves_nothing(port: str, directory: Path) -> None:
    refused_for_its_port(partial(starting, directory), port)


@pytest.mark.parametrize("step", [name for name in vars(bootstrap) if name.startswith("_open_")])
def test_one_whose_start_fails_at_any_step_leaves_nothing(
    step: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, step, breaks)

    ended_leaving_nothing(starting(directory), Broken)


@pytest.mark.parametrize("name", ["StateDumps", "Consolidator", "QueryPlane", "load_sources"])
def test_one_whose_service_breaks_anywhere_leaves_nothing(
    name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, name, breaks)

    ended_leaving_nothing(starting(directory), Broken)


def test_one_whose_journal_is_corrupt_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / f"{0:020d}.segment").write_bytes(b"not a journal" * 10)

    ended_leaving_nothing(starting(tmp_path), JournalCorrupt)


def test_one_that_cannot_say_that_it_is_ready_leaves_nothing(directory: Path) -> None:
    ended_leaving_nothing(starting(directory, ready=breaks), Broken)


def test_one_that_is_given_up_while_a_thread_opens_its_journal_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = threading.Event(), threading.Event()
    open_journal = bootstrap.open_journal

    def slowly(settings: ConsolidatorSettings, tuning: Tuning) -> Journal:
        opening.set()
        go_on.wait(20)
        return open_journal(settings, tuning)

    async def serve() -> None:
        serving = asyncio.ensure_future(starting(tmp_path)())
        await asyncio.to_thread(opening.wait, 20)
        serving.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await serving
        opening.clear()
        go_on.clear()

    monkeypatch.setattr(bootstrap, "open_journal", slowly)

    ended_leaving_nothing(serve)


async def test_one_that_is_given_up_while_its_journal_fails_leaves_no_error_that_nobody_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = threading.Event(), threading.Event()
    complaints: list[dict[str, Any]] = []

    def fail_late(_: ConsolidatorSettings, __: Tuning) -> Journal:
        opening.set()
        go_on.wait(20)
        raise Broken

    monkeypatch.setattr(bootstrap, "open_journal", fail_late)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    serving = asyncio.ensure_future(starting(tmp_path)())
    await asyncio.to_thread(opening.wait, 20)
    serving.cancel()
    loop.call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await serving
    del serving
    gc.collect()

    assert complaints == []


async def test_a_part_that_fails_ends_the_other_and_raises_its_own_error() -> None:
    ended = asyncio.Event()

    async def until_ended() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise OSError("no journal")

    with pytest.raises(OSError, match="no journal"):
        await both(until_ended(), fails())
    assert ended.is_set()
