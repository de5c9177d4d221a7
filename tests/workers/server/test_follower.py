"""What follows engine servers beside a consolidator, in its process: servers of any kind, which come and go."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq.asyncio
from pydantic import ValidationError

from poolgrid.kernel.consolidation.pool_state import MemberRank
from poolgrid.kernel.wire.identifiers import Tier, WorkerId, WorkerKey
from poolgrid.server.cli.commands.consolidator import ServersBeside, follower_settings
from poolgrid.server.consolidator import bootstrap as consolidator
from poolgrid.server.consolidator.bootstrap import ConsolidatorEndpoints, MakePlanes
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings
from poolgrid.server.workers.bootstrap import FollowedServers
from poolgrid.server.workers.engines.server import engine, follower, health
from poolgrid.server.workers.engines.server.core.server_list import SERVERS_MAX, ServerEntry, read_entry
from poolgrid.server.workers.engines.server.follower import WatchedFile, WatchedName
from poolgrid.server.workers.engines.server.settings import FollowedServersSettings, FollowerSettings
from tests.fakes.engine_server.openai import OpenAiServer
from tests.fakes.engine_server.sglang import SglangServer
from tests.fakes.engine_server.trtllm_serve import TrtllmServe
from tests.fakes.engine_server.vllm import Options, VllmServer

PATIENCE_S = 60.0


class Beside(ServersBeside):
    """Shows the consolidator beside which it runs."""

    service: ConsolidatorService

    async def run(self, service: ConsolidatorService, make_context: MakePlanes, stop: asyncio.Event) -> None:
        """Follow."""
        type(self).service = service
        await super().run(service, make_context, stop)


class Following:
    """A consolidator with servers beside it."""

    def __init__(self, service: ConsolidatorService, url: str) -> None:
        self.service = service
        self.url = url

    def workers(self) -> dict[str, MemberRank]:
        return {key.worker_id: worker for key, worker in self.service.core.pool.workers.items() if key.dp_rank == 0}

    def blocks(self, worker_id: str) -> int:
        worker = self.service.core.pool.workers.get(WorkerKey(WorkerId(worker_id), 0))
        return 0 if worker is None else worker.presence.counts()[Tier.DEVICE]

    async def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait until something holds."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not holds():  # noqa: ASYNC110 - what is under test tells the consolidator
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"it never came that {what}: {self.workers()}") from None

    async def until_members(self, *worker_ids: str) -> None:
        await self.until(lambda: set(self.workers()) == set(worker_ids), f"{worker_ids} are the members")


@asynccontextmanager
async def following(*urls: str, **given: Any) -> AsyncIterator[Following]:
    settings = ConsolidatorProcessSettings(lease_ms=60_000)
    servers = FollowedServersSettings(engine_url=urls, **given)
    stop = asyncio.Event()
    ready: asyncio.Future[ConsolidatorEndpoints] = asyncio.get_running_loop().create_future()
    beside = Beside(FollowedServers(follower_settings(settings, servers)))
    serving = asyncio.create_task(consolidator.serve(settings, stop, ready.set_result, companion=beside))
    try:
        async with asyncio.timeout(PATIENCE_S):
            either: set[asyncio.Future[Any]] = {serving, ready}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            while not hasattr(Beside, "service"):  # noqa: ASYNC110 - it begins after the ready word
                await asyncio.sleep(0)
        yield Following(Beside.service, ready.result().http)
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await serving
        del Beside.service


@asynccontextmanager
async def stand_ins(*makers: Callable[[Any], VllmServer]) -> AsyncIterator[list[VllmServer]]:
    context = zmq.asyncio.Context()
    servers = [make(context) for make in makers]
    try:
        for each in servers:
            await each.start()
        yield servers
    finally:
        for each in servers:
            await each.stop()
        context.destroy(linger=0)


def vllm(context: Any, **options: Any) -> VllmServer:
    return VllmServer(context, Options(block_size=16, **options))


def sglang(context: Any) -> SglangServer:
    return SglangServer(context, Options(block_size=16))


def openai(context: Any) -> OpenAiServer:
    return OpenAiServer(context, Options())


def trtllm_serve(context: Any) -> TrtllmServe:
    return TrtllmServe(context, Options(block_size=32))


def name_of(server: VllmServer) -> str:
    return server.url.removeprefix("http://").replace(":", "-")


@pytest.fixture(autouse=True)
def _at_a_quicker_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(health, "FACTS_INTERVAL_MS", 100.0)
    monkeypatch.setattr(follower, "FILE_LOOK_S", 0.05)
    monkeypatch.setattr(follower, "DNS_LOOK_S", 0.05)
    monkeypatch.setattr(engine, "FIGURES_INTERVAL_S", 0.05)
    monkeypatch.setattr("poolgrid.server.workers.engines.server.opening.ASK_AGAIN_S", 0.05)
    monkeypatch.setattr("poolgrid.server.workers.engines.server.settings.EngineServerSettings.health_interval_ms", 50.0)


async def complete(client: httpx.AsyncClient, server: VllmServer, **body: Any) -> None:
    answer = await client.post(
        f"{server.url}/v1/completions", json={"model": "tiny", "prompt": list(range(80)), "max_tokens": 2, **body}
    )
    assert answer.status_code == 200


async def test_servers_of_every_kind_join_and_their_caches_are_known_exactly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        stand_ins(vllm, sglang, openai, trtllm_serve) as servers,
        following(*(each.url for each in servers)) as pool,
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        await pool.until_members(*map(name_of, servers))
        cards = [pool.workers()[name_of(each)].card for each in servers]
        assert [card.server_kind for card in cards] == ["vllm", "sglang", "openai", "trtllm-serve"]
        assert [card.server_url for card in cards] == [each.url for each in servers]
        assert [card.block_size for card in cards] == [16, 16, 16, 16], "16 where a server reports no size"
        await complete(client, servers[0])
        await pool.until(
            lambda: pool.blocks(name_of(servers[0])) == len(servers[0].caches[0].names()) == 5, "it is known"
        )
        lives = {name: worker.epoch for name, worker in pool.workers().items()}
        # Several looks at the figures of each, which some do not have.
        await asyncio.sleep(1.0)
        assert {name: worker.epoch for name, worker in pool.workers().items()} == lives
        assert "starts again" not in caplog.text


async def test_a_server_that_does_not_answer_delays_no_other_and_keeps_its_name_in_every_life() -> None:
    async with stand_ins(vllm, vllm) as (late, there):
        await late.stop()
        async with following(late.url, there.url) as pool:
            await pool.until_members(name_of(there))
            await late.start()
            await pool.until_members(name_of(there), name_of(late))
            await late.stop()
            await pool.until_members(name_of(there))
            await late.start()
            await pool.until_members(name_of(there), name_of(late))


async def test_a_server_may_come_back_as_one_of_another_kind() -> None:
    async with stand_ins(vllm, sglang) as (first, second):
        await second.stop()
        port = int(first.url.rpartition(":")[2])
        async with following(first.url) as pool:
            await pool.until_members(name_of(first))
            epoch = pool.workers()[name_of(first)].epoch
            await first.stop()
            second._http.port = port
            await second.start()
            name = name_of(first)
            await pool.until(
                lambda: name in pool.workers() and pool.workers()[name].card.server_kind == "sglang", "it is another"
            )
            assert pool.workers()[name].epoch > epoch


async def test_a_file_is_followed_and_one_that_is_broken_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "servers"

    def write(*lines: str) -> None:
        new = tmp_path / "new"
        new.write_text("\n".join(lines))
        os.replace(new, file)

    async with stand_ins(vllm, vllm) as (a, b):
        write(a.url)
        async with following(engine_urls_file=file) as pool, httpx.AsyncClient() as client:

            async def listed() -> dict[str, Any]:
                found: dict[str, Any] = (await client.get(f"{pool.url}/v1/servers")).json()
                return found

            await pool.until_members(name_of(a))
            write("# both", a.url, b.url)
            await pool.until_members(name_of(a), name_of(b))
            epoch = pool.workers()[name_of(a)].epoch
            for broken in (b"http://", b"\xff\xfe", b"x" * 4096):
                file.write_bytes(broken)
                caplog.clear()
                await pool.until(lambda: "cannot be read, those before stay" in caplog.text, "it is reported")
                assert set(pool.workers()) == {name_of(a), name_of(b)}
                assert str(file) in (await listed())["troubles"]
            file.unlink()
            await pool.until(lambda: "No such file" in caplog.text, "it is reported")
            write(b.url)
            await pool.until_members(name_of(b))
            assert (await listed())["troubles"] == {}
            write(a.url, b.url)
            await pool.until_members(name_of(a), name_of(b))
            assert pool.workers()[name_of(a)].epoch > epoch, "another life of the same worker"


async def test_operators_add_and_remove_servers_and_are_told_what_is_wrong() -> None:
    async with (
        stand_ins(vllm, openai, vllm) as (a, b, c),
        following(a.url, f"dns+http://localhost:{c.url.rpartition(':')[2]}") as pool,
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        at = f"{pool.url}/v1/servers"

        async def told(method: str, **request: Any) -> tuple[int, str]:
            answer = await client.request(method, at, **request)
            return answer.status_code, answer.json()["error"]["message"]

        await pool.until(lambda: {name_of(a), name_of(c)} <= set(pool.workers()), "both have joined")
        assert (await client.post(at, json={"url": b.url})).status_code == 202
        await pool.until(lambda: name_of(b) in pool.workers(), "it has joined")
        await pool.until(lambda: pool.workers()[name_of(b)].card.server_kind == "openai", "it is known")
        rows = {row["worker_id"]: row for row in (await client.get(at)).json()["servers"]}
        assert (rows[name_of(b)]["url"], rows[name_of(b)]["list"]) == (b.url, "given")
        assert rows[name_of(c)]["list"].startswith("dns+http://localhost")
        assert await told("POST", json={"url": a.url}) == (
            409,
            f"{a.url} is followed already, as one of given; nothing has changed",
        )
        assert (await told("DELETE", params={"url": c.url}))[0] == 409
        assert (await told("DELETE", params={"url": "http://nowhere:1"}))[0] == 404
        for wrong in ({"json": {"url": "gpu1:8000"}}, {"content": b"{"}, {}, {"json": {"url": "dns+http://a:1"}}):
            assert (await told("POST", **wrong))[0] == 400
        assert (await told("PUT"))[0] == 405
        assert (await client.post(at, json={"url": b.url}, headers={"origin": "http://evil"})).status_code == 403
        assert (await client.post(at, content=b"x" * 5000)).status_code == 413
        assert (await client.get(f"{pool.url}/health")).status_code == 200
        assert (await client.delete(at, params={"url": a.url})).status_code == 202
        await pool.until(lambda: name_of(a) not in pool.workers(), "it has left")
        assert {name_of(b), name_of(c)} <= set(pool.workers())


async def test_a_name_that_cannot_be_resolved_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [["10.0.0.1"], OSError("Name or service not known"), ["10.0.0.1", "fd00::2"]]

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert (host, port) == ("vllm", 8000)
        found = answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listed = read_entry("prefill=dns+http://vllm:8000")
    name = WatchedName(listed)  # type: ignore[arg-type]
    assert list(await name.look()) == [ServerEntry("http://10.0.0.1:8000", "prefill")]
    with pytest.raises(OSError, match="not known"):
        await name.look()
    assert [each.url for each in await name.look()] == ["http://10.0.0.1:8000", "http://[fd00::2]:8000"]


async def test_a_file_is_read_again_only_when_it_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "servers"
    file.write_text("http://a:1")
    watched = WatchedFile(file)
    reads = 0
    read = WatchedFile._read

    def counted(self: WatchedFile) -> Any:
        nonlocal reads
        reads += 1
        return read(self)

    monkeypatch.setattr(WatchedFile, "_read", counted)
    for _ in range(3):
        assert [each.url for each in await watched.look()] == ["http://a:1"]
    assert reads == 1
    file.write_text("# " + "x" * (2 * SERVERS_MAX * 2048) + "\nhttp://a:1")
    with pytest.raises(ValueError, match="more than"):
        await watched.look()


async def test_requests_that_pass_all_routers_are_reported_as_load() -> None:
    async with (
        stand_ins(vllm) as (server,),
        following(server.url) as pool,
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        await pool.until_members(name_of(server))
        gate = asyncio.Event()
        server.faults.holds.append(gate)
        asking = asyncio.create_task(complete(client, server))

        def foreign() -> int:
            load = pool.workers()[name_of(server)].load
            return -1 if load is None else load.foreign_requests

        await pool.until(lambda: foreign() == 1, "it is reported")
        gate.set()
        await asking
        await pool.until(lambda: foreign() == 0, "it is over")


async def test_what_cannot_be_a_pool_member_is_tried_again_and_keeps_no_other_from_serving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    async with (
        stand_ins(lambda context: vllm(context, key="secret"), vllm) as (closed, there),
        following(closed.url, there.url) as pool,
    ):
        await pool.until_members(name_of(there))
        await pool.until(lambda: "engine_api_key is missing" in caplog.text, "it is reported")
        closed.options.key = ""
        await pool.until_members(name_of(there), name_of(closed))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "neither engine_url nor engine_urls_file is given"),
        ({"engine_url": ("http://a:1", "http://a:1")}, "2 times"),
        ({"engine_url": ("a:1",)}, "allowed are"),
        ({"engine_urls_file": "/servers", "kv_events_endpoint": ("tcp://a:1",)}, "as many for each"),
        ({"engine_url": ("dns+http://a:1",), "kv_events_endpoint": ("tcp://a:1",)}, "single servers"),
        ({"engine_url": ("http://a:1",), "http_port": 65_500}, "as many ports"),
        ({"engine_url": ("http://a:1", "http://b:1"), "kv_events_endpoint": ("tcp://a:1",)}, "as many for each"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        FollowerSettings(**given)


def test_each_server_has_its_own_share_of_what_is_given_per_server_and_ports_of_its_own() -> None:
    settings = FollowerSettings(
        engine_url=("http://a:1", "prefill=http://b:1"),
        kv_events_endpoint=("tcp://a:1", "tcp://b:1"),
        request_port=7000,
        http_port=8000,
        max_batch_size=7,
    )
    second = settings.of_server(read_entry("prefill=http://b:1"), 1)  # type: ignore[arg-type]
    assert (second.worker_id, second.role, second.server_url) == ("b-1", "prefill", "http://b:1")
    assert (second.request_port, second.http_port, second.max_batch_size) == (7001, 8002, 7)
    assert second.kv_events_endpoint == ("tcp://b:1",)
    third = settings.of_server(read_entry("http://c:1"), 2)  # type: ignore[arg-type]
    assert (third.kv_events_endpoint, third.request_port) == ((), 7002)
