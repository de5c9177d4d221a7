"""The router process on a journal that is told by hand and links that are up when a test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.decision.policy import Candidates, Choice, Policy, RoutingRequest
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.journal.ports import PoolListener
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.requests.inference import InferenceRequest, Refused, TokenStream
from poolgrid.kernel.requests.token_delivery import TokenDelivery
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import MediaSpec, WorkerCard, WorkerLimits
from poolgrid.kernel.wire.events import (
    FOLLOWED_GROUP,
    AnyEvent,
    BlocksStored,
    GroupsReported,
    JournalRecord,
    PrefillCompleted,
    RequestStarted,
    StreamStateChanged,
    WorkerJoined,
    WorkerLeft,
)
from poolgrid.kernel.wire.hashing import block_hashes, child_hash, pack_hashes, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import Role, StreamState, Tier, WorkerId, WorkerKey
from poolgrid.kernel.wire.ingest import LoadingWorker
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media
from poolgrid.kernel.wire.requests import (
    FinishReason,
    Generate,
    RefusalKind,
    Sampling,
    TokenDelta,
)
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.settings import with_constants
from poolgrid.server.router import fleet_links
from poolgrid.server.router.bootstrap import vocabulary_check
from poolgrid.server.router.choosing import LONG_PROMPT_BYTES
from poolgrid.server.router.fleet_links import CompatibilityCheck
from poolgrid.server.router.metrics import RouterMetrics
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.links import LINKS_MAX, WorkerLink
from poolgrid.server.serving.request_tracker import CHANGES_PER_TURN, LOST_TOGETHER_TURNS
from tests.frontend.fake_backend import TINY
from tests.frontend.inference_requests import like

OLD, NEW = WorkerKey(WorkerId("old")), WorkerKey(WorkerId("new"))


class ToldFeed:
    """A journal whose records a test hands over."""

    def __init__(self) -> None:
        self.offset = 0
        self.listener: PoolListener | None = None
        self.there: list[tuple[WorkerKey, AnyEvent]] = []
        """What a router finds when it starts."""

    async def start(self, listener: PoolListener) -> None:
        self.listener = listener
        listener.on_snapshot(0, [], [])
        if self.there:
            self.tell(*self.there)

    def trouble(self, now_ms: float) -> str:
        return ""

    def resync(self) -> None:
        raise AssertionError("a hole in what the test told")

    def loading(self) -> list[LoadingWorker]:
        return []

    def behind(self) -> int:
        return 0

    async def stop(self) -> None:
        pass

    def tell(self, *batches: tuple[WorkerKey, AnyEvent]) -> None:
        assert self.listener is not None
        records = []
        for worker, event in batches:
            records.append(JournalRecord(self.offset, worker.worker_id, 0, 1, 0, 0, 0, [event], "consolidator"))
            self.offset += 1
        self.listener.on_records(records)


def card(endpoint: str) -> WorkerCard:
    return WorkerCard("m", Role.AGGREGATED, 16, WorkerLimits(8, 1024, 100, 1600), endpoint)


class ToldDealer:
    """The connection of a link: it remembers requests instead of sending, and is there when a test says so."""

    def __init__(self, endpoint: str, sent: list[str]) -> None:
        self.last: Generate | None = None
        self.flushed: list[str] = []
        """Requests that left at once, and not at the end of the turn of the loop."""
        self._endpoint = endpoint
        self._sent = sent

    def send(self, frame: bytes) -> bool:
        message = codec.to_worker.decode(frame)
        if isinstance(message, Generate):
            self._sent.append(self._endpoint)
            self.last = message
        return True

    def flush(self) -> None:
        assert self.last is not None
        self.flushed.append(self.last.request_id)

    def close(self) -> None:
        pass


class Routed:
    """A router whose links are up when a test says so; ``sent`` has the endpoints that got a request."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        policy: Policy | None = None,
        links_max: int = LINKS_MAX,
        objection: CompatibilityCheck = lambda _: "",
        **settings_: Any,
    ) -> None:
        settings = with_constants(RouterSettings, settings_)
        projection = Projection(PrefixIndex(), LoadLedger())
        state = RouterState(Selector(projection, policy or make_policy("kv")))
        self.feed = ToldFeed()
        self.metrics = RouterMetrics(CollectorRegistry())
        self.links: dict[str, WorkerLink] = {}
        self.dealers: dict[str, ToldDealer] = {}
        self.sent: list[str] = []
        self.context = context
        self._clock = SystemClock()
        self.service = RouterService(
            settings, state, self.feed, self.metrics, self._clock, self._open_link, links_max, objection
        )

    def _open_link(
        self,
        endpoint: str,
        on_tokens: Callable[[WorkerLink, Iterator[TokenDelta]], bool],
        on_up: Callable[[WorkerLink], None],
        on_down: Callable[[WorkerLink, str], None],
    ) -> WorkerLink:
        link = WorkerLink(self.context, endpoint, 60_000, self._clock, on_tokens, on_up, on_down, lambda: None)
        link._dealer.close()
        link._dealer = self.dealers[endpoint] = ToldDealer(endpoint, self.sent)
        self.links[endpoint] = link
        return link

    def bring_up(self, endpoint: str) -> None:
        self.links[endpoint].is_up = True
        self.links[endpoint]._on_up(self.links[endpoint])

    def lose(self, endpoint: str, why: str = "connection lost") -> None:
        self.links[endpoint]._go_down(why)

    def say(self, endpoint: str, *deltas: TokenDelta) -> int:
        """Have a worker say something in one frame; return how many turns of the loop that is taken in."""
        rest = iter(deltas)
        turns = 1
        while not self.service.tracker.on_tokens(self.links[endpoint], rest):
            turns += 1
        return turns


