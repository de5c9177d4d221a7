"""A worker that starts its engine's server itself: ours, of the published protocol, as a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from lab.benchmarks.fleet import free_port
from poolgrid.kernel.wire.hashing import block_hashes, pack_tokens, sequence_hashes
from poolgrid.server.workers import bootstrap
from poolgrid.server.workers.engines.registry import engine_definition
from tests.e2e.processes import eventually
from tests.fakes.engine_server.vllm import answer_of
from tests.workers.fakes import PATIENCE_S, FakeConsolidator, Journal
from tests.workers.server.running import Running, index_of, worker_with

COMMAND = f"{sys.executable} -m tests.fakes.engine_server.process"
PROMPT = list(range(10, 31))


def own_server(directory: Path, *arguments: str, **changes: Any) -> dict[str, Any]:
    """Settings of a worker that starts one."""
    (directory / "tiny").mkdir(exist_ok=True)
    return {
        "model_path": str(directory / "tiny"),
        "engine_command": COMMAND,
        "engine_argument": arguments,
        "log_dir": directory / "logs",
        **changes,
    }


async def ready_process_of(running: Running) -> dict[str, Any]:
    """What the worker says of its server, once it has seen that it is ready."""
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as client:
        while True:
            state: dict[str, Any] = (await client.get(f"{running.http_url}/health")).json()["engine_server"]["process"]
            if state["state"] == "ready":
                return state
            await asyncio.sleep(0.02)


def servers_of(state: dict[str, Any]) -> list[psutil.Process]:
    return psutil.Process(state["process_group"]).children()


async def ask(running: Running, name: str) -> None:
    url = running.journal.cards[-1].server_url
    body = {"model": running.journal.cards[-1].model, "prompt": PROMPT, "max_tokens": 6, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": name})
    assert answer.json()["choices"][0]["token_ids"] == answer_of(PROMPT, 6)


def test_it_serves_dies_serves_again_and_ends_with_its_worker(tmp_path: Path) -> None:
    held = set(sequence_hashes(block_hashes(pack_tokens([*PROMPT, *answer_of(PROMPT, 5)]), 4)))

    async def scenario() -> list[psutil.Process]:
        async with worker_with(**own_server(tmp_path, "--max-model-len", "4096", served_model_name="small")) as running:
            assert running.journal.cards[0].model == "small"
            await ask(running, "first")
            await running.consolidator.until(lambda journal: index_of(journal.events) == held)
            state = await ready_process_of(running)
            assert state["restarts"] == 0
            (server,) = servers_of(state)
            server.kill()
            await running.consolidator.until(lambda journal: journal.goodbyes)
            await running.consolidator.until(lambda journal: len(journal.cards) > 1)
            # The new life holds nothing: what was claimed of the one before is gone.
            await running.consolidator.until(lambda journal: index_of(journal.events) == set())
            await ask(running, "second")
            await running.consolidator.until(lambda journal: index_of(journal.events) == held)
            state = await ready_process_of(running)
            assert state["restarts"] == 1
            group = [psutil.Process(state["process_group"]), *servers_of(state)]
            running.stop.set()
            async with asyncio.timeout(PATIENCE_S):
                await running.task
            return group

    for process in asyncio.run(scenario()):
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    words = (tmp_path / "logs" / "worker-0-server.log").read_text()
    assert words.count(f"serving {tmp_path}/tiny") == 2
    assert words.count("ending in order") == 1


async def test_one_that_keeps_dying_ends_its_worker(tmp_path: Path) -> None:
    async with worker_with(**own_server(tmp_path, engine_restarts_max=0)) as running:
        (server,) = servers_of(await ready_process_of(running))
        server.kill()
        with pytest.raises(RuntimeError, match=r"ended with status 137.*at most 0 times.*worker-0-server.log"):
            async with asyncio.timeout(PATIENCE_S):
                await running.task


def test_one_that_does_not_start_ends_its_worker_with_its_last_words(tmp_path: Path) -> None:
    def wrong(**settings: Any) -> Callable[[], None]:
        async def scenario() -> None:
            async with worker_with(**own_server(tmp_path, **settings)):
                raise AssertionError("it is ready without a server")

        return lambda: asyncio.run(scenario())

    with pytest.raises(RuntimeError, match="ended with status 3 before it was ready") as failed:
        wrong(engine_argument=("--fails", "3"))()
    assert str(failed.value).endswith("    loading weights\n    ValueError: no such model architecture")
    sleeps = f"{sys.executable} -I -S -c 'import signal; signal.pause()'"
    with pytest.raises(RuntimeError, match=r"did not answer within 0.3 s .start_timeout_ms.*which is empty"):
        wrong(engine_command=sleeps, start_timeout_ms=300)()
    with pytest.raises(ValueError, match="engine_command is 'no-such-engine serve', and there is no such program"):
        wrong(engine_command="no-such-engine serve")()


async def test_a_worker_that_is_stopped_meanwhile_leaves_no_server(tmp_path: Path) -> None:
    """The start may take minutes: nobody waits for it who wants the worker to end."""
    sleeps = f"{sys.executable} -I -S -c 'import signal; signal.pause()'"
    health = f"http://127.0.0.1:{(port := free_port())}/health"
    before = set(psutil.Process().children(recursive=True))

    def says_what_it_waits_for() -> bool:
        return "the vLLM server of worker-0 has been starting for" in httpx.get(health).json().get("reason", "")

    async with FakeConsolidator(Journal()) as consolidator:
        changes = {"consolidator": consolidator.endpoint, "http_port": port, "engine_command": sleeps}
        settings = engine_definition("vllm").settings.model_validate(own_server(tmp_path, **changes))
        stop = asyncio.Event()
        worker = asyncio.ensure_future(bootstrap.serve(settings, stop, lambda url: None))
        await asyncio.to_thread(eventually, "the worker says that its server starts", says_what_it_waits_for)
        assert set(psutil.Process().children(recursive=True)) > before
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await worker
    assert set(psutil.Process().children(recursive=True)) <= before
