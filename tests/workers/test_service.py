"""A whole worker process on real sockets: requests in, tokens and events out, restarts, drain."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from functools import partial

import httpx
import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksStored,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
    TurnBegan,
    TurnEnded,
    WorkerDraining,
)
from poolgrid.kernel.wire.hashing import block_hashes, pack_tokens, sequence_hashes
from poolgrid.kernel.wire.identifiers import Stage, Tier
from poolgrid.kernel.wire.requests import (
    Cancel,
    Drain,
    FinishReason,
    Generate,
    Ping,
    RefusalKind,
    Routing,
    Sampling,
    TokenDelta,
)
from poolgrid.kernel.wire.sessions import SessionTurn, TurnAnswer
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.kernel.worker_protocol.push_stream import PushStream
from poolgrid.plugins.simulated.opening import make_card
from poolgrid.plugins.simulated.real_time import RealTimeSimulatedEngine
from poolgrid.server.cli.commands.drain import Told, drain_here
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers import bootstrap
from poolgrid.server.workers.adapters.http_api import HttpApi, is_from_here
from poolgrid.server.workers.adapters.sockets import CONSOLIDATOR, DealerSocket
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.publisher import EventPublisher
from tests.workers.builders import fold, make_request, prefill_leg
from tests.workers.fakes import PATIENCE_S, FakeConsolidator, FakeRouter, Journal, QuietEngine, fake_router
from tests.workers.running import assembled, expected, make_settings, running_worker

ONE_TOKEN = pack_tokens([1])


async def test_requests_get_their_tokens_and_the_pool_hears_of_everything() -> None:
    async with running_worker() as worker:
        requests = [make_request(f"r{number}", range(number, number + 20), max_tokens=12) for number in range(6)]
        for request in requests:
            await worker.router.send(request)
        await worker.router.until_finished(*(request.request_id for request in requests))

        for request in requests:
            assert worker.router.output(request.request_id) == expected(request)
            assert worker.router.last(request.request_id).finish_reason == "length"
        await worker.consolidator.until(
            lambda journal: sum(isinstance(event, RequestFinished) for event in journal.events) == 6
        )
        kinds = {type(event) for event in worker.journal.events}
        assert {RequestStarted, PrefillCompleted, RequestFinished, LoadReported} <= kinds
        held = fold(worker.journal.events)[Tier.DEVICE]
        for request in requests:
            tokens = request.token_ids + expected(request)
            # The KV of the last token is never computed.
            assert set(sequence_hashes(block_hashes(tokens[:-4], 4))) <= held
        assert [batch.seq for batch in worker.journal.batches] == list(range(len(worker.journal.batches)))


async def test_all_requests_of_a_peer_share_one_frame_per_step() -> None:
    async with running_worker(speedup=1.0) as worker:
        for number in range(8):
            await worker.router.send(make_request(f"r{number}", range(4), max_tokens=6))
        await worker.router.until_finished(*(f"r{number}" for number in range(8)))

        assert max(len(batch.deltas) for batch in worker.router.batches) == 8
        steps = [batch.step for batch in worker.router.batches]
        assert steps == sorted(set(steps))


async def test_an_id_that_another_peer_uses_is_refused_as_busy_so_its_router_goes_elsewhere() -> None:
    async with running_worker(speedup=1.0) as worker, fake_router(worker.request_endpoint) as other:
        request = make_request("same", range(8), max_tokens=10)
        await worker.router.send(request)
        await worker.router.until_started("same")
        await other.send(request)
        await other.until_finished("same")
        await worker.router.until_finished("same")

        refusal = other.last("same")
        assert (refusal.finish_reason, refusal.refusal) == ("error", RefusalKind.BUSY)
        assert "already active" in (refusal.error or "")
        assert worker.router.output("same") == expected(request)


@pytest.mark.parametrize(
    ("request_", "named", "kind"),
    [
        (make_request("r", range(10), max_tokens=5000), "max_sequence_length", None),
        (make_request("r", (), max_tokens=5), "prompt has 0 tokens", None),
        (Generate("r", ONE_TOKEN, Sampling(5), routing=Routing(lora_name="x")), "lora_name", RefusalKind.CANNOT_DO),
        (Generate("r", ONE_TOKEN, Sampling(5), routing=Routing(dp_rank=3)), "dp_rank is 3", None),
        (Generate("r", ONE_TOKEN, Sampling(5, guided_regex="a+")), "guided_regex is set", RefusalKind.CANNOT_DO),
        (Generate("r", ONE_TOKEN, Sampling(5), routing=Routing(emitted_tokens=2)), "emitted_tokens is 2", None),
    ],
)
async def test_a_request_that_cannot_run_is_answered_with_the_reason(
    request_: Generate, named: str, kind: RefusalKind | None
) -> None:
    async with running_worker() as worker:
        await worker.router.send(request_)
        await worker.router.until_finished("r")

        refusal = worker.router.last("r")
        assert (refusal.finish_reason, refusal.refusal, refusal.token_ids) == ("error", kind, b"")
        assert named in (refusal.error or "")


async def test_undecodable_frames_are_dropped_and_counted() -> None:
    async with running_worker() as worker:
        for frame in (b"", b"\xc1", b"\x93\xa8Generate", b"\x91\xa4Nope"):
            await worker.router.send_raw(frame)
        request = make_request("r", range(5))
        await worker.router.send(request)
        await worker.router.until_finished("r")

        assert worker.router.output("r") == expected(request)
        assert await worker.metric("poolgrid_worker_undecodable_frames_total", socket="requests") == 4


async def test_an_answer_that_is_read_whole_comes_in_few_pieces_and_is_the_same() -> None:
    async with running_worker(speedup=50.0) as worker:
        request = make_request("whole", range(40), max_tokens=100, tokens_together=32)
        await worker.router.send(request)
        await worker.router.send(make_request("stream", range(40), max_tokens=100))
        await worker.router.until_finished("whole", "stream")

        pieces = worker.router.deltas["whole"]
        assert [len(piece.token_ids) // 4 for piece in pieces] == [1, 32, 32, 32, 3]
        assert [piece.position for piece in pieces] == [0, 1, 33, 65, 97]
        assert worker.router.output("whole") == expected(request)
        assert len(worker.router.deltas["stream"]) > 20

        await worker.router.send(make_request("left", range(40), max_tokens=900, tokens_together=32))
        await worker.router.until_started("left")
        await worker.router.send(Cancel("left"))
        await worker.router.until_finished("left")
        assert worker.router.last("left").finish_reason == "cancelled"
        worker.router.output("left")  # without holes


async def test_the_turn_of_a_session_is_told_before_its_start_and_its_answer_when_the_router_has_seen_it() -> None:
    turn = SessionTurn("s", 7, tail=1, anchor=1)
    answer = TurnAnswer("r", 7, "s", 48, 5)
    async with running_worker() as worker:
        request = make_request("r", range(40), max_tokens=8)
        await worker.router.send(msgspec.structs.replace(request, turn=turn))
        await worker.router.until_finished("r")
        await worker.router.send(Cancel("r", (answer,)))
        await worker.consolidator.until(lambda journal: TurnEnded(answer) in journal.events)

        events = worker.journal.events
        began = events.index(TurnBegan("r", 40, turn))
        started = next(at for at, each in enumerate(events) if isinstance(each, RequestStarted))
        assert began < started
        assert worker.router.last("r").finish_reason == "length", "an answer that is told cancels nothing"


async def test_a_cancelled_request_ends_at_once_and_frees_its_blocks() -> None:
    async with running_worker(speedup=1.0) as worker, fake_router(worker.request_endpoint) as stranger:
        await worker.router.send(make_request("r", range(40), max_tokens=900))
        await worker.router.until_started("r")
        await stranger.send(Cancel("r"))
        await stranger.send(Ping(1))
        await stranger.pong()
        await worker.router.receive()
        assert worker.router.last("r").finish_reason is None

        await worker.router.send(Cancel("r"))
        await worker.router.until_finished("r")

        assert worker.router.last("r").finish_reason == "cancelled"
        await worker.consolidator.until(lambda journal: RequestFinished("r", "cancelled") in journal.events)
        health = (await worker.get("/health")).json()
        assert (health["running_requests"], health["active_blocks"]) == (0, 0)


async def test_a_silent_peer_loses_its_requests_and_a_pinging_one_does_not() -> None:
    async with running_worker(speedup=1.0, peer_lease_ms=200) as worker:
        async with fake_router(worker.request_endpoint) as silent:
            await silent.send(make_request("silent", range(8), max_tokens=900))
            await worker.router.send(make_request("pinging", range(8), max_tokens=200))
            while RequestFinished("silent", "cancelled") not in worker.journal.events:
                await worker.router.send(Ping(1))
                await worker.router.pong()

        assert RequestFinished("pinging", "cancelled") not in worker.journal.events
        assert await worker.metric("poolgrid_worker_peer_lease_expiries_total") == 1


async def test_a_router_that_stood_still_is_told_what_was_let_go_of_as_soon_as_it_speaks_again() -> None:
    """Its connection stands all the while: without a word its clients would wait for ever."""

    async with running_worker(speedup=1.0, peer_lease_ms=200) as worker:
        router = worker.router
        await router.send(make_request("let go", range(8), max_tokens=900))
        await router.until_started("let go")
        while RequestFinished("let go", "cancelled") not in worker.journal.events:  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.02)
        assert not [delta for delta in router.deltas["let go"] if delta.finish_reason]

        await router.send(Ping(1))
        await router.until_finished("let go")

        last = router.last("let go")
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BUSY), "it goes on elsewhere"
        assert "its router was silent" in (last.error or "")
        await router.send(make_request("next", range(8), max_tokens=3))
        await router.until_finished("next")
        assert [delta.finish_reason for delta in router.deltas["let go"] if delta.finish_reason] == ["error"]


async def test_a_peer_that_disconnects_loses_its_requests_long_before_its_lease() -> None:
    async with running_worker(speedup=1.0) as worker:
        async with fake_router(worker.request_endpoint) as gone:
            await gone.send(make_request("r", range(8), max_tokens=900))
            await gone.until_started("r")

        await worker.consolidator.until(lambda journal: RequestFinished("r", "cancelled") in journal.events)
        assert await worker.metric("poolgrid_worker_lost_peers_total") == 1


@pytest.mark.parametrize("remembers", [True, False])
async def test_nothing_is_lost_when_the_consolidator_restarts_under_load(remembers: bool) -> None:
    async with running_worker(speedup=5.0) as worker:
        await worker.router.send(make_request("before", range(30), max_tokens=8))
        await worker.router.send(make_request("across", range(100, 130), max_tokens=120))
        await worker.router.until_finished("before")
        async with asyncio.timeout(PATIENCE_S):  # a history of which nothing was acknowledged needs no snapshot
            while await worker.metric("poolgrid_worker_outbox_batches", dp_rank="0") >= len(worker.journal.batches):
                pass
        port = worker.consolidator.port
        await worker.consolidator.__aexit__(None, None, None)
        await worker.router.send(make_request("meanwhile", range(200, 230), max_tokens=8))
        await worker.router.until_finished("meanwhile")
        journal = worker.journal if remembers else Journal()

        async with FakeConsolidator(journal, port, name="c1") as consolidator:
            await worker.router.until_finished("across")
            await consolidator.until(lambda journal: RequestFinished("across", "length") in journal.events)

            assert journal.epoch == worker.journal.epoch
            held = fold(journal.events)[Tier.DEVICE]
            assert held >= set(sequence_hashes(block_hashes(pack_tokens(range(200, 230)), 4)))
            if remembers:
                assert [batch.seq for batch in journal.batches] == list(range(len(journal.batches)))
                assert RequestFinished("meanwhile", "length") in journal.events
            else:
                kinds = [type(event) for event in journal.events]
                assert kinds[0] is SnapshotBegan
                assert SnapshotEnded in kinds
                assert held >= set(sequence_hashes(block_hashes(pack_tokens(range(30)), 4)))
                restated = next(event for event in journal.events if isinstance(event, RequestStarted))
                assert restated.request_id == "across"
            assert (await worker.get("/ready")).status_code == 200
            assert (await worker.get("/ready?role=aggregated")).status_code == 200
            refused = await worker.get("/ready?role=prefill")
            assert refused.status_code == 503
            assert refused.json()["reason"] == "this worker's role is aggregated, not prefill"


async def test_a_draining_worker_finishes_what_it_has_refuses_the_rest_and_says_goodbye() -> None:
    async with running_worker(speedup=2.0) as worker:
        request = make_request("running", range(20), max_tokens=60)
        await worker.router.send(request)
        await worker.router.until_started("running")
        worker.stop.set()
        await worker.consolidator.until(lambda journal: WorkerDraining() in journal.events)
        assert (await worker.get("/ready")).status_code == 503
        assert (await worker.get("/health")).json()["status"] == "draining"
        await worker.router.send(make_request("late", range(20)))
        await worker.router.until_finished("late", "running")
        await worker.ended()

        refusal = worker.router.last("late")
        assert (refusal.finish_reason, refusal.refusal) == ("error", RefusalKind.DRAINING)
        assert "draining" in (refusal.error or "")
        assert worker.router.output("running") == expected(request)
        assert worker.journal.goodbyes == ["drained"]
        assert RequestFinished("running", "length") in worker.journal.events


async def test_what_does_not_finish_in_the_drain_timeout_is_handed_over() -> None:
    async with running_worker(speedup=1.0, shutdown_timeout_ms=50) as worker:
        request = make_request("long", range(20), max_tokens=900)
        await worker.router.send(request)
        await worker.router.until_started("long")
        worker.stop.set()
        await worker.router.until_finished("long")
        await worker.ended()

        last = worker.router.last("long")
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.DRAINING)
        assert expected(request).startswith(worker.router.output("long"))
        assert RequestFinished("long", "migrated") in worker.journal.events
        assert worker.journal.goodbyes == ["drained"]


@pytest.mark.parametrize("way", ["request plane", "HTTP"])
async def test_an_ordered_drain_hands_over_and_the_worker_waits_to_be_ended(way: str) -> None:
    async with running_worker(speedup=1.0) as worker:
        request = make_request("long", range(20), max_tokens=900)
        await worker.router.send(request)
        await worker.router.until_started("long")
        if way == "HTTP":
            assert (await worker.post("/drain")).json()["status"] == "draining"
            assert (await worker.post("/drain?timeout_ms=50")).status_code == 202
        else:
            await worker.router.send(Drain())
            await worker.router.send(Drain(50))  # the earlier end holds
        await worker.router.until_finished("long")
        await worker.router.send(Drain(60_000))
        await worker.router.send(make_request("late", range(20)))
        await worker.router.until_finished("late")

        last = worker.router.last("long")
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.DRAINING)
        assert expected(request).startswith(worker.router.output("long"))
        assert worker.router.last("late").refusal is RefusalKind.DRAINING
        assert (await worker.get("/health")).json()["status"] == "drained"
        assert (await worker.get("/ready")).status_code == 503
        assert worker.journal.events.count(WorkerDraining()) == 1
        assert worker.journal.goodbyes == [], "it stays in the pool until its process is ended"
        worker.stop.set()
        await worker.ended()
        assert worker.journal.goodbyes == ["drained"]


async def test_only_its_own_machine_drains_a_worker_over_http() -> None:
    async with running_worker() as worker:
        for path, status in (("/drain?timeout_ms=x", 400), ("/drain?timeout_ms=86400001", 400)):
            assert (await worker.post(path)).status_code == status
        assert (await worker.get("/drain")).status_code == 405
        assert (await worker.get("/health")).json()["status"] == "ready"
        # As a preStop hook does.
        assert await asyncio.to_thread(drain_here, worker.http_url, Told(25_000, PATIENCE_S), False) == 0
        assert (await worker.get("/health")).json()["status"] == "drained"
    here = {"client": ("10.0.0.7", 4711), "server": ("10.0.0.7", 9000)}
    assert is_from_here(here)
    assert is_from_here({"client": ("::1", 4711), "server": ("::1", 9000)})
    assert not is_from_here(here | {"client": ("10.0.0.8", 4711)})
    assert not is_from_here(here | {"client": None})


async def test_health_live_ready_and_metrics_are_served() -> None:
    async with running_worker() as worker:
        await worker.router.send(make_request("a", range(20)))
        await worker.router.until_finished("a")
        await worker.router.send(make_request("b", range(20)))
        await worker.router.until_finished("b")

        assert (await worker.get("/live")).status_code == 200
        assert (await worker.get("/ready")).status_code == 200
        assert (await worker.get("/other")).status_code == 404
        health = (await worker.get("/health")).json()
        assert (health["status"], health["worker_id"]) == ("ready", "w0")
        assert await worker.metric("poolgrid_worker_requests_total") == 2
        assert await worker.metric("poolgrid_worker_finished_requests_total", reason="length") == 2
        assert await worker.metric("poolgrid_worker_cached_tokens_total") == 16
        assert await worker.metric("poolgrid_worker_registered", dp_rank="0") == 1


async def test_a_taken_port_is_named() -> None:
    async with running_worker() as worker:
        port = int(worker.http_url.rpartition(":")[2])
        settings = make_settings(worker.consolidator.endpoint, http_port=port)
        with pytest.raises(OSError, match=f"binding http_port: 127.0.0.1:{port} cannot be used"):
            await bootstrap.serve(settings, asyncio.Event(), lambda _: None)


async def test_a_refused_worker_keeps_asking_and_joins_when_it_may() -> None:
    journal = Journal()
    async with FakeConsolidator(journal, refuse="block_size is 4, the pool has 32") as consolidator:
        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(bootstrap.serve(make_settings(consolidator.endpoint), stop, ready.set_result))
        await consolidator.until(lambda journal: journal.refusals)
        assert not ready.done()
        consolidator.refuse = ""
        async with asyncio.timeout(PATIENCE_S):
            await ready
            stop.set()
            await task
        assert journal.goodbyes == ["drained"]


class BreakingEngine(QuietEngine):
    """An engine that accepts everything and then raises."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()

    def describe(self) -> dict[str, object]:
        return {"feed": "special"}

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        await self.broken.wait()
        raise RuntimeError("the device fell off")

    def submit(self, request: Generate) -> None:
        self.broken.set()


