"""A prefill worker and a decode worker on real sockets: two legs, one answer, and nothing kept for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.events import PrefillCompleted, RequestFinished, RequestStarted, WorkerDraining
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import Cancel, FetchKv, Generate, KvOffered, Ping, RefusalKind
from poolgrid.kernel.worker_protocol.kv_fetches import KvWanted
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.plugins.simulated.core.kv_transfer import read_ticket
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.workers import transfers as kv_fetcher
from poolgrid.server.workers.booked_prefill import CROWDING_TOLERANCE_TOKENS, BookedPrefill
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.transfers import KvFetcher
from tests.workers.builders import decode_leg, make_request, prefill_leg
from tests.workers.fakes import PATIENCE_S, fake_router
from tests.workers.running import RunningWorker, expected, running_worker


@asynccontextmanager
async def two_workers(**decode_changes: object) -> AsyncIterator[tuple[RunningWorker, RunningWorker]]:
    async with (
        running_worker(worker_id="p", role="prefill") as source,
        running_worker(**({"worker_id": "d", "role": "decode"} | decode_changes)) as target,
    ):
        yield source, target


async def prefill(worker: RunningWorker, request: Generate) -> Generate:
    """Run the prefill leg; return the decode leg."""
    await worker.router.send(prefill_leg(request))
    await worker.router.until_finished(request.request_id)
    last = worker.router.last(request.request_id)
    assert last.finish_reason == "prefilled"
    return decode_leg(request, last)


async def assert_nothing_left(*workers: RunningWorker) -> None:
    for worker in workers:
        health = (await worker.get("/health")).json()
        kinds = ("running_requests", "waiting_requests", "fetching_requests", "kept_transfers", "active_blocks")
        assert [health[kind] for kind in kinds] == [0, 0, 0, 0, 0]


async def finished(worker: RunningWorker, request_id: str, reason: str) -> None:
    await worker.consolidator.until(lambda journal: RequestFinished(request_id, reason) in journal.events)


async def test_what_the_decode_worker_has_is_not_moved_again() -> None:
    async with two_workers() as (source, target):
        for request_id in ("a", "b"):
            await target.router.send(await prefill(source, make_request(request_id, range(22), max_tokens=5)))
            await target.router.until_finished(request_id)

        assert target.router.deltas["b"][0].cached_tokens == 20
        assert await target.metric("poolgrid_worker_kv_present_blocks_total") == 5
        assert await target.metric("poolgrid_worker_kv_transfer_bytes_sum") == (6 + 1) * 4 * 131_072


async def test_the_role_says_which_stages_are_taken() -> None:
    async with two_workers() as (source, target):
        for worker, role, stage in (
            (source, "prefill", Stage.WHOLE),
            (source, "prefill", Stage.DECODE),
            (target, "decode", Stage.PREFILL),
        ):
            request = msgspec.structs.replace(make_request(f"{stage}", range(9)), stage=stage)
            await worker.router.send(request)
            await worker.router.until_finished(request.request_id)

            last = worker.router.last(request.request_id)
            assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
            assert f"has the role {role}, it does not take the stage {stage.name.lower()}" in (last.error or "")
        whole = make_request("whole", range(9))
        await target.router.send(whole)
        await target.router.until_finished("whole")
        assert target.router.output("whole") == expected(whole)


async def test_a_prefill_worker_that_dies_between_the_legs_fails_the_second_in_time_and_retryably() -> None:
    async with running_worker(worker_id="d", role="decode", kv_fetch_timeout_ms=150) as target:
        async with running_worker(worker_id="p", role="prefill") as source:
            leg = await prefill(source, make_request("r", range(20), max_tokens=9))
        await target.router.send(leg)
        await target.router.until_finished("r")

        last = target.router.last("r")
        assert (last.finish_reason, last.refusal, last.token_ids) == ("error", RefusalKind.BROKEN, b"")
        assert "did not answer for transfer" in (last.error or "")
        await finished(target, "r", "error")
        await assert_nothing_left(target)
        assert await target.metric("poolgrid_worker_kv_fetch_failures_total", cause="timeout") == 1


async def test_a_prefill_worker_that_dies_while_the_second_leg_waits_fails_it_retryably() -> None:
    async with running_worker(
        worker_id="d", role="decode", kv_fetch_timeout_ms=150, max_batch_size=1, speedup=1.0
    ) as target:
        async with running_worker(worker_id="p", role="prefill", kv_transfer_timeout_ms=200) as source:
            await target.router.send(make_request("first", range(5), max_tokens=900))
            await target.router.until_started("first")
            await target.router.send(await prefill(source, make_request("r", range(20), max_tokens=9)))
            while (await target.get("/health")).json()["waiting_requests"] == 0:
                pass
        while "r" not in target.router.deltas:
            await target.router.receive()

        last = target.router.last("r")
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
        await finished(target, "r", "error")
        await target.router.send(Cancel("first"))
        await target.router.until_finished("first")
        await assert_nothing_left(target)


async def test_a_decode_leg_may_wait_longer_than_its_kv_is_kept_unasked() -> None:
    async with (
        running_worker(worker_id="p", role="prefill", kv_transfer_timeout_ms=150) as source,
        running_worker(worker_id="d", role="decode", max_batch_size=1, speedup=1.0) as target,
    ):
        # At least a millisecond a token.
        await target.router.send(make_request("first", range(5), max_tokens=60))
        await target.router.until_started("first")
        request = make_request("r", range(20), max_tokens=9)
        await target.router.send(await prefill(source, request))
        await target.router.until_finished("first", "r")

        assert target.router.output("r") == expected(request)
        assert await source.metric("poolgrid_worker_kv_transfer_timeouts_total") == 0
        await finished(source, "r", "prefilled")
        await assert_nothing_left(source, target)


async def test_kv_that_nobody_comes_for_expires_and_a_late_decode_leg_is_told() -> None:
    async with (
        running_worker(worker_id="p", role="prefill", kv_transfer_timeout_ms=50) as source,
        running_worker(worker_id="d", role="decode") as target,
    ):
        leg = await prefill(source, make_request("r", range(20), max_tokens=9))
        await finished(source, "r", "expired")
        await assert_nothing_left(source)
        assert await source.metric("poolgrid_worker_kv_transfer_timeouts_total") == 1
        await target.router.send(leg)
        await target.router.until_finished("r")

        last = target.router.last("r")
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.BROKEN)
        assert "no longer keeps the KV" in (last.error or "")
        assert await target.metric("poolgrid_worker_kv_fetch_failures_total", cause="unknown") == 1
        await assert_nothing_left(target)


async def test_kv_of_another_prompt_is_an_error_that_no_retry_mends_and_the_source_is_let_go() -> None:
    async with two_workers() as (source, target):
        leg = await prefill(source, make_request("r", range(20), max_tokens=9))
        await target.router.send(msgspec.structs.replace(leg, token_ids=make_request("r", range(1, 21)).token_ids))
        await target.router.until_finished("r")

        last = target.router.last("r")
        assert (last.finish_reason, last.refusal) == ("error", None)
        assert "offers the KV of another prompt" in (last.error or "")
        await finished(source, "r", "prefilled")
        await assert_nothing_left(source, target)
        assert await target.metric("poolgrid_worker_kv_fetch_failures_total", cause="wrong") == 1


async def test_a_decode_leg_with_broken_parameters_is_refused() -> None:
    async with running_worker(role="decode") as worker:
        for number, packed in enumerate((None, b"", b"\xc1", b"\x90")):
            request = make_request(f"r{number}")
            leg = msgspec.structs.replace(request, stage=Stage.DECODE, disaggregated_params=packed)
            await worker.router.send(leg)
            await worker.router.until_finished(request.request_id)

            last = worker.router.last(request.request_id)
            assert (last.finish_reason, last.refusal) == ("error", None)
            assert "disaggregated_params" in (last.error or "")


async def test_a_kept_prefill_leg_ends_silently_when_its_router_cancels_it_and_only_then() -> None:
    async with running_worker(role="prefill") as source, fake_router(source.request_endpoint) as stranger:
        leg = await prefill(source, make_request("r", range(20), max_tokens=9))
        await stranger.send(Cancel("r"))
        await stranger.send(Ping(1))
        await stranger.pong()
        assert (await source.get("/health")).json()["kept_transfers"] == 1
        await source.router.send(Cancel("r"))
        await finished(source, "r", "cancelled")

        await assert_nothing_left(source)
        assert source.router.last("r").finish_reason == "prefilled"
        await stranger.send(FetchKv(read_ticket(leg).transfer_id))
        assert await stranger.receive() == KvOffered(read_ticket(leg).transfer_id, False)


async def test_the_same_request_dispatched_again_takes_the_place_of_what_is_kept() -> None:
    async with two_workers() as (source, target):
        request = make_request("r", range(20), max_tokens=9)
        stale = await prefill(source, request)
        source.router.deltas.clear()
        fresh = await prefill(source, request)
        await target.router.send(stale)
        await target.router.until_finished("r")
        assert target.router.last("r").refusal is RefusalKind.BROKEN
        target.router.deltas.clear()
        await target.router.send(fresh)
        await target.router.until_finished("r")

        assert target.router.output("r") == expected(request)
        await finished(source, "r", "cancelled")
        await finished(source, "r", "prefilled")
        await assert_nothing_left(source, target)


async def test_a_draining_prefill_worker_waits_for_what_it_keeps() -> None:
    async with two_workers() as (source, target):
        request = make_request("r", range(20), max_tokens=9)
        leg = await prefill(source, request)
        source.stop.set()
        await source.consolidator.until(lambda journal: WorkerDraining() in journal.events)
        assert not source.task.done()
        await target.router.send(leg)
        await target.router.until_finished("r")
        await source.ended()

        assert target.router.output("r") == expected(request)
        assert RequestFinished("r", "prefilled") in source.journal.events
        assert source.journal.goodbyes == ["drained"]


async def test_a_drain_that_times_out_hands_over_what_is_still_being_fetched() -> None:
    async with running_worker(worker_id="d", role="decode", shutdown_timeout_ms=50) as target:
        async with running_worker(worker_id="p", role="prefill") as source:
            leg = await prefill(source, make_request("r", range(20), max_tokens=9))
        await target.router.send(leg)
        await target.router.send(Ping(1))
        await target.router.pong()
        target.stop.set()
        await target.router.until_finished("r")
        await target.ended()

        last = target.router.last("r")
        assert (last.finish_reason, last.refusal) == ("error", RefusalKind.DRAINING)
        assert RequestFinished("r", "migrated") in target.journal.events


async def test_many_requests_with_cancels_at_every_moment_leave_nothing_on_either_worker() -> None:
    async with two_workers(speedup=20.0, kv_transfer_latency_ms=40, total_kv_blocks=60) as (source, target):
        requests = [
            make_request(f"r{number}", range(number % 5, number % 5 + 10 + number), max_tokens=1 + number % 24)
            for number in range(60)
        ]
        for number, request in enumerate(requests):
            await source.router.send(prefill_leg(request))
            if number % 7 == 0:
                await source.router.send(Cancel(request.request_id))
        sent = []
        for number, request in enumerate(requests):
            await source.router.until_finished(request.request_id)
            last = source.router.last(request.request_id)
            if last.finish_reason == "prefilled":
                if number % 7 == 1:
                    await source.router.send(Cancel(request.request_id))
                    continue
                await target.router.send(decode_leg(request, last))
                sent.append(request)
                if number % 7 == 2:
                    await target.router.send(Cancel(request.request_id))
            else:
                assert last.finish_reason in ("cancelled", "length")
        for number, request in enumerate(sent):
            if number % 7 == 3:
                await target.router.until_started(request.request_id)
                await target.router.send(Cancel(request.request_id))
        await target.router.until_finished(*(request.request_id for request in sent))

        for request in sent:
            if target.router.last(request.request_id).finish_reason == "length":
                assert target.router.output(request.request_id) == expected(request)
            else:
                assert target.router.last(request.request_id).finish_reason == "cancelled"
                assert expected(request).startswith(target.router.output(request.request_id))
        for worker in (source, target):
            await worker.consolidator.until(
                lambda journal: (
                    {event.request_id for event in journal.events if isinstance(event, RequestStarted)}
                    <= {event.request_id for event in journal.events if isinstance(event, RequestFinished)}
                )
            )
        await assert_nothing_left(source, target)


async def test_connections_to_prefill_workers_are_bounded_and_close_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_fetcher, "SOURCES_MAX", 2)
    monkeypatch.setattr(kv_fetcher, "SOURCE_IDLE_MS", 30.0)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    fetcher = KvFetcher(context, 5000.0, 8, SystemClock(), WorkerMetrics(CollectorRegistry()))
    fetcher.start(lambda request_id, offer: None, lambda request_id, reason: None)
    try:
        for number in range(2):
            fetcher.begin(f"r{number}", KvWanted(f"tcp://127.0.0.1:{number + 1}", "t", 1000.0))
        with pytest.raises(RefusedError, match="from 2 prefill workers, allowed are at most 2") as refusal:
            fetcher.begin("r2", KvWanted("tcp://127.0.0.1:3", "t", 1000.0))
        assert refusal.value.kind is RefusalKind.BUSY
        fetcher.end("r0")
        fetcher.begin("r2", KvWanted("tcp://127.0.0.1:3", "t", 1000.0))
        assert fetcher.sources == 2
        fetcher.end("r1")
        fetcher.end("r2")
        async with asyncio.timeout(PATIENCE_S):
            while fetcher.sources:  # noqa: ASYNC110 - a timer closes them and tells nobody
                await asyncio.sleep(0.005)
        for endpoint in ("nonsense", "ipc:///tmp/x", "tcp://"):
            with pytest.raises(RefusedError, match="cannot be used") as broken:
                fetcher.begin("r3", KvWanted(endpoint, "t", 1000.0))
            assert broken.value.kind is None
    finally:
        fetcher.close(orderly=False)
        context.term()


def test_a_request_counts_from_its_acceptance_until_its_prompt_is_computed() -> None:
    books = BookedPrefill()
    books.accept("a", 5000)
    books.accept("b", 100)
    assert books.total == 5100
    books.observe([RequestStarted("a", 6000, 2000, 10)])
    assert books.total == 4100, "the engine knows how much is really cached"
    books.observe([PrefillCompleted("a"), RequestFinished("a", "stop")])
    assert books.total == 100
    books.observe([RequestFinished("b", "cancelled")])
    assert books.total == 0


def test_what_was_never_accepted_or_has_nothing_to_compute_counts_nothing() -> None:
    books = BookedPrefill()
    books.accept("cached", 0)
    books.observe([RequestStarted("stranger", 6000, 0, 10)])
    books.remove("stranger")
    assert books.total == 0


def test_a_router_that_is_far_from_the_truth_is_told_it_and_one_that_states_no_belief_is_not() -> None:
    books = BookedPrefill()
    books.accept("a", CROWDING_TOLERANCE_TOKENS + 1)
    assert books.crowding(0) == CROWDING_TOLERANCE_TOKENS + 1
    assert books.crowding(1) is None
    assert books.crowding(None) is None
    assert books.crowding(10**9) is None
