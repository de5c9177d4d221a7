"""A worker in front of trtllm-serve: of ours, which follows the published protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq.asyncio

from poolgrid.kernel.wire.events import BlocksStored, CacheCleared, RequestFinished
from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.requests import ForwardBegan, Forwarded
from tests.fakes.engine_server.trtllm_serve import StreamingServe, TrtllmServe
from tests.fakes.engine_server.vllm import Options, answer_of, rendered
from tests.workers.fakes import PATIENCE_S
from tests.workers.server.running import Front, index_of, worker_before


def endpoints_in(directory: Path) -> tuple[str, str]:
    return f"ipc://{directory}/events", f"ipc://{directory}/replay"


@asynccontextmanager
async def serving(
    options: Options | None = None, kind: type[TrtllmServe] = TrtllmServe, stream: Path | None = None
) -> AsyncIterator[TrtllmServe]:
    context = zmq.asyncio.Context()
    server = kind(context, options)
    if stream is not None:
        server.publish_at(*endpoints_in(stream))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        context.destroy(linger=0)


async def test_the_drained_events_are_the_index() -> None:
    async with (
        serving(Options(blocks=32)) as server,
        worker_before(server, "trtllm-serve", kv_block_size=4) as front,
    ):
        assert (front.journal.cards[0].engine, front.journal.cards[0].block_size) == ("trtllm-serve 1.3.0", 4)
        prompt = list(range(10, 31))
        for name in ("cold", "warm"):
            assert await front.ask(name, prompt, 6) == answer_of(prompt, 6)
        await front.consolidator.until(lambda journal: RequestFinished("warm", "length", 20) in journal.events)
        for number in range(12):  # evicts
            await front.ask(f"r{number}", [number] * 20, 9)
        await front.settled()
        # What another reader takes away is a hole: claims are taken back, and learnt again.
        server.events.clear()
        await server.stop()
        await front.consolidator.until(lambda journal: journal.goodbyes)
        await server.start()
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        await front.settled()


class FannedOut(TrtllmServe):
    """A server of 1.4: it passes on what is stored and removed, so that its numbers have holes."""

    version = "1.4.0rc4"

    def _say(self, data: dict[str, Any]) -> None:
        super()._say(data)
        self._event_id += 3
        self.events = [event for event in self.events if event["data"]["type"] != "created"]


async def test_the_holes_of_a_fan_out_are_no_losses() -> None:
    async with (
        serving(Options(blocks=32), FannedOut) as server,
        worker_before(server, "trtllm-serve", kv_block_size=4) as front,
    ):
        for number in range(12):  # evicts
            await front.ask(f"r{number}", [number] * 20, 9)
        await front.settled()
        assert CacheCleared() not in front.journal.events


async def test_a_server_that_does_not_say_its_block_size_is_routed_to_without_its_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server, worker_before(server, "trtllm-serve") as front:
        assert front.journal.cards[0].block_size == 16
        prompt = list(range(10, 60))
        await front.ask("r", prompt, 2)
        await front.consolidator.until(lambda journal: RequestFinished in map(type, journal.events))
        assert BlocksStored not in map(type, front.journal.events), "their size is not known"
        assert "it does not report its block size: give kv_block_size" in caplog.text


async def say(front: Front, name: str, text: str, salt: str = "", reported: bool = True) -> None:
    """Send a chat to the server, and report it to the worker as a router does."""
    if reported:
        await front.router.send(Forwarded(began=(ForwardBegan(name, 0, 40, 0, cache_salt=salt),)))
        await front.consolidator.until(
            lambda journal: any(name == getattr(e, "request_id", "") for e in journal.events)
        )
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=front.server.url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/chat/completions", json=body | ({"cache_salt": salt} if salt else {}))
    assert answer.status_code == 200, answer.text


def path_of(text: str, salt: str = "") -> set[int]:
    """Return the names of the blocks of a chat's prompt."""
    tokens = rendered([{"role": "user", "content": text}])
    return set(sequence_hashes(block_hashes(pack_tokens(tokens[: len(tokens) // 4 * 4]), 4, hash_seed("", salt))))


def followed(directory: Path) -> dict[str, Any]:
    endpoint, replay = endpoints_in(directory)
    return {"kv_events_endpoint": (endpoint,), "kv_events_replay_endpoint": (replay,)}


async def test_a_published_stream_is_the_index_with_the_blocks_of_each_tenant(tmp_path: Path) -> None:
    async with (
        serving(Options(block_size=4, blocks=64), StreamingServe, tmp_path) as server,
        worker_before(server, "trtllm-serve", **followed(tmp_path)) as front,
    ):
        card = front.journal.cards[0]
        assert (card.engine, card.block_size, card.limits.max_batch_size) == ("trtllm-serve 1.4.0rc4", 4, 8)
        for at in range(8):  # evicts
            await say(front, f"r{at}", f"{'abcd'[at % 4]} question to all, long enough", ("", "one", "two")[at % 3])
        await front.settled()
        # A new life of the server: what it held is gone.
        await server.stop()
        await front.consolidator.until(lambda journal: journal.goodbyes)
        await server.start()
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        await say(front, "again", "another question", "two")
        await front.settled()


async def test_blocks_of_a_salt_are_told_once_a_router_has_reported_it(tmp_path: Path) -> None:
    async with (
        serving(Options(block_size=4, blocks=256), StreamingServe, tmp_path) as server,
        worker_before(server, "trtllm-serve", **followed(tmp_path)) as front,
    ):
        await say(front, "", "a secret question", "of one", reported=False)
        await say(front, "last", "the last question")
        last, secret = path_of("the last question"), path_of("a secret question", "of one")
        assert server.caches[0].names() >= last | secret
        await front.consolidator.until(lambda journal: index_of(journal.events) >= last)
        assert index_of(front.journal.events).isdisjoint(secret)
        await say(front, "now", "another secret question", "of one")
        await front.consolidator.until(lambda journal: index_of(journal.events) >= secret)
        await front.settled()


async def test_the_events_of_ranks_that_the_server_chooses_are_not_followed(tmp_path: Path) -> None:
    twice = ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    async with serving(kind=StreamingServe, stream=tmp_path) as server:
        with pytest.raises(ValueError, match="chooses the rank of a request itself"):
            async with worker_before(server, "trtllm-serve", kv_events_endpoint=twice):
                pass
