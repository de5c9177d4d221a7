"""The router process on a journal that is told by hand and links that are up when a test says so."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from prometheus_client import CollectorRegistry

from dispatch.worker_link import WorkerLink
from frontend.ports import InferenceRequest
from router.core.load_ledger import LoadLedger
from router.core.policy import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.projection import Projection
from router.core.selector import Selector
from router.metrics import RouterMetrics
from router.ports import JournalReader
from router.service import RouterService
from router.settings import RouterSettings
from runtime.clock import SystemClock
from wire.card import WorkerCard, WorkerLimits
from wire.events import AnyEvent, JournalRecord, WorkerJoined, WorkerLeft
from wire.hashing import pack_tokens
from wire.identifiers import Role, WorkerId, WorkerKey
from wire.requests import Generate, Sampling

OLD, NEW = WorkerKey(WorkerId("old")), WorkerKey(WorkerId("new"))


class ToldFeed:
    """A journal whose records a test hands over."""

    def __init__(self) -> None:
        self.offset = 0
        self.reader: JournalReader | None = None

    async def start(self, reader: JournalReader) -> None:
        self.reader = reader
        reader.on_snapshot(0, [], [])

    async def stop(self) -> None:
        pass

    def tell(self, *batches: tuple[WorkerKey, AnyEvent]) -> None:
        assert self.reader is not None
        records = []
        for worker, event in batches:
            records.append(JournalRecord(self.offset, worker.worker_id, 0, 1, 0, 0, 0, [event], "consolidator"))
            self.offset += 1
        self.reader.on_records(records)


def card(endpoint: str) -> WorkerCard:
    return WorkerCard("m", Role.AGGREGATED, 16, WorkerLimits(8, 1024, 100, 1600), endpoint)


def test_a_request_moves_to_a_worker_that_joins_in_the_turn_in_which_its_own_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its next place is chosen among workers that all have a link: the newcomer has one, and it is not up yet."""
    sent: list[str] = []

    def generate(link: WorkerLink, message: Generate) -> bool:
        if link.is_up:
            sent.append(link.endpoint)
        return link.is_up

    monkeypatch.setattr(WorkerLink, "generate", generate)

    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        settings = RouterSettings()
        projection = Projection(PrefixIndex(), LoadLedger())
        selector = Selector(projection, make_policy("kv", settings.cost_weights(), 0.0))
        feed = ToldFeed()
        metrics = RouterMetrics(CollectorRegistry())
        service = RouterService(settings, projection, selector, feed, metrics, SystemClock(), context)
        await service.start()
        try:
            before, after = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
            feed.tell((OLD, WorkerJoined(card(before))))
            service._links[before].is_up = True
            service._on_link_up(service._links[before])
            await service.submit(InferenceRequest("r", "m", pack_tokens(range(20)), Sampling(max_tokens=4)))

            feed.tell((OLD, WorkerLeft("drained")), (NEW, WorkerJoined(card(after))))

            assert service.counts() == (1, 1), "it waits for the newcomer to be reachable"
            assert set(service.unreachable) == {NEW}
            service._links[after].is_up = True
            service._on_link_up(service._links[after])
            assert service.counts() == (1, 0)
            assert sent == [before, after]
        finally:
            await service.stop()
            context.destroy(linger=0)

    asyncio.run(scenario())
