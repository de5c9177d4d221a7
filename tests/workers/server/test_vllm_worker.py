"""A worker in front of vLLM's server: of ours, which follows the published protocol and fails as real ones do."""

from __future__ import annotations

import asyncio
import random
import re

import httpx
import pytest

from poolgrid.kernel.wire.events import (
    AnyEvent,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
)
from poolgrid.kernel.wire.requests import RefusalKind
from tests.fakes.engine_server.vllm import Options, VllmServer, answer_of
from tests.workers.builders import make_request
from tests.workers.fakes import PATIENCE_S
from tests.workers.server.running import Front, engine_server, index_of, worker_before


async def test_a_worker_learns_its_server_and_reports_what_routers_sent_there() -> None:
    async with (
        engine_server(Options(adapters=("poet",))) as server,
        worker_before(server) as front,
    ):
        card = front.journal.cards[0]
        assert (card.model, card.block_size, card.limits.max_sequence_length) == ("tiny", 4, 4096)
        assert (card.limits.total_kv_blocks, card.loras, card.engine) == (512, ("poet",), "vLLM 0.33.0")
        assert (card.server_url, card.server_kind, card.server_version) == (server.url, "vllm", "0.33.0")
        prompt = list(range(10, 31))
        for name in ("cold", "warm"):
            assert await front.ask(name, prompt, 6) == answer_of(prompt, 6)
        await front.settled()
        await front.consolidator.until(lambda journal: RequestFinished("warm", "length", 20) in journal.events)
        started = [each for each in front.journal.events if isinstance(each, RequestStarted)]
        assert all(each.cached_later for each in started)


async def test_a_request_by_token_ids_is_refused() -> None:
    async with engine_server() as server, worker_before(server) as front:
        await front.router.send(make_request("r", [1, 2, 3], 4))
        await front.router.until_finished("r")
        assert front.router.last("r").refusal is RefusalKind.CANNOT_DO
        assert not server.bodies