async def test_when_the_engine_breaks_requests_go_elsewhere_and_the_pool_hears_why() -> None:
    async with assembled(BreakingEngine()) as worker:
        assert worker.service.describe()["feed"] == "special", "an engine may add to what /health says"
        running, journal = worker.run(asyncio.Event()), worker.consolidator.journal
        async with fake_router(worker.card.request_endpoint) as router:
            await worker.consolidator.until(lambda journal: journal.cards)
            await router.send(make_request("r"))
            await router.until_finished("r")
            with pytest.raises(RuntimeError, match="the device fell off"):
                await running

            last = router.last("r")
            assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
            assert "the device fell off" in journal.goodbyes[0]


class BreakingLaterEngine(BreakingEngine):
    """An engine that computes prompts at once, keeps their KV, and raises when a test says so."""

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        self._deliver = deliver
        await super().run(deliver)

    def submit(self, request: Generate) -> None:
        if request.stage is Stage.PREFILL:
            prefilled = TokenDelta(request.request_id, 0, ONE_TOKEN, FinishReason.PREFILLED)
            asyncio.get_running_loop().call_soon(self._deliver, EngineReport([prefilled], {}))


async def test_an_engine_that_breaks_after_a_router_left_is_told_to_the_others_and_to_the_pool() -> None:
    engine = BreakingLaterEngine()
    async with assembled(engine) as worker:
        consolidator, endpoint = worker.consolidator, worker.card.request_endpoint
        running = worker.run(asyncio.Event())
        async with fake_router(endpoint) as staying:
            async with fake_router(endpoint) as leaving:
                await consolidator.until(lambda journal: journal.cards)
                await leaving.send(make_request("running"))
                await leaving.send(prefill_leg(make_request("kept")))
                await leaving.until_finished("kept")
                await staying.send(make_request("other"))
                await staying.send(Ping(1))
                await staying.pong()  # what came before it has been taken
            (owner,) = {worker.service._peers.owners["running"], worker.service._peers.owners["kept"]}
            assert owner is not None
            async with asyncio.timeout(PATIENCE_S):
                while worker.socket.send(owner, b""):  # noqa: ASYNC110 - ZMQ hears of a peer's end with no event
                    await asyncio.sleep(0.01)
            engine.broken.set()
            with pytest.raises(RuntimeError, match="the device fell off"):
                await running

            await staying.until_finished("other")
            assert staying.last("other").refusal == RefusalKind.BROKEN
            assert "the device fell off" in consolidator.journal.goodbyes[0]