@asynccontextmanager
async def routed(policy: Policy | None = None, links_max: int = LINKS_MAX, **settings: Any) -> AsyncIterator[Routed]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Routed(context, policy, links_max, **settings)
    await made.service.start()
    try:
        yield made
    finally:
        await made.service.stop()
        context.destroy(linger=0)


REQUEST = InferenceRequest("r", "m", pack_tokens(range(20)), Sampling(max_tokens=4))
BEFORE, AFTER = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"


@asynccontextmanager
async def half_reached() -> AsyncIterator[tuple[Routed, asyncio.Task[None]]]:
    """A router that is starting in a pool of two workers, of which it has reached one."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = Routed(context)
    router.feed.there = [(OLD, WorkerJoined(card(BEFORE))), (NEW, WorkerJoined(card(AFTER)))]
    starting = asyncio.create_task(router.service.start())
    try:
        await asyncio.sleep(0)
        router.bring_up(BEFORE)
        yield router, starting
    finally:
        await router.service.stop()
        context.destroy(linger=0)


async def test_a_router_that_starts_is_ready_once_the_workers_that_it_finds_are_reached() -> None:
    """Before, it would tell gateways and dry runs that nobody can serve."""

    async with half_reached() as (router, starting):
        await asyncio.sleep(0.01)
        assert not starting.done()
        assert not router.service.ready

        router.bring_up(AFTER)
        await starting
        assert router.service.ready
        assert router.service.links.unreachable == {}


async def test_a_router_that_starts_waits_for_a_dead_worker_only_so_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool that crashed as a whole is in the journal with leases that still run."""
    monkeypatch.setattr(fleet_links, "FIRST_CONTACT_MS", 20.0)

    async with half_reached() as (router, starting):
        await starting
        assert router.service.ready
        assert set(router.service.links.unreachable) == {NEW}
        assert "1 worker of the pool cannot be reached yet" in caplog.text


LISTS = StreamStateChanged("worker", StreamState.SYNCING, "its first 9 batches are awaited")
LISTED = StreamStateChanged("worker", StreamState.LIVE)


async def test_a_worker_that_joins_with_a_full_cache_gets_no_request_before_it_has_listed_it() -> None:
    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))), (OLD, LISTS))
        router.bring_up(BEFORE)
        waiting = asyncio.create_task(service.submit(REQUEST))
        await asyncio.sleep(0.01)
        assert service.unreachable == {OLD: fleet_links.LISTING}
        assert router.sent == []

        router.feed.tell((OLD, StreamStateChanged("worker", StreamState.SNAPSHOTTING)))
        await asyncio.sleep(0.01)
        assert router.sent == []

        router.feed.tell((OLD, LISTED))
        await waiting
        assert router.sent == [BEFORE]
        assert service.unreachable == {}


async def test_a_worker_whose_list_does_not_end_gets_requests_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_links, "LISTING_MAX_MS", 20.0)
    async with routed() as router:
        links = router.service.links
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))), (OLD, LISTS))
        router.bring_up(BEFORE)
        for now_ms in (0.0, 19.0):
            links.check(now_ms)
            assert set(links.unreachable) == {OLD}
        links.check(20.0)
        assert links.unreachable == {}
        assert "does not end the list" in caplog.text

        router.feed.tell((NEW, WorkerJoined(card(AFTER))))
        router.bring_up(AFTER)
        assert links.unreachable == {}, "it has had its time"


async def test_a_router_that_starts_is_ready_once_its_workers_have_listed_what_they_hold() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = Routed(context)
    router.feed.there = [(OLD, WorkerJoined(card(BEFORE))), (OLD, LISTS)]
    starting = asyncio.create_task(router.service.start())
    try:
        await asyncio.sleep(0)
        router.bring_up(BEFORE)
        await asyncio.sleep(0.01)
        assert not router.service.ready
        router.feed.tell((OLD, LISTED))
        await starting
        assert router.service.ready
    finally:
        await router.service.stop()
        context.destroy(linger=0)


