"""Several workers in one process: what ends one ends no other, and what they share is the process alone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from pydantic import ValidationError

from poolgrid.server.process import lifecycle, logs
from poolgrid.server.process.tasks import supervised
from poolgrid.server.workers.engines.registry import engine_definition
from poolgrid.server.workers.engines.server.settings import EngineServerSettings
from poolgrid.server.workers.server_workers import ServerWorkers
from poolgrid.server.workers.settings import WorkerProcessSettings

PATIENCE_S = 120.0


def settings_of(*urls: str, **given: object) -> EngineServerSettings:
    settings: EngineServerSettings = engine_definition("vllm").settings.model_validate(
        {"worker_id": "w", "engine_url": urls, **given}
    )
    return settings


class Lives:
    """Workers of a group that do as a test says: ``fate`` is what the first life of ``w-0`` does once it is ready."""

    def __init__(self, fate: Callable[[], Awaitable[None]], is_ready: bool = True) -> None:
        self._fate = fate
        self._is_ready = is_ready
        self.lives: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.ready: list[str] = []
        self._again = asyncio.Event()

    async def serve(self, settings: WorkerProcessSettings, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        name = settings.worker_id
        self.lives[name] += 1
        if self._is_ready:
            ready(f"http://{name}")
        if name == "w-0":
            if self.lives[name] == 1:
                await self._fate()
            else:
                self._again.set()
        await stop.wait()
        self.ends[name] += 1

    async def run(self, stop: asyncio.Event) -> None:
        """Run two workers until the first has had its second life."""
        group = ServerWorkers(settings_of("http://a", "http://b").workers(), self.serve, self.ready.append)
        running = asyncio.create_task(group.run(stop))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({running, asyncio.create_task(self._again.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert not stop.is_set()
            stop.set()
            await running


async def raises() -> None:
    raise ValueError("the server is another one than before")


async def loses_a_task() -> None:
    supervised(raises, "watch")


async def fails_in_a_callback() -> None:
    def fault() -> None:
        raise KeyError("a bug")

    fault.__globals__["__name__"] = "poolgrid.server.workers.anything"
    asyncio.get_running_loop().call_soon(fault)


@pytest.mark.parametrize("fate", [raises, loses_a_task, fails_in_a_callback])
def test_what_ends_one_worker_starts_it_again_and_leaves_the_others_alone(
    fate: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "__name__", __name__)  # a callback pretends to be the program's
    lives = Lives(fate)

    lifecycle.run(lives.run)

    assert lives.lives == {"w-0": 2, "w-1": 1}
    assert lives.ends["w-1"] == 1
    assert lives.ready == ["http://w-0"]


def test_the_process_ends_when_all_have_failed_and_none_was_ever_ready() -> None:
    async def serve(settings: WorkerProcessSettings, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        raise ValueError(f"{settings.worker_id} has a wrong option")

    group = ServerWorkers(settings_of("http://a", "http://b").workers(), serve, lambda url: None)
    with pytest.raises(ValueError, match="w-1 has a wrong option"):
        lifecycle.run(group.run)


def test_lines_of_the_log_name_the_worker_that_they_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(settings: WorkerProcessSettings, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        logging.getLogger("poolgrid.server.workers").warning("the same words")

    group = ServerWorkers(settings_of("http://a", "http://b").workers(), serve, lambda url: None)
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        logs.configure("w", log_format="json")
        lifecycle.run(group.run)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [each["worker"] for each in lines if each["message"] == "the same words"] == ["w-0", "w-1"]


def test_each_worker_has_its_own_name_ports_and_share_of_what_is_given_per_server() -> None:
    endpoints = tuple(f"tcp://a:{port}" for port in range(1, 5))
    first, second = settings_of(
        "prefill=http://a", "http://b", role="decode", request_port=7000, kv_events_endpoint=endpoints
    ).workers()

    assert (first.worker_id, first.server_url, first.role) == ("w-0", "http://a", "prefill")
    assert (second.worker_id, second.server_url, second.role) == ("w-1", "http://b", "decode")
    assert (first.request_port, second.request_port, second.http_port) == (7000, 7001, 0)
    assert (first.kv_events_endpoint, second.kv_events_endpoint) == (endpoints[:2], endpoints[2:])


def test_one_server_keeps_the_name_and_everything_that_was_given() -> None:
    (only,) = settings_of("http://a", request_port=7000).workers()

    assert (only.worker_id, only.request_port, only.server_url) == ("w", 7000, "http://a")


@pytest.mark.parametrize(
    ("urls", "given", "words"),
    [
        (("http://a", "decode=http://a"), {}, "engine_url is 'http://a' 2 times"),
        (("http://a", "http://b"), {"kv_events_endpoint": ("tcp://a:1",) * 3}, "3 times with 2 engine_url"),
        (("http://a", "http://b"), {"http_port": 65_535}, "need as many ports"),
        (("prefill=gpu1:8000",), {}, "reading the URL 'gpu1:8000'"),
    ],
)
def test_what_does_not_go_with_several_servers_is_refused(
    urls: tuple[str, ...], given: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        settings_of(*urls, **given)
