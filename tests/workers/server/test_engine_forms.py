"""The newest forms of engine servers' caches and events: hashes that look ahead, pairs of tokens, ranks of attention,
ranks that begin above 0, replays of every rank, reports of what is reused. Whatever the form, what is followed of a
rank is what that rank holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio

from poolgrid.kernel.wire.events import AnyEvent, GroupsReported
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers.engines.server.cache_events import FollowedEvents
from poolgrid.server.workers.engines.server.core.server_facts import EventSource, ServerFacts
from poolgrid.server.workers.engines.server.dialects import sglang, vllm
from poolgrid.server.workers.engines.server.kinds import learn
from poolgrid.server.workers.engines.server.server_client import ServerClient
from tests.consolidator.pub_engine import block_stored
from tests.fakes.engine_server.cache import Drafting
from tests.fakes.engine_server.sglang import SglangServer
from tests.fakes.engine_server.vllm import Options, VllmServer
from tests.workers.fakes import PATIENCE_S
from tests.workers.server.running import engine_server, index_of, worker_before

KINDS = {"vllm": vllm.KIND, "sglang": sglang.KIND}
WORDS = 4096


class Followed:
    """A server that is asked what it is, and whose ranks are followed."""

    def __init__(self, server: VllmServer, kind: str) -> None:
        self.server = server
        self.kind = kind
        self.told: dict[int, list[AnyEvent]] = {}
        self.faults: list[str] = []
        self.facts = ServerFacts()
        self._client = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S)

    async def ask(self, prompt: list[int], count: int, rank: int = 0, **more: Any) -> int:
        """Have a rank serve a prompt; return its status."""
        if self.kind == "sglang":
            sampling = {"max_new_tokens": count}
            body = {"input_ids": prompt, "sampling_params": sampling, "stream": False, "rid": "r", **more}
            answer = await self._client.post("/generate", json=body | {"data_parallel_rank": rank})
        else:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": count, **more}
            headers = {"X-data-parallel-rank": str(rank)}
            answer = await self._client.post("/v1/completions", json=body, headers=headers)
        return answer.status_code

    async def settled(self) -> None:
        """Wait until every rank is known to hold exactly what it holds."""

        def is_known(rank: int) -> bool:
            return index_of(self.told.get(rank, ())) == self.server.caches[rank].names()

        await until(lambda: all(map(is_known, range(len(self.server.caches)))))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # a server, a socket and a follower have their turns


@asynccontextmanager
async def followed(
    make: Callable[[zmq.asyncio.Context], VllmServer], kind: str, block_size: int = 0
) -> AsyncIterator[Followed]:
    context = zmq.asyncio.Context()
    server = make(context)
    await server.start()
    made = Followed(server, kind)
    client = ServerClient(server.url, SystemClock(), "")
    sockets: zmq.Context[Any] = zmq.Context()
    try:
        made.facts = await learn(client, KINDS, kind, "")
        size = block_size or made.facts.block_size
        assert size
        events = FollowedEvents(made.facts.sources, size, sockets, SystemClock(), on_fault=made.faults.append)
        events.open(lambda rank, told: made.told.setdefault(rank, []).extend(told))
        await until(events.is_current)
        yield made
        events.close()
    finally:
        client.close()
        await made._client.aclose()
        await server.stop()
        sockets.destroy(linger=0)
        context.destroy(linger=0)


async def ask_much(front: Followed, **more: Any) -> None:
    """Shared prefixes, prompts that part anywhere, the same again, more than the cache holds, several at a time."""
    source = random.Random(7)
    shared = [source.randrange(3, WORDS) for _ in range(40)]
    ranks = range(front.server.options.first_rank, front.server.options.first_rank + front.server.options.ranks)
    for _ in range(8):
        asked = []
        for _ in range(5):
            prompt = shared[: source.randrange(1, 40)] + [
                source.randrange(3, WORDS) for _ in range(source.randrange(9))
            ]
            own = {name: source.choice(values) for name, values in more.items()}
            asked.append(front.ask(prompt, source.randrange(1, 9), source.choice(ranks), **own))
        assert set(await asyncio.gather(*asked)) == {200}
    front.server.lose = lambda seq: False
    for rank in ranks:  # the last frame of each arrives, so that a hole before it is seen
        assert await front.ask([rank] * 9, 1, rank) == 200
    await front.settled()


@pytest.mark.parametrize(
    "drafting",
    [None, Drafting(looks_ahead=1), Drafting(looks_ahead=3), Drafting(drops=True)],
    ids=["plain", "ahead", "modules", "drops"],
)
@pytest.mark.parametrize("reports", [False, True], ids=["", "reports"])
async def test_what_is_followed_of_vllm_is_what_it_holds(drafting: Drafting | None, reports: bool) -> None:
    """A block is held while one of its hashes is, and a report of what is reused is no copy of it."""
    options = Options(blocks=64, drafting=drafting)
    more = {"vllm_xargs": [{}, {"kv_cache_report_mode": "full"}]} if reports else {}
    async with followed(lambda context: VllmServer(context, options), "vllm") as front:
        await ask_much(front, **more)


async def test_what_an_engine_computes_again_is_learnt_from_its_events() -> None:
    """From vLLM 0.33 on nothing is: hashes cover the tokens behind a block."""
    for drafting, learnt in ((Drafting(drops=True), [(1, 0)]), (Drafting(looks_ahead=3), [(0, 3)]), (None, [])):
        options = Options(blocks=512, drafting=drafting)
        async with followed(lambda context, options=options: VllmServer(context, options), "vllm") as front:  # type: ignore[misc]
            prompt = list(range(10, 30))
            for turn in range(6):
                await front.ask(prompt + [100 + turn] * 9 * turn, 2)
            await front.settled()
        reports = [each for each in front.told[0] if isinstance(each, GroupsReported)]
        assert [(each.recomputed_blocks, each.following_tokens) for each in reports] == learnt, drafting


@pytest.mark.parametrize("drafting", [None, Drafting()], ids=["plain", "drafts"])
async def test_metrics_say_that_a_server_drafts_before_its_events_show_what_that_makes_it_compute_again(
    drafting: Drafting | None,
) -> None:
    chain = block_stored("map", [1, 2], None, list(range(8)))
    groups = [{"group_idx": at, "kv_cache_spec_kind": kind} for at, kind in enumerate(("full_attention", "mamba"))]
    async with engine_server(Options(drafting=drafting)) as server, worker_before(server) as front:
        await server.publishers[0].publish([chain | group for group in groups])
        await front.consolidator.until(lambda journal: index_of(journal.events))
        reports = [each for each in front.journal.events if isinstance(each, GroupsReported)]
    assert [each.recomputed_blocks for each in reports] == [1 if drafting else 0]


@pytest.mark.parametrize("pairs", [False, True], ids=["", "pairs"])
@pytest.mark.parametrize("attention_dp", [False, True], ids=["replicas", "attention"])
async def test_every_rank_of_sglang_is_followed_and_its_lost_frames_are_replayed(
    attention_dp: bool, pairs: bool
) -> None:
    options = Options(blocks=64, ranks=3)
    make = lambda context: SglangServer(context, options, attention_dp=attention_dp, draws_pairs=pairs)  # noqa: E731
    async with followed(make, "sglang") as front:
        assert front.facts.ranks == 3
        assert all(source.replay_endpoint for source in front.facts.sources)
        front.server.lose = lambda seq: seq % 3 == 1
        await ask_much(front, cache_salt=["", "tenant-a", "tenant-b"], lora_path=["", "poet"])


async def test_a_version_that_does_not_say_where_it_replays_is_asked_at_its_first_rank_alone() -> None:
    options = Options(ranks=2)
    async with followed(lambda context: SglangServer(context, options, version="0.5.9"), "sglang") as front:
        assert [bool(source.replay_endpoint) for source in front.facts.sources] == [True, False]
        await ask_much(front)


async def test_a_publisher_that_binds_an_address_is_not_doubted() -> None:
    async with followed(lambda context: SglangServer(context, Options(), binds=True), "sglang") as front:
        assert [source.doubt for source in front.facts.sources] == [""]
        await ask_much(front)


@pytest.mark.parametrize("lists_sources", [True, False])
async def test_numbers_of_ranks_that_begin_above_0_are_on_the_card(lists_sources: bool) -> None:
    """The second machine of a deployment with ``--data-parallel-hybrid-lb``, also where it lists no publishers."""
    options = Options(blocks=64, ranks=2, first_rank=4, lists_sources=lists_sources)
    async with engine_server(options) as server:
        endpoints = tuple(endpoint for endpoint, _ in server._endpoints)
        given: dict[str, Any] = {} if lists_sources else {"kv_events_endpoint": endpoints}
        async with worker_before(server, **given) as front:
            assert front.journal.cards[0].server_ranks == (4, 5)


def test_numbers_of_ranks_come_from_publishers_then_from_metrics_then_are_counted() -> None:
    sources = (EventSource(6, "tcp://a:1"), EventSource(7, "tcp://a:2"))
    assert ServerFacts(ranks=2, rank_numbers=(4, 5), sources=sources).numbers == (6, 7)
    assert ServerFacts(ranks=2, rank_numbers=(4, 5)).numbers == (4, 5)
    assert ServerFacts(ranks=3, rank_numbers=(4, 5)).numbers == (4, 5, 6)
    assert ServerFacts(ranks=2).numbers == (0, 1)
    assert ServerFacts(ranks=2, rank_numbers=(4, 5)).differs_from(ServerFacts(ranks=2, rank_numbers=(0, 1)))


async def test_tenants_of_sglang_are_in_the_index_where_its_events_name_them() -> None:
    context = zmq.asyncio.Context()
    server = SglangServer(context, Options())
    await server.start()
    try:
        async with worker_before(server, "sglang") as front:
            await front.ask("r", list(range(20)), 4, cache_salt="tenant-a")
            await front.settled()
    finally:
        await server.stop()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("options", "label", "words"),
    [
        (Options(block_size=4), {"kv_block_size": 6}, "it stores blocks of 4 tokens, and its label has 6"),
        (Options(block_size=4), {"kv_block_size": 8}, "it stores blocks of 4 tokens, and its label has 8"),
        (Options(ranks=2), {"data_parallel_size": 3}, "2 publishers are known and 3 ranks"),
    ],
)
async def test_a_label_that_does_not_fit_the_events_shows_on_the_card_and_the_readiness_of_the_worker(
    options: Options, label: dict[str, Any], words: str
) -> None:
    async with engine_server(options) as server, worker_before(server, **label) as front:
        await front.ask("r", list(range(40)), 4)
        await front.consolidator.until(lambda journal: words in journal.cards[-1].cache_events_fault)
        async with httpx.AsyncClient() as client, asyncio.timeout(PATIENCE_S):
            while (answer := await client.get(f"{front.http_url}/ready")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # it greets with another card, and serves as before
            assert words in answer.json()["cache_events_fault"]
            assert words in (await client.get(f"{front.http_url}/health")).json()["cache_events_fault"]


async def test_blocks_that_are_a_multiple_of_the_labels_are_known_as_so_many() -> None:
    """Servers report the unit of their scheduler, which may be smaller than the blocks of their events."""
    async with followed(lambda context: VllmServer(context, Options(block_size=8)), "vllm", block_size=4) as front:
        prompt = list(range(40))
        await front.ask(prompt, 1)
        await until(lambda: len(index_of(front.told.get(0, ()))) == 10)
        assert front.faults == []


async def test_events_of_another_rank_are_a_fault_until_those_of_the_rank_come() -> None:
    async with followed(lambda context: VllmServer(context, Options(first_rank=2)), "vllm") as front:
        (publisher,) = front.server.publishers
        publisher._rank = 3
        await front.ask(list(range(20)), 1, 2)
        await until(lambda: front.faults[-1:] == ["its publisher sends events of rank 3, and is followed for 2"])
        assert index_of(front.told.get(0, ())) == set()
        publisher._rank = 2
        await front.ask(list(range(100, 120)), 1, 2)
        await until(lambda: front.faults[-1] == "")