async def test_a_request_moves_to_a_worker_that_joins_in_the_turn_in_which_its_own_breaks() -> None:
    """Its next place is chosen among workers that all have a link: the newcomer has one, and it is not up yet."""

    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        await service.submit(REQUEST)

        router.links[BEFORE].is_up = False
        router.feed.tell((OLD, WorkerLeft("drained")), (NEW, WorkerJoined(card(AFTER))))

        assert service.counts() == (1, 1), "it waits for the newcomer to be reachable"
        assert set(service.links.unreachable) == {NEW}
        router.bring_up(AFTER)
        assert service.counts() == (1, 0)
        assert router.sent == [BEFORE, AFTER]


async def test_a_frame_of_many_ends_is_taken_in_several_turns() -> None:
    async with routed() as router:
        service = router.service
        roomy = msgspec.structs.replace(card(BEFORE), limits=WorkerLimits(1000, 100_000, 10_000, 160_000))
        router.feed.tell((OLD, WorkerJoined(roomy)))
        router.bring_up(BEFORE)
        names = [f"r{number}" for number in range(2 * CHANGES_PER_TURN + 1)]
        for name in names:
            await service.submit(like(REQUEST, request_id=name))
        legs = service.tracker.legs_on(BEFORE)
        token = pack_tokens([7])

        assert router.say(BEFORE, *(TokenDelta(leg, 0, token) for leg in legs)) == 3
        assert router.say(BEFORE, *(TokenDelta(leg, 1, token) for leg in legs)) == 1, "more tokens are cheap"
        assert router.say(BEFORE, *(TokenDelta(leg, 2, token, FinishReason.LENGTH) for leg in legs)) == 3
        assert service.counts() == (0, 0)


async def test_who_asks_again_at_once_goes_to_the_worker_that_computed_the_prompt_though_no_event_has_come() -> None:
    """The answer of a few tokens is over before the stream of events says what it left in a cache."""

    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))), (NEW, WorkerJoined(card(AFTER))))
        router.bring_up(BEFORE)
        router.bring_up(AFTER)
        of_length = {"long": pack_tokens(range(800)), "short": pack_tokens(range(1000, 1400))}
        for length, overlap in (("long", 50), ("short", 0)):
            token_ids = of_length[length]
            first = like(REQUEST, request_id=f"{length}-1", token_ids=token_ids)
            await service.submit(first)
            went_to = router.sent[-1]
            [leg] = service.tracker.legs_on(went_to)
            router.say(went_to, TokenDelta(leg, 0, pack_tokens([7]), FinishReason.LENGTH))
            assert service.counts() == (0, 0)

            for name, followed in (("again", token_ids), ("other", token_ids[:-400] + pack_tokens(range(100)))):
                asked = like(REQUEST, request_id=f"{length}-{name}", token_ids=followed)
                decision = service.preview(asked)
                shared = overlap if name == "again" else overlap and (800 - 100) // 16
                assert decision.overlap_blocks == shared
                assert not overlap or service.links.get(router.sent[-1]) is service.links.to_worker(decision.worker)


async def test_where_hashes_look_ahead_the_tokens_behind_a_prompts_blocks_count() -> None:
    tokens = [*range(66)]
    path = sequence_hashes(block_hashes(pack_tokens(tokens), 16))
    behind = [child_hash(pack_tokens(tokens[16 * end :][:2]), path[end - 1]) for end in range(1, 5)]
    async with routed() as router:
        router.feed.tell(
            (OLD, WorkerJoined(card(BEFORE))),
            (OLD, GroupsReported((), following_tokens=2)),
            (OLD, BlocksStored(None, pack_hashes(path))),
            (OLD, BlocksStored(None, pack_hashes(behind), Tier.DEVICE, FOLLOWED_GROUP)),
        )
        router.bring_up(BEFORE)
        for asked, overlap in ((tokens, 4), ([*tokens[:65], 7], 3), (tokens[:65], 3), ([*tokens[:20], 7], 1)):
            decision = router.service.preview(like(REQUEST, token_ids=pack_tokens(asked)))
            assert decision.overlap_blocks == overlap


async def test_a_worker_that_has_nothing_of_this_router_to_do_gets_a_request_at_once() -> None:
    async with routed() as router:
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)

        async def submit(request_id: str) -> TokenStream:
            return await router.service.submit(like(REQUEST, request_id=request_id))

        streams = [await submit("first"), await submit("second")]
        assert router.dealers[BEFORE].flushed == ["first"]

        for stream in streams:
            stream.cancel()
        await submit("third")
        assert router.dealers[BEFORE].flushed == ["first", "third"]