class SickEngine(BreakingEngine):
    """An engine that lives and does nothing."""

    unhealthy_reason = "nothing has moved for 60000 ms"


async def test_an_engine_that_is_not_well_takes_no_requests_and_probes_hear_why() -> None:
    engine = SickEngine()
    async with assembled(engine) as worker:
        api = HttpApi(worker.registry)
        assert api.answer("GET", "/started", b"")[0] == 503
        api.show(worker.service)
        stop = asyncio.Event()
        running = worker.run(stop)
        async with fake_router(worker.card.request_endpoint) as router:
            await worker.publisher.until_registered()
            await router.send(make_request("r"))
            await router.until_finished("r")
            last = router.last("r")
            assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
            assert "is not well" in (last.error or "")
            status, _, body = api.answer("GET", "/health", b"")
            assert (status, json.loads(body)["status"]) == (503, "unhealthy")
            assert json.loads(body)["reason"] == engine.unhealthy_reason
            assert api.answer("GET", "/ready", b"")[0] == 503
            assert api.answer("GET", "/live", b"")[0] == api.answer("GET", "/started", b"")[0] == 200
            for query, wanted in ((b"dp_rank=1", 400), (b"dp_rank=x", 400), (b"dp_rank=0", 200), (b"", 200)):
                assert api.answer("GET", "/blocks", query)[0] == wanted
            engine.unhealthy_reason = ""
            assert worker.service.is_ready
        stop.set()
        await running