@pytest.mark.parametrize("drops", [False, True])
async def test_a_worker_before_a_busy_server_joins_once_the_replay_is_applied_with_all_of_it_as_one_statement(
    drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer begins late, and answers leave frames out where ``drops``; it joins when the last frame is read."""
    async with engine_server(Options(blocks=64)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for number in range(60):
                body = {"model": "tiny", "prompt": [3 + number] * 21, "max_tokens": 1}
                (await client.post("/v1/completions", json=body)).raise_for_status()
        publisher = server.publishers[0]
        for _ in range(20):
            publisher.kept.popleft()
        may_end = asyncio.Event()
        answered = 0

        async def slow_and_lossy(frames: list[bytes]) -> None:
            nonlocal answered
            seq = int.from_bytes(frames[-2], "big")
            if seq == publisher.seq - 1:
                await may_end.wait()
            if seq < publisher.seq:
                answered += 1
            if not drops or seq >= publisher.seq or answered % 9:
                await send(frames)

        send = publisher.router.send_multipart
        monkeypatch.setattr(publisher.router, "send_multipart", slow_and_lossy)
        starting = asyncio.create_task(_front_of(server))
        await asyncio.sleep(0.5)
        assert not starting.done()
        may_end.set()
        events, held = await asyncio.wait_for(starting, PATIENCE_S)

        assert isinstance(events[0], SnapshotBegan)
        assert held == server.caches[0].names()
        assert sum(isinstance(each, SnapshotBegan) for each in events) == 1


async def _front_of(server: VllmServer) -> tuple[list[AnyEvent], set[int]]:
    """Run a worker until it is ready and has listed what it holds; return what it reported."""
    async with worker_before(server) as front:
        await front.consolidator.until(lambda journal: SnapshotEnded() in journal.events)
        return list(front.journal.events), index_of(front.journal.events)


async def test_what_a_late_buffer_leaves_unknown_is_logged_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    async with engine_server(Options(blocks=64)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for number in range(6):
                body = {"model": "tiny", "prompt": [3 + number] * 21, "max_tokens": 1}
                (await client.post("/v1/completions", json=body)).raise_for_status()
        for _ in range(3):
            server.publishers[0].kept.popleft()
        async with worker_before(server) as front:
            assert "stored before frame 3" in caplog.text
            assert "buffer_steps" in caplog.text
            for number in range(20, 40):
                await front.ask(f"r{number}", [number] * 41)
            await front.settled()
            assert re.search(r"can be trusted again, \d\d blocks of 64 are known", caplog.text)
            await front.consolidator.until(
                lambda journal: (
                    [each.untimed for each in journal.events if isinstance(each, PrefillCompleted)] == [False] * 20
                )
            )


async def test_a_first_token_that_comes_while_lost_frames_are_replayed_is_reported_without_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine_server(Options(blocks=64)) as server, worker_before(server) as front:

        async def ask(name: str) -> None:
            await front.ask(name, [sum(name.encode())] * 21)

        async def held(frames: list[bytes]) -> None:
            await may_answer.wait()
            await send(frames)

        may_answer, send = asyncio.Event(), server.publishers[0].router.send_multipart
        monkeypatch.setattr(server.publishers[0].router, "send_multipart", held)
        server.lose = lambda seq: True
        await ask("lost")
        server.lose = lambda seq: False
        await ask("shows the hole")
        async with httpx.AsyncClient(base_url=front.http_url) as client:
            while (await client.get("/health")).json()["engine_server"]["events"][0]["state"] != "replaying":  # noqa: ASYNC110 - its state is not pushed
                await asyncio.sleep(0.01)
        await ask("behind")
        may_answer.set()
        await front.settled()
        await front.consolidator.until(lambda journal: PrefillCompleted("behind", True) in journal.events)

        told = {each.request_id: each.untimed for each in front.journal.events if isinstance(each, PrefillCompleted)}
        assert (told["lost"], told["behind"]) == (False, True)


@pytest.mark.parametrize(
    "options", [Options(tokens_per_chunk=3, torn=True), Options(arrays=True, sources_as_list=True)]
)
async def test_whatever_the_form_the_index_is_what_the_server_holds(options: Options) -> None:
    """Shared prefixes, turns, salts, evictions, lost frames, an emptied cache, a restart."""

    async def heard_again(front: Front) -> None:
        """Let a frame through, so that one that was lost at the end is missed."""
        front.server.lose = lambda seq: False
        await front.ask("probe", [7] * 9)
        await front.settled()
        front.server.lose = lambda seq: seq % 5 == 2

    options.blocks = 64
    source = random.Random(5)
    async with engine_server(options) as server, worker_before(server) as front:
        server.lose = lambda seq: seq % 5 == 2
        shared = [source.randrange(3, 4096) for _ in range(40)]
        number = 0

        async def round_of_requests() -> None:
            nonlocal number
            asking = []
            for _ in range(6):
                prompt = shared[: source.choice((8, 20, 40))] + [source.randrange(3, 4096) for _ in range(9)]
                # Arrays say no salts: what has one is left out of the index, and so of this comparison.
                salt = source.choice(("", "tenant-a")) if not options.arrays else ""
                name = f"r{number}"
                number += 1
                asking.append(front.ask(name, prompt, 7, cache_salt=salt or None))
            await asyncio.gather(*asking)

        for _ in range(4):
            await round_of_requests()
        await heard_again(front)
        await server.reset_prefix_cache()
        await round_of_requests()
        await heard_again(front)
        await server.stop()
        await server.start()  # so soon that nobody but the publisher's numbers tells of it
        await round_of_requests()
        await heard_again(front)
        await server.stop()
        await front.consolidator.until(lambda journal: journal.goodbyes)
        await server.start()
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        await round_of_requests()
        await heard_again(front)


async def test_the_worker_of_a_server_that_ends_leaves_the_pool_until_it_is_back() -> None:
    async with engine_server() as server, worker_before(server) as front:
        await server.stop()
        await front.consolidator.until(lambda journal: journal.goodbyes)
        async with httpx.AsyncClient() as client:
            health = (await client.get(f"{front.http_url}/health")).json()
        assert health["status"] == "unhealthy"
        await server.start()
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        assert await front.ask("again", [1, 2, 3], 4) == answer_of([1, 2, 3], 4)


async def test_a_server_that_hangs_is_given_up() -> None:
    async with engine_server() as server, worker_before(server, progress_timeout_ms=300) as front:
        await front.ask("well", [1, 2, 3, 4, 5], 2)
        await front.ask("hangs", [1, 2, 3], reports_end=False)
        await front.consolidator.until(lambda journal: journal.goodbyes)
        assert "1 requests have made no progress" in front.journal.goodbyes[0]


async def test_a_server_whose_cache_events_would_not_show_progress_is_not_given_up() -> None:
    options = Options(publishes=False)
    async with engine_server(options) as server, worker_before(server, progress_timeout_ms=50) as front:
        await front.ask("long", [1, 2, 3], reports_end=False)
        await asyncio.sleep(0.4)
        assert not front.journal.goodbyes


async def test_a_server_that_comes_back_as_another_one_ends_its_worker() -> None:
    async with engine_server() as server, worker_before(server) as front:
        await server.stop()
        await front.consolidator.until(lambda journal: journal.goodbyes)
        server.options.block_size = 8
        await server.start()
        with pytest.raises(RuntimeError, match="its block_size is 8, it was 4"):
            async with asyncio.timeout(PATIENCE_S):
                await front.task


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(publishes=False), "publishes no cache events: start it with --kv-events-config"),
        (Options(lists_sources=False), "give kv_events_endpoint"),
    ],
)
async def test_without_events_a_worker_serves_and_says_what_to_set(
    options: Options, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_server(options) as server, worker_before(server) as front:
        await front.ask("r", list(range(9)), 4)
        assert index_of(front.journal.events) == set()
    assert said in caplog.text