async def test_a_predicted_first_token_is_kept_beside_what_it_became_and_a_target_is_told() -> None:
    async with routed(make_policy("kv")) as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        hints = {"headers": {"x-ttft-target-ms": "250"}}
        await service.submit(like(REQUEST, hints=hints))
        [decision] = service.tracker.decisions.of_request("r")
        assert decision.request.ttft_target_ms == 250.0
        assert decision.explanation().realised_ttft_ms is None

        router.feed.tell((OLD, RequestStarted("r", 20, 0, 2)), (OLD, PrefillCompleted("r")))

        explained = decision.explanation()
        assert explained.expected_ttft_ms is not None
        assert explained.realised_ttft_ms is not None


async def test_a_stream_whose_link_is_up_goes_on_when_a_lease_ends_its_workers_membership() -> None:
    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))), (NEW, WorkerJoined(card(AFTER))))
        router.bring_up(BEFORE)
        stream = await service.submit(REQUEST)
        router.bring_up(AFTER)

        router.feed.tell((OLD, WorkerLeft("lease expired: silent for 3000 ms")))
        await service.submit(like(REQUEST, request_id="s"))

        assert router.sent == [BEFORE, AFTER], "what is under way stays, what is new goes elsewhere"
        router.say(BEFORE, TokenDelta("r", 0, pack_tokens([1, 2, 3, 4]), FinishReason.LENGTH))
        [last] = await stream.next()
        assert last.finish_reason == "length"
        service.links.check(time.monotonic() * 1000)
        assert service.links.endpoints() == [AFTER], "nothing is under way on it any more"


async def test_a_stream_moves_when_the_link_of_a_worker_that_left_breaks_after_all() -> None:
    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))), (NEW, WorkerJoined(card(AFTER))))
        router.bring_up(BEFORE)
        await service.submit(REQUEST)
        router.bring_up(AFTER)
        router.feed.tell((OLD, WorkerLeft("lease expired: silent for 3000 ms")))

        router.lose(BEFORE)
        service.links.check(time.monotonic() * 1000)

        assert router.sent == [BEFORE, AFTER]
        assert service.links.endpoints() == [AFTER]


async def test_a_request_goes_back_to_a_worker_that_failed_it_when_there_is_no_other() -> None:
    """With one decode worker, the death of a prefill worker before its KV moved must not end the request."""

    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        stream = await service.submit(REQUEST)
        refusal = TokenDelta("r", 0, b"", FinishReason.ERROR, error="the KV is gone", refusal=RefusalKind.BROKEN)

        router.say(BEFORE, refusal)

        assert router.sent == [BEFORE, BEFORE]
        assert service.counts() == (1, 0)
        for attempt in range(1, 1 + RouterSettings().migration_limit):
            again = msgspec.structs.replace(refusal, request_id=f"r~{attempt}")
            router.say(BEFORE, again)
        [last] = await stream.next()
        assert last.error == "the KV is gone; moved 3 times already"


@pytest.mark.parametrize("kind", [RefusalKind.INVALID, RefusalKind.CANNOT_DO])
async def test_what_no_worker_can_do_ends_as_the_clients_fault(kind: RefusalKind) -> None:
    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        stream = await service.submit(REQUEST)
        for attempt in range(1 if kind is RefusalKind.INVALID else 1 + RouterSettings().migration_limit):
            dispatch_id = f"r~{attempt}" if attempt else "r"
            refusal = TokenDelta(dispatch_id, 0, b"", FinishReason.ERROR, error="no guides", refusal=kind)
            router.say(BEFORE, refusal)

        [last] = await stream.next()
        assert (last.finish_reason, last.unsupported) == ("error", True)
        assert service.counts() == (0, 0)


async def test_a_request_whose_only_worker_is_lost_waits_for_its_next_life_also_when_its_lease_ends() -> None:
    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        stream = await service.submit(REQUEST)
        router.lose(BEFORE)
        assert service.counts() == (1, 1)

        router.bring_up(BEFORE)
        assert (service.counts(), router.sent) == ((1, 0), [BEFORE, BEFORE])

        router.lose(BEFORE)
        router.feed.tell((OLD, WorkerLeft("lease expired")))
        assert service.counts() == (1, 1)

        router.feed.tell((OLD, WorkerJoined(card(AFTER))))
        router.bring_up(AFTER)
        assert (service.counts(), router.sent) == ((1, 0), [BEFORE, BEFORE, AFTER])

        router.lose(AFTER)
        router.feed.tell((OLD, WorkerLeft("lease expired")))
        service.queue.expire(service._clock.monotonic_ms() + RouterSettings().queue_timeout_ms + 1)
        [last] = await stream.next()
        assert (last.error, last.no_worker) == ("model 'm' has no worker in reach: none came within 60000 ms", True)