PROGRAM = """
import asyncio, sys
from poolgrid.server.process import lifecycle
from poolgrid.server.workers.bootstrap import serve
from poolgrid.server.workers.adapters.sockets import RequestSocket
from poolgrid.kernel.worker_protocol.push_stream import PushStream
from poolgrid.kernel.worker_protocol.engine import EngineReport
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.publisher import EventPublisher
from poolgrid.server.workers.service import ServiceLimits, WorkerService
from poolgrid.plugins.simulated.settings import SimulatedWorkerSettings
SimulatedWorkerSettings.first_token_id = 10  # a constant, so not among the settings
settings = SimulatedWorkerSettings.model_validate_json(sys.argv[1])
async def main(stop):
    await serve(settings, stop, lambda url: print("ready", url, flush=True))
lifecycle.run(main)
"""


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.e2e
async def test_a_worker_process_ends_on_sigterm_after_its_requests_and_at_once_on_a_second(signals: int) -> None:
    journal = Journal()
    async with FakeConsolidator(journal) as consolidator:
        settings = make_settings(consolidator.endpoint, speedup=2.0).model_dump_json()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, settings, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                assert (await process.stdout.readline()).startswith(b"ready http://127.0.0.1:")
            async with fake_router(journal.cards[0].request_endpoint) as router:
                request = make_request("r", range(20), max_tokens=60 if signals == 1 else 1000)
                await router.send(request)
                await router.until_started("r")
                process.send_signal(signal.SIGTERM)
                await consolidator.until(lambda journal: WorkerDraining() in journal.events)
                if signals == 1:
                    await router.until_finished("r")
                    assert router.output("r") == expected(request)
                else:
                    process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    assert await process.wait() == 0
            assert journal.goodbyes == (["drained"] if signals == 1 else [])
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def routed(request_id: str, prompt: range, routing: Routing) -> Generate:
    return msgspec.structs.replace(make_request(request_id, prompt, max_tokens=2), routing=routing)


