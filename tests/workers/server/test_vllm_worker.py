"""A worker in front of vLLM's server: of ours, which follows the published protocol and fails as real ones do."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import deque

import httpx
import pytest

from poolgrid.wire.events import RequestFinished, RequestStarted
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import Cancel, FinishReason, RefusalKind
from tests.fakes.engine_server.vllm import Options, answer_of
from tests.process.leftovers import collected
from tests.workers.builders import decode_leg, make_request, prefill_leg
from tests.workers.fakes import PATIENCE_S
from tests.workers.server.running import Front, engine_server, index_of, worker_before


async def test_a_worker_learns_its_server_and_gives_tokens_for_tokens() -> None:
    async with (
        engine_server(Options(adapters=("poet",))) as server,
        worker_before(server) as front,
    ):
        card = front.journal.cards[0]
        assert (card.model, card.block_size, card.limits.max_sequence_length) == ("tiny", 4, 4096)
        assert (card.limits.total_kv_blocks, card.loras, card.engine) == (512, ("poet",), "vLLM 0.33.0")
        prompt = list(range(10, 31))
        for name in ("cold", "warm"):
            await front.router.send(make_request(name, prompt, 6))
            await front.router.until_finished(name)
            assert front.router.output(name) == pack_tokens(answer_of(prompt, 6))
            assert front.router.last(name).finish_reason is FinishReason.LENGTH
        assert [front.router.last(name).cached_tokens for name in ("cold", "warm")] == [0, 20]
        assert server.bodies[0]["prompt"] == prompt
        await front.settled()
        await front.consolidator.until(lambda journal: RequestFinished("warm", "length", 20) in journal.events)
        started = [each for each in front.journal.events if isinstance(each, RequestStarted)]
        assert all(each.cached_later for each in started)


@pytest.mark.parametrize(
    "options", [Options(tokens_per_chunk=3, torn=True), Options(arrays=True, sources_as_list=True)]
)
async def test_whatever_the_form_the_index_is_what_the_server_holds(options: Options) -> None:
    """Shared prefixes, turns, salts, evictions, lost frames, an emptied cache, a restart."""

    async def heard_again(front: Front) -> None:
        """Let a frame through, so that one that was lost at the end is missed."""
        front.server.lose = lambda seq: False
        await front.router.send(make_request("probe", [7] * 9, 1))
        await front.router.until_finished("probe")
        front.router.deltas.pop("probe")
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
            names = []
            for _ in range(6):
                prompt = shared[: source.choice((8, 20, 40))] + [source.randrange(3, 4096) for _ in range(9)]
                # Arrays say no salts: what has one is left out of the index, and so of this comparison.
                salt = source.choice(("", "tenant-a")) if not options.arrays else ""
                name = f"r{number}"
                number += 1
                names.append(name)
                await front.router.send(make_request(name, prompt, 7, cache_salt=salt))
            await front.router.until_finished(*names)

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


async def test_what_a_server_refuses_or_breaks_is_told_apart() -> None:
    async with engine_server() as server, worker_before(server) as front:
        faults = server.faults
        faults.statuses = deque(
            [
                (400, {"error": {"message": "no such thing", "type": "BadRequestError", "code": 400}}),
                (500, b"<html>oops</html>"),
                (401, {"error": "Unauthorized"}),
            ]
        )
        kinds = []
        for number in range(3):
            await front.router.send(make_request(f"s{number}", [1, 2, 3], 4))
            await front.router.until_finished(f"s{number}")
            last = front.router.last(f"s{number}")
            assert last.finish_reason is FinishReason.ERROR
            kinds.append(last.refusal)
        assert kinds == [RefusalKind.CANNOT_DO, RefusalKind.BROKEN, RefusalKind.BROKEN]
        assert "no such thing" in (front.router.last("s0").error or "")
        faults.errors_after.append(3)
        await front.router.send(make_request("amid", [1, 2, 3], 9))
        await front.router.until_finished("amid")
        assert front.router.output("amid") == pack_tokens(answer_of([1, 2, 3], 2))
        assert front.router.last("amid").refusal is RefusalKind.BROKEN
        faults.cuts_after.append(2)
        await front.router.send(make_request("cut", [1, 2, 3], 9))
        await front.router.until_finished("cut")
        assert front.router.last("cut").refusal is RefusalKind.BROKEN
        await front.router.send(make_request("long", [1] * 4096, 9))
        await front.router.until_finished("long")
        assert "maximum context length" in (front.router.last("long").error or "")
        # None of it harmed the worker.
        await front.router.send(make_request("well", [1, 2, 3], 4))
        await front.router.until_finished("well")
        assert front.router.output("well") == pack_tokens(answer_of([1, 2, 3], 4))


async def test_nothing_of_a_request_waits_for_the_collector() -> None:
    async with engine_server(Options(step_s=0.005)) as server, worker_before(server) as front:

        async def each(name: str) -> None:
            await front.router.send(make_request(f"{name} whole", [1, 2, 3], 4))
            await front.router.send(make_request(f"{name} left", [1, 2, 3], 4000))
            await front.router.until_finished(f"{name} whole")
            await front.router.send(Cancel(f"{name} left"))
            await front.router.until_finished(f"{name} left")
            for _ in range(20):
                await asyncio.sleep(0.005)  # its connection ends in later turns of the loop

        await each("what is made once")
        gc.collect()
        gc.disable()
        try:
            await each("second")
            assert not collected()
        finally:
            gc.enable()


async def test_requests_of_a_server_that_ends_go_on_elsewhere_and_its_worker_leaves_the_pool() -> None:
    async with engine_server(Options(step_s=0.01)) as server, worker_before(server) as front:
        for number in range(8):
            await front.router.send(make_request(f"r{number}", [number, 2, 3], 4000))
        for number in range(8):
            await front.router.until_started(f"r{number}")
        await server.stop()
        await front.router.until_finished(*(f"r{number}" for number in range(8)))
        assert {front.router.last(f"r{number}").refusal for number in range(8)} == {RefusalKind.BROKEN}
        await front.consolidator.until(lambda journal: journal.goodbyes)
        async with httpx.AsyncClient() as client:
            health = (await client.get(f"{front.http_url}/health")).json()
        assert health["status"] == "unhealthy"
        await server.start()
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        await front.router.send(make_request("again", [1, 2, 3], 4))
        await front.router.until_finished("again")
        assert front.router.output("again") == pack_tokens(answer_of([1, 2, 3], 4))


async def test_a_server_that_hangs_is_given_up() -> None:
    async with engine_server() as server, worker_before(server, progress_timeout_ms=300) as front:
        server.faults.stalls_after.append(2)
        await front.router.send(make_request("r", [1, 2, 3], 9))
        await front.router.until_finished("r")
        assert front.router.last("r").refusal is RefusalKind.BROKEN
        await front.consolidator.until(lambda journal: journal.goodbyes)
        assert "nothing has moved" in front.journal.goodbyes[0]


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
        await front.router.send(make_request("r", list(range(9)), 4))
        await front.router.until_finished("r")
        assert index_of(front.journal.events) == set()
    assert said in caplog.text


@pytest.mark.parametrize(
    ("length", "backoff_tokens", "gives"), [(19, 0, True), (20, 0, False), (21, 0, True), (22, 1, False)]
)
async def test_prompt_and_output_on_two_servers_of_their_own(length: int, backoff_tokens: int, gives: bool) -> None:
    prompt = list(range(40, 40 + length))
    answer = answer_of(prompt, 5)
    async with (
        engine_server(Options(kv_connector=True, backoff_tokens=backoff_tokens)) as first,
        worker_before(first, role="prefill") as prefill,
        engine_server() as second,
        worker_before(second, role="decode") as decode,
    ):
        leg = prefill_leg(make_request("r", prompt, 5))
        await prefill.router.send(leg)
        await prefill.router.until_finished("r")
        left = prefill.router.last("r")
        # A prompt of whole blocks has no room for the token, and a state that stops short of its end no place.
        assert (left.finish_reason, left.token_ids) == (FinishReason.PREFILLED, pack_tokens(answer[:gives]))
        assert first.bodies[0]["kv_transfer_params"]["do_remote_decode"]
        assert (first.bodies[0]["stream"], first.bodies[0]["max_tokens"]) == (False, 1)
        await decode.router.send(decode_leg(leg, left))
        await decode.router.until_finished("r")
        assert decode.router.output("r") == pack_tokens(answer)
        assert second.bodies[0]["prompt"] == prompt + answer[:gives]
        assert len(second.bodies[0]["kv_transfer_params"]["remote_block_ids"][0]) == -(-length // 4)
        assert not second.died
        await prefill.router.send(Cancel("r"))
        await prefill.consolidator.until(
            lambda journal: any(
                isinstance(each, RequestFinished) and each.reason == "prefilled" for each in journal.events
            )
        )
        # A server without a connector keeps nothing: the leg says so.
        first.options.kv_connector = False
        await prefill.router.send(prefill_leg(make_request("none", prompt, 5)))
        await prefill.router.until_finished("none")
        assert "--kv-transfer-config" in (prefill.router.last("none").error or "")
        assert leg.stage is Stage.PREFILL