@pytest.mark.parametrize("together_ms", [100.0, -1.0], ids=["quick", "a router that gets no CPU in between"])
async def test_workers_of_one_process_that_are_lost_together_make_no_request_poison(
    together_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poolgrid.server.serving.request_tracker.LOST_TOGETHER_MS", together_ms)
    async with routed() as router:
        third = WorkerKey(WorkerId("third"))
        for key, endpoint in ((OLD, BEFORE), (NEW, AFTER), (third, "tcp://127.0.0.1:3")):
            router.feed.tell((key, WorkerJoined(card(endpoint))))
            router.bring_up(endpoint)
        await router.service.submit(REQUEST)
        for _ in range(2):
            router.lose(router.sent[-1])

        assert len(set(router.sent)) == 3
        assert router.metrics.poison_requests.value == 0


async def test_a_request_that_was_on_two_lost_workers_before_its_first_token_takes_no_third_one_with_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poolgrid.server.serving.request_tracker.LOST_TOGETHER_MS", -1.0)  # one after the other
    async with routed() as router:
        third = WorkerKey(WorkerId("third"))
        for key, endpoint in ((OLD, BEFORE), (NEW, AFTER), (third, "tcp://127.0.0.1:3")):
            router.feed.tell((key, WorkerJoined(card(endpoint))))
            router.bring_up(endpoint)
        stream = await router.service.submit(REQUEST)
        for _ in range(2):
            router.lose(router.sent[-1])
            for _ in range(LOST_TOGETHER_TURNS + 1):
                await asyncio.sleep(0)

        [last] = await stream.next()
        assert (last.finish_reason, last.poison) == ("error", True)
        assert "before its first token" in (last.error or "")
        assert len(router.sent) == 2
        assert router.service.counts() == (0, 0)
        assert router.metrics.poison_requests.value == 1
        names = {BEFORE: "old", AFTER: "new"}
        [said] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert "request r is not moved again" in said
        assert all(names.get(each, "third") in said for each in router.sent)


async def test_refusal_of_an_encode_worker_reaches_the_client_the_log_and_the_decision(
    caplog: pytest.LogCaptureFixture,
) -> None:
    image = MediaItem(MediaKind.IMAGE, b"pixels", "image/png", digest_media(b"pixels"), 4, 4)
    request = like(REQUEST, multimodal=MultimodalInput("look", (image,)))
    cause = "medium 0 (image/png) needs Pillow, which is not installed here"
    wanting = "the request has images without embeddings"
    media = MediaSpec(kinds=("image",), placeholder="<image>")
    async with routed() as router:
        for key, endpoint, role in ((OLD, BEFORE, Role.ENCODE), (NEW, AFTER, Role.AGGREGATED)):
            router.feed.tell((key, WorkerJoined(msgspec.structs.replace(card(endpoint), role=role, media=media))))
            router.bring_up(endpoint)
        stream = await router.service.submit(request)
        assert router.sent == [BEFORE]
        for number, (endpoint, why) in enumerate(((BEFORE, cause), (AFTER, wanting))):
            leg = f"r~{number}" if number else "r"
            refusal = TokenDelta(leg, 0, b"", FinishReason.ERROR, error=why, refusal=RefusalKind.CANNOT_DO)
            router.say(endpoint, refusal)

        [last] = await stream.next()
        assert last.unsupported
        assert last.error == f"{wanting}; its media were not encoded: old: {cause}"
        assert f"worker old did not encode its media: '{cause}'" in caplog.text
        attempts = [each.explanation() for each in router.service.tracker.decisions.of_request("r")]
        assert [(each.worker, each.failure) for each in attempts] == [("old", cause), ("new", wanting)]


async def test_a_request_outlives_workers_that_leave_refuse_or_are_lost_once_it_has_a_token() -> None:
    async with routed() as router:
        service = router.service
        for key, endpoint in ((OLD, BEFORE), (NEW, AFTER)):
            router.feed.tell((key, WorkerJoined(card(endpoint))))
            router.bring_up(endpoint)
        stream = await service.submit(REQUEST)
        router.lose(router.sent[-1])
        refusal = TokenDelta("r~1", 0, b"", FinishReason.ERROR, error="it is draining", refusal=RefusalKind.DRAINING)
        last = router.sent[-1]
        router.say(last, refusal)
        router.bring_up(router.sent[0])
        left = OLD if router.sent[-1] == BEFORE else NEW
        router.feed.tell((left, WorkerLeft("drained")))
        router.feed.tell((left, WorkerJoined(card("tcp://127.0.0.1:4"))))
        router.bring_up("tcp://127.0.0.1:4")
        active = service.tracker.requests["r"].machine
        assert active.plan.current is not None
        router.say(router.sent[-1], TokenDelta(active.plan.current.id, 0, pack_tokens((7,))))
        active.migrations = 0
        router.lose(router.sent[-1])

        assert not active.ended
        assert [delta.finish_reason for delta in await stream.next()] == [None]


async def test_a_request_that_is_cancelled_while_it_waits_to_move_on_ends_once_and_goes_nowhere() -> None:
    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        stream = await service.submit(REQUEST)
        router.links[BEFORE].is_up = False
        router.feed.tell((OLD, WorkerLeft("drained")), (NEW, WorkerJoined(card(AFTER))))
        router.links[AFTER].is_up = True

        stream.cancel()

        assert [delta.finish_reason for delta in await stream.next()] == ["cancelled"]
        assert await stream.next() == []
        assert service.counts() == (0, 0)
        assert router.sent == [BEFORE]


async def test_an_output_with_a_guide_moves_on_and_its_new_worker_may_say_that_it_cannot_go_on_with_it() -> None:
    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        guided = Sampling(max_tokens=4, guided_regex="a+")
        stream = await service.submit(like(REQUEST, sampling=guided))
        active = service.tracker.requests["r"].machine
        assert active.plan.current is not None
        router.say(BEFORE, TokenDelta(active.plan.current.id, 0, pack_tokens((7,))))
        router.feed.tell((NEW, WorkerJoined(card(AFTER))))
        router.bring_up(AFTER)

        router.links[BEFORE].is_up = False
        router.feed.tell((OLD, WorkerLeft("dead")))

        assert router.sent == [BEFORE, AFTER]
        for _ in range(RouterSettings().migration_limit + 1):
            assert active.plan.current is not None
            refusal = TokenDelta(
                active.plan.current.id,
                0,
                b"",
                FinishReason.ERROR,
                error="its guide has begun",
                refusal=RefusalKind.BROKEN,
            )
            router.say(AFTER, refusal)
        last = (await stream.next())[-1]
        assert last.finish_reason == "error"
        assert "its guide has begun" in (last.error or "")


async def test_what_a_worker_said_of_other_routers_requests_is_forgotten_soon() -> None:
    async with routed() as made:
        worker = WorkerKey(WorkerId("a"))
        made.feed.tell((worker, WorkerJoined(card(BEFORE))))
        made.bring_up(BEFORE)
        stream = await made.service.submit(REQUEST)
        refusal = TokenDelta(
            "r",
            0,
            b"",
            FinishReason.ERROR,
            error="crowded",
            refusal=RefusalKind.CROWDED,
            booked_prefill_tokens=5000,
        )
        made.say(BEFORE, refusal)

        ledger = made.service.projection.ledger
        slot = made.service.projection.index.slot(worker)
        assert made.sent == [BEFORE, BEFORE], "it was chosen again, with what the worker said"
        assert int(ledger.prefill_tokens[slot]) == 5000 + 20
        async with asyncio.timeout(120):
            while int(ledger.prefill_tokens[slot]) > 20:  # noqa: ASYNC110 - the ledger has no event for it
                await asyncio.sleep(0.01)
        assert len(ledger) == 1, "the request itself is still there"
        stream.cancel()


async def test_one_word_of_crowding_wakes_the_router_once_however_many_requests_are_reserved() -> None:
    async with routed() as made:
        worker = WorkerKey(WorkerId("a"))
        made.feed.tell((worker, WorkerJoined(card(BEFORE))))
        made.bring_up(BEFORE)
        service = made.service
        looks = 0
        expire = service.tracker.expire

        def counted() -> None:
            nonlocal looks
            looks += 1
            expire()

        service.tracker.expire = counted  # type: ignore[method-assign]
        ledger = service.projection.ledger
        slot = service.projection.index.slot(worker)
        now_ms = SystemClock().monotonic_ms()
        began_s = time.monotonic()
        for number in range(1000):  # one falls due in every millisecond to come
            ledger.reserve(worker, slot, f"reserved{number}", 1, 0, now_ms, 100.0 + number)
        stream = await service.submit(REQUEST)
        made.say(
            BEFORE,
            TokenDelta(
                "r", 0, b"", FinishReason.ERROR, None, "crowded", RefusalKind.CROWDED, booked_prefill_tokens=5000
            ),
        )

        async with asyncio.timeout(120):
            while service.tracker._overcommit_timer or not looks:  # noqa: ASYNC110 - the ledger has no event for it
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        # A timer may fire a moment before the word runs out, and looks once more; housekeeping looks every 1.25 s.
        assert 1 <= looks <= 3 + (time.monotonic() - began_s) // 1.25
        stream.cancel()


GOOD, BAD = "tcp://127.0.0.1:1", "tcp://http://w9:4001"


def sockets_of(context: zmq.Context[zmq.Socket[bytes]]) -> int:
    return sum(not socket.closed for socket in list(context._sockets))


async def test_a_worker_that_no_socket_can_be_made_to_is_nobody_elses_trouble() -> None:
    """Its card may be in a journal that was written before cards were checked so closely."""

    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BAD))))
        router.feed.tell((NEW, WorkerJoined(card(GOOD))))
        router.bring_up(GOOD)
        assert set(router.links) == {GOOD}
        await service.submit(REQUEST)
        assert router.sent == [GOOD]
        assert set(service.links.unreachable) == {OLD}
        assert f"no connection can be made to {BAD!r}" in service.links.unreachable[OLD]

        made = sockets_of(router.context)
        for number in range(20):  # each turn over the fleet tries again, and keeps nothing
            joined = WorkerKey(WorkerId(f"w{number}"))
            router.feed.tell((joined, WorkerJoined(card(GOOD))), (joined, WorkerLeft("gone")))
        assert sockets_of(router.context) == made

        router.feed.tell((OLD, WorkerLeft("replaced")), (OLD, WorkerJoined(card("tcp://127.0.0.1:2"))))
        router.bring_up("tcp://127.0.0.1:2")
        assert not service.links.unreachable


