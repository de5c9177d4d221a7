"""An engine is a directory and one line: the example of ``docs/internals/engines.md`` runs as a worker."""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint

import httpx
import pytest

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Cancel, RefusalKind
from poolgrid.server.workers import bootstrap
from poolgrid.server.workers.engines import registry
from poolgrid.server.workers.engines.registry import GROUP, engine_definition, engines
from tests.workers.builders import make_request
from tests.workers.echo_engine.definition import EchoSettings
from tests.workers.fakes import PATIENCE_S, FakeConsolidator, Journal, fake_router


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line of a distribution."""
    point = EntryPoint("echo", "tests.workers.echo_engine.definition:ENGINE", GROUP)
    monkeypatch.setitem(engines(), "echo", point)


async def test_the_example_answers_refuses_cancels_and_drains_as_a_worker(registered: None) -> None:
    journal = Journal()
    async with FakeConsolidator(journal) as consolidator:
        settings = EchoSettings(consolidator=consolidator.endpoint, max_requests=1)
        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(bootstrap.serve(settings, stop, ready.set_result))
        async with asyncio.timeout(PATIENCE_S):
            url = await ready
        async with fake_router(journal.cards[0].request_endpoint) as router, httpx.AsyncClient() as client:
            await router.send(make_request("r", [5, 6, 7], 4))
            await router.until_finished("r")
            assert router.output("r") == pack_tokens([5, 6, 7, 5])
            await router.send(make_request("long", [5, 6, 7], 1_000_000))
            await router.until_started("long")
            health = (await client.get(f"{url}/health")).json()
            assert (health["status"], health["echoing"]) == ("ready", 1)
            await router.send(make_request("more", [5], 1))
            await router.until_finished("more")
            assert router.last("more").refusal is RefusalKind.BUSY
            await router.send(Cancel("long"))
            await router.until_finished("long")
            assert router.last("long").finish_reason == "cancelled"
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await serving
    assert journal.goodbyes == ["drained"]
    assert journal.cards[0].engine == "echo 1.0"


def test_the_registry_knows_what_it_is_told(registered: None) -> None:
    assert engine_definition("echo").title == "the echo engine"
    assert [engine_definition(name).settings.engine_name for name in engines()] == list(engines())
    with pytest.raises(KeyError):
        engine_definition("none")


def test_installation_without_entry_points_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed_plugins", lambda group: ())
    with pytest.raises(RuntimeError, match="install it again"):
        engines.__wrapped__()