async def known(router: FakeRouter) -> None:
    """Have the worker know of this router, as its pings do."""
    await router.send(Ping(1))
    await router.pong()


def hold_engines(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Have engines take requests, and compute nothing until the event is set."""
    go_on = asyncio.Event()
    step_on = RealTimeSimulatedEngine._step_on

    async def held(engine: RealTimeSimulatedEngine, deliver: Callable[[EngineReport], None]) -> None:
        await go_on.wait()
        await step_on(engine, deliver)

    monkeypatch.setattr(RealTimeSimulatedEngine, "_step_on", held)
    return go_on


async def were_taken(router: FakeRouter, go_on: asyncio.Event, *request_ids: str) -> None:
    """Cancel requests that a held engine has, let it go on, and see that it gave them up, not the worker."""
    for request_id in request_ids:
        await router.send(Cancel(request_id))
    await known(router)
    assert not set(request_ids) & set(router.deltas)
    go_on.set()
    await router.until_finished(*request_ids)
    assert [router.last(request_id).finish_reason for request_id in request_ids] == ["cancelled"] * len(request_ids)


async def test_of_several_routers_one_that_knows_too_little_is_told_and_asked_to_choose_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = hold_engines(monkeypatch)

    async with (
        running_worker(total_kv_blocks=1024) as worker,
        fake_router(worker.request_endpoint) as other,
    ):
        belief = Routing(overlap_tokens=0, expected_prefill_tokens=0)
        await worker.router.send(routed("long", range(2000), belief))
        await known(worker.router)
        await known(other)
        await other.send(routed("late", range(40), belief))
        await other.until_finished("late")
        refusal = other.last("late")
        assert (refusal.finish_reason, refusal.refusal) == ("error", RefusalKind.CROWDED)
        assert refusal.booked_prefill_tokens == 2000
        assert "2000 prompt tokens to compute, the router expected 0" in (refusal.error or "")

        await other.send(routed("knows", range(40), Routing(expected_prefill_tokens=2000)))
        await other.send(routed("insists", range(40), Routing()))
        await were_taken(other, go_on, "knows", "insists")


async def test_a_worker_that_no_consolidator_welcomes_says_so_until_one_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("poolgrid.server.workers.publisher.SILENCE_SAID_S", 0.01)
    clock = SystemClock()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with FakeConsolidator(Journal()) as consolidator:
        endpoint = consolidator.endpoint
        card = make_card(make_settings(endpoint), 1, 0)
        metrics = WorkerMetrics(CollectorRegistry())
        stream = PushStream("w0", 0, 5, card)
        publisher = EventPublisher(
            partial(DealerSocket, context, CONSOLIDATOR), endpoint, stream, lambda: ([], []), clock, metrics, 100
        )
        waiting = asyncio.create_task(publisher.until_registered())
        while not caplog.records:
            await asyncio.wait([waiting], timeout=0.01)
        assert f"no consolidator has accepted this worker at {endpoint}" in caplog.text
        publisher.start()
        await asyncio.wait_for(waiting, 120)
        publisher.close(orderly=False)
    context.term()


@pytest.mark.parametrize("header", [("origin", "http://evil.example"), ("sec-fetch-site", "same-origin")])
async def test_draining_is_not_for_web_pages(header: tuple[str, str]) -> None:
    """A browser on the worker's machine comes from that machine, whichever page it shows."""

    async with running_worker() as worker:
        async with httpx.AsyncClient(base_url=worker.http_url) as client:
            answer = await client.post("/drain", headers=[header])
        assert answer.status_code == 403
        assert "web pages" in answer.text
        assert (await worker.get("/ready")).status_code == 200


async def test_events_that_only_report_growth_leave_with_the_next_that_says_more() -> None:
    journal = Journal()
    clock = SystemClock()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with FakeConsolidator(journal) as consolidator:
        card = make_card(make_settings(consolidator.endpoint), 1, 0)
        stream = PushStream("w0", 0, 5, card)
        metrics = WorkerMetrics(CollectorRegistry())
        a_day_ms = 86_400_000.0
        publisher = EventPublisher(
            partial(DealerSocket, context, CONSOLIDATOR),
            consolidator.endpoint,
            stream,
            lambda: ([], []),
            clock,
            metrics,
            a_day_ms,
        )
        publisher.start()
        await publisher.until_registered()
        grown: list[AnyEvent] = [RequestProgressed("r", 2), BlocksStored(None, bytes(8 * 16))]
        began: list[AnyEvent] = [RequestStarted("r", 20, 0, 1), PrefillCompleted("r")]
        for each in (began, grown[:1], grown[1:]):
            publisher.publish(each)
        assert stream.outbox.next_seq == 1
        publisher.publish([RequestFinished("r", FinishReason.STOP)])
        assert stream.outbox.next_seq == 2
        await consolidator.until(lambda journal: journal.events[-1:] == [RequestFinished("r", FinishReason.STOP)])
        assert journal.events == [*began, *grown, RequestFinished("r", FinishReason.STOP)]

        publisher.publish([BlocksStored(None, bytes(8 * 17))])
        assert stream.outbox.next_seq == 3, "blocks of a prompt wait for nothing"
        publisher.publish(grown[1:])
        assert await publisher.say_goodbye("drained", 30.0)
        assert journal.events[-1] == grown[1]
        publisher.close(orderly=False)
    context.term()