async def test_a_request_that_only_such_a_worker_could_take_is_refused_at_once_with_the_reason() -> None:
    async with routed() as router:
        router.feed.tell((OLD, WorkerJoined(card(BAD))))
        with pytest.raises(Refused, match="no connection can be made") as refused:
            await router.service.submit(REQUEST)
        assert refused.value.status == 503


async def test_a_worker_of_another_vocabulary_gets_no_requests_and_is_named_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def tiny(endpoint: str, vocabulary_size: int) -> WorkerCard:
        return msgspec.structs.replace(card(endpoint), model="tiny", vocabulary_size=vocabulary_size)

    async with routed(objection=partial(vocabulary_check, TINY)) as router:
        links = router.service.links
        router.feed.tell((OLD, WorkerJoined(tiny(BEFORE, 32_000))))
        assert not router.links
        with pytest.raises(Refused, match="token ids are below 32000, the tokenizer of model 'tiny' here has 4096"):
            await router.service.submit(like(REQUEST, model="tiny"))

        router.feed.tell((NEW, WorkerJoined(tiny(AFTER, 4096))))
        router.bring_up(AFTER)
        await router.service.submit(like(REQUEST, model="tiny"))
        assert router.sent == [AFTER]
        assert set(links.unreachable) == {OLD}

        router.feed.tell((OLD, WorkerLeft("replaced")), (OLD, WorkerJoined(tiny(BEFORE, 4096))))
        router.bring_up(BEFORE)
        assert not links.unreachable
    assert caplog.text.count("gets no requests") == 1


def test_the_vocabularies_of_padded_models_and_of_workers_that_say_nothing_are_taken() -> None:
    def objection(model: str, vocabulary_size: int) -> str:
        return vocabulary_check(
            TINY, msgspec.structs.replace(card(BEFORE), model=model, vocabulary_size=vocabulary_size)
        )

    assert [objection("tiny", size) for size in (0, 4000, 4096, 4224)] == [""] * 4
    assert objection("tiny", 5000)
    assert not objection("another model, which has no tokenizer here", 5000)


async def test_cards_make_a_bounded_number_of_connections_and_a_worker_that_leaves_makes_room() -> None:
    async with routed(links_max=3) as router:
        keys = [WorkerKey(WorkerId(f"w{number}")) for number in range(50)]
        for number, key in enumerate(keys):
            router.feed.tell((key, WorkerJoined(card(f"tcp://127.0.0.1:{number + 1}"))))
        service = router.service
        assert len(service.links) == 3
        assert "there are 3 connections to workers, the most that fit" in service.links.unreachable[keys[3]]
        router.feed.tell((keys[0], WorkerLeft("gone")))
        assert len(service.links) == 3
        assert "tcp://127.0.0.1:4" in service.links.endpoints()


class BrokenPolicy:
    """Somebody's own policy, which fails at requests of one name."""

    name = "own"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        if request.request_id == "bad":
            raise ZeroDivisionError("no weights")
        return Choice(7 if request.request_id == "wild" else 0, "first")


@pytest.mark.parametrize(
    ("request_id", "words"),
    [("bad", "policy 'own' raised ZeroDivisionError: no weights"), ("wild", "chose row 7 of 1 candidates")],
)
async def test_a_policy_that_fails_costs_its_request_a_500_with_its_name_and_nothing_else(
    request_id: str, words: str
) -> None:
    async with routed(BrokenPolicy()) as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        with pytest.raises(Refused, match=words) as refused:
            await service.submit(like(REQUEST, request_id=request_id))
        assert (refused.value.status, refused.value.code) == (500, "policy_failed")

        stream = await service.submit(REQUEST)
        assert router.sent == [BEFORE]
        assert service.counts() == (1, 0)
        stream.cancel()


async def test_a_policy_that_fails_at_the_head_of_the_line_lets_those_behind_it_go_on() -> None:
    async with routed(BrokenPolicy()) as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        waiting = [asyncio.ensure_future(service.submit(like(REQUEST, request_id=name))) for name in ("bad", "good")]
        while service.counts() != (0, 2):  # noqa: ASYNC110 - a line tells nobody
            await asyncio.sleep(0)

        router.bring_up(BEFORE)

        bad, good = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(bad, Refused)
        assert bad.status == 500
        assert isinstance(good, TokenDelivery)
        good.cancel()


async def test_a_request_waits_for_a_connection_that_has_broken_in_this_moment() -> None:
    """Between the end of a connection and the loop's turn in which its link hears of it, nothing can be sent."""
    async with routed() as router:
        router.feed.tell((WorkerKey(WorkerId("w")), WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        router.links[BEFORE].is_up = False

        waiting = asyncio.ensure_future(router.service.submit(REQUEST))
        await asyncio.sleep(0)
        assert router.service.counts() == (0, 1)
        router.lose(BEFORE)
        router.bring_up(BEFORE)

        async with asyncio.timeout(120):
            await waiting
        assert router.sent == [BEFORE]


async def test_stopping_ends_streams_and_refuses_those_that_wait_and_sends_nothing_more() -> None:
    async with routed() as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        waiting = asyncio.ensure_future(service.submit(like(REQUEST, request_id="waits")))
        while service.counts() != (0, 1):  # noqa: ASYNC110 - a line tells nobody
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        router.bring_up(BEFORE)
        streams = [await service.submit(like(REQUEST, request_id=f"s{number}")) for number in range(16)]
        waiting = asyncio.ensure_future(service.submit(like(REQUEST, request_id="full")))
        while service.counts() != (16, 1):  # noqa: ASYNC110 - a line tells nobody
            await asyncio.sleep(0)

        await service.stop()

        with pytest.raises(Refused, match="shutting down") as refused:
            await waiting
        assert refused.value.status == 503
        for stream in streams:
            [last] = await stream.next()
            assert (last.finish_reason, last.error) == ("error", "the router is shutting down")
        assert len(router.sent) == 16, "whoever waited is not sent to a worker at the end"
        assert service.counts() == (0, 0)


def long_request(request_id: str, first_token: int = 0) -> InferenceRequest:
    """A request whose prompt is hashed in several turns of the loop, if none before it began with ``first_token``."""
    return like(REQUEST, request_id=request_id, token_ids=pack_tokens(range(first_token, first_token + LONG_TOKENS)))


LONG_TOKENS = LONG_PROMPT_BYTES


def roomy_card(endpoint: str) -> WorkerCard:
    """The card of a worker that takes many of them."""
    return WorkerCard("m", Role.AGGREGATED, 16, WorkerLimits(64, 1024, LONG_TOKENS, 2 * LONG_TOKENS), endpoint)


async def test_client_that_leaves_at_any_turn_while_its_prompt_is_hashed_is_cancelled_and_leaves_nothing() -> None:
    async with routed(make_policy("round-robin")) as router:
        service = router.service
        router.feed.tell((OLD, WorkerJoined(roomy_card(BEFORE))))
        router.bring_up(BEFORE)
        turn = 0
        while True:
            turn += 1
            leaving = asyncio.ensure_future(service.submit(long_request("leaves", turn * LONG_TOKENS)))
            for _ in range(turn):
                await asyncio.sleep(0)
            if leaving.done():
                break
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert service.counts() == (0, 0)

        assert turn > 2, "the prompt is hashed in one go: it has to be longer"
        assert router.sent == [BEFORE]


async def test_router_that_stops_while_a_prompt_is_hashed_refuses_it() -> None:
    async with routed(make_policy("round-robin")) as router:
        router.feed.tell((OLD, WorkerJoined(roomy_card(BEFORE))))
        router.bring_up(BEFORE)
        hashed = asyncio.ensure_future(router.service.submit(long_request("r")))
        await asyncio.sleep(0)

        router.service.end_requests()

        with pytest.raises(Refused, match="shutting down") as refused:
            await hashed
        assert refused.value.status == 503
        assert router.sent == []


async def test_of_two_long_prompts_with_one_id_that_are_hashed_at_once_one_is_refused() -> None:
    async with routed(make_policy("round-robin")) as router:
        router.feed.tell((OLD, WorkerJoined(roomy_card(BEFORE))))
        router.bring_up(BEFORE)
        submitted = [router.service.submit(long_request("r", first)) for first in (0, LONG_TOKENS)]

        results = await asyncio.gather(*submitted, return_exceptions=True)

        assert router.sent == [BEFORE]
        [refused] = [result for result in results if isinstance(result, Refused)]
        assert refused.code == "duplicate_request"


async def test_housekeeping_that_fails_is_logged_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with routed(worker_timeout_ms=100) as router:
        checked = asyncio.Event()
        check = router.service.links.check
        failures = [KeyError("a bug of ours"), KeyError("again")]

        def failing(now_ms: float) -> None:
            if failures:
                raise failures.pop()
            check(now_ms)
            checked.set()

        router.service.links.check = failing  # type: ignore[method-assign]
        async with asyncio.timeout(120):
            await checked.wait()

    assert "task 'router housekeeping' failed: it starts again" in caplog.text
    assert "a bug of ours" in caplog.text
