"""A worker in front of a server that is full, refuses, ends its answers in odd ways, or changes what it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.http.http_client import RequestFailed
from poolgrid.tools.bench.client import EVENT_BYTES_MAX
from poolgrid.tools.bench.client import BenchExchange as Loaded
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, Routing
from poolgrid.workers.engines.server.core.calls import LINE_BYTES_MAX, LineTooLong, ServerSentEvents
from tests.fakes.engine_server.http import Reply
from tests.fakes.engine_server.vllm import Options, answer_of
from tests.workers.builders import make_request
from tests.workers.fakes import PATIENCE_S
from tests.workers.server.running import Front, engine_server, worker_before

Script = Callable[[Reply], Awaitable[None]]


def choice(*tokens: int, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": list(tokens), "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}}
ERROR_400 = {"error": {"message": "grammar is unsupported", "type": "BadRequestError", "code": 400}}


def said(*events: object, ends: bool = True) -> Script:
    """An answer of these events, whose connection stays open unless it ``ends``."""

    async def script(reply: Reply) -> None:
        await reply.begin()
        for event in events:
            await reply.event(event)
        if ends:
            await reply.end()
        else:
            await asyncio.Event().wait()

    return script


def full(status: int, headers: str = "") -> Script:
    return lambda reply: reply.whole(status, {"error": {"message": "full", "code": status}}, headers=headers)


async def endless_error(reply: Reply) -> None:
    await reply.begin(500)
    while True:
        await reply.chunk(b"<p>x</p>" * 1000)


async def endless_refusal(reply: Reply) -> None:
    await reply.begin(400)
    while True:
        await reply.chunk(b"x" * 9000)


async def slow_error(reply: Reply) -> None:
    await reply.begin(500)
    while True:
        await reply.chunk(b"x")
        await asyncio.sleep(0.05)


async def comments_after_the_end(reply: Reply) -> None:
    await reply.begin()
    await reply.event(choice(5, 6, finish="stop"))
    while True:
        await reply.chunk(b": ping\n\n")
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "tokens", "finish"),
    [
        (said(choice(5), choice(6, finish="stop"), USAGE, b"[DONE]", ends=False), [5, 6], FinishReason.STOP),
        (said(choice(5), choice(6, finish="stop"), USAGE, ends=False), [5, 6], FinishReason.STOP),
        (said(choice(5), choice(6, finish="length"), ends=False), [5, 6], FinishReason.LENGTH),
        (said(choice(5), choice(6, finish="stop"), choice(7, finish="stop"), b"[DONE]"), [5, 6], FinishReason.STOP),
        (said(choice(5), choice(6), USAGE, b"[DONE]"), [5, 6], FinishReason.STOP),
        (said(choice(5), choice(6), b"[DONE]", ends=False), [5, 6], FinishReason.STOP),
        (said(choice(5, 6, 7), choice(8, 9, 10, 11, 12), b"[DONE]"), [5, 6, 7, 8, 9, 10, 11, 12], FinishReason.LENGTH),
        (comments_after_the_end, [5, 6], FinishReason.STOP),
    ],
)
async def test_an_answer_ends_with_its_end_mark_or_its_finish_reason(
    script: Script, tokens: list[int], finish: FinishReason
) -> None:
    async with engine_server() as server, worker_before(server) as front:
        server.faults.scripts.append(script)
        await front.router.send(make_request("r", [1, 2, 3], 8))
        await front.router.until_finished("r")
        assert front.router.output("r") == pack_tokens(tokens)
        assert front.router.last("r").finish_reason is finish
        await works(front)


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [
        (said(b"[DONE]"), RefusalKind.BROKEN, "the engine server's answer ended without a finish reason"),
        (said(choice(5), USAGE), RefusalKind.BROKEN, "the engine server's answer ended before its end"),
        (said(ERROR_400, b"[DONE]", ends=False), RefusalKind.CANNOT_DO, "(status 400): grammar is unsupported"),
        (said(b"<html>no"), RefusalKind.BROKEN, "the engine server's answer cannot be read"),
        (endless_error, RefusalKind.BROKEN, "vLLM failed (status 500)"),
        (endless_refusal, RefusalKind.CANNOT_DO, "(status 400)"),
        (slow_error, RefusalKind.BROKEN, "vLLM failed (status 500)"),
    ],
)
async def test_what_fails_has_a_kind_and_none_of_the_servers_words(
    script: Script, kind: RefusalKind, reason: str
) -> None:
    async with engine_server() as server, worker_before(server) as front:
        server.faults.scripts.append(script)
        await front.router.send(make_request("r", [1, 2, 3], 8))
        await front.router.until_finished("r")
        last = front.router.last("r")
        assert (last.refusal, last.unknown_model) == (kind, False)
        assert (last.error or "").endswith(reason)
        await works(front)


async def works(front: Front, name: str = "well") -> None:
    await front.router.send(make_request(name, [1, 2, 3], 4))
    await front.router.until_finished(name)
    assert front.router.output(name) == pack_tokens(answer_of([1, 2, 3], 4))


async def test_a_full_server_is_left_alone_for_the_time_it_asks_for() -> None:
    async with engine_server() as server, worker_before(server) as front:
        server.faults.every = full(429, "Retry-After: 30\r\n")
        pauses = []
        for number in range(5):
            await front.router.send(make_request(f"r{number}", [1, 2, 3], 4))
            await front.router.until_finished(f"r{number}")
            last = front.router.last(f"r{number}")
            assert last.refusal is RefusalKind.BUSY
            pauses.append(last.retry_after_ms or 0)
        assert len(server.bodies) == 1, "the worker refuses the others itself"
        assert 25_000 < pauses[4] <= pauses[0] == 30_000


@pytest.mark.parametrize("script", [full(429, "Retry-After: 0\r\n"), full(503), full(408, "Retry-After: soon\r\n")])
async def test_a_server_that_has_room_again_is_asked_again(script: Script) -> None:
    async with engine_server() as server, worker_before(server) as front:
        server.faults.scripts.append(script)
        await front.router.send(make_request("r", [1, 2, 3], 4))
        await front.router.until_finished("r")
        pause_ms = front.router.last("r").retry_after_ms
        assert front.router.last("r").refusal is RefusalKind.BUSY
        assert pause_ms == 250
        await asyncio.sleep(pause_ms / 1000)
        await works(front)


def adapted(name: str) -> Generate:
    return msgspec.structs.replace(make_request(name, [1, 2], 2), routing=Routing(lora_name="sql"))


async def test_adapters_and_names_that_come_and_go_are_followed_and_what_runs_goes_on() -> None:
    options = Options(step_s=0.01)
    async with engine_server(options) as server, worker_before(server) as front:
        await front.router.send(make_request("long", [9, 9], 4000))
        await front.router.until_started("long")
        options.adapters, options.aliases = ("sql", "x" * 300), ("tiny-latest",)
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        assert (front.journal.cards[-1].loras, front.journal.cards[-1].aliases) == (("sql",), ("tiny-latest",))
        await front.router.send(adapted("sql"))
        await front.router.until_finished("sql")
        assert front.router.last("sql").finish_reason is FinishReason.LENGTH
        assert server.running == 1
        options.adapters = ()
        await front.router.send(adapted("gone"))
        await front.router.until_finished("gone")
        assert front.router.last("gone").refusal is RefusalKind.CANNOT_DO
        assert front.router.last("gone").unknown_model
        await front.consolidator.until(lambda journal: not journal.cards[-1].loras)
        await front.router.send(adapted("late"))
        await front.router.until_finished("late")
        assert front.router.last("late").unknown_model, "the worker refuses it itself"


@pytest.mark.parametrize(("key", "said"), [("", "engine_api_key is missing"), ("wrong", "engine_api_key is not the")])
async def test_a_worker_whose_key_is_refused_does_not_start(key: str, said: str) -> None:
    async with engine_server(Options(key="right")) as server:
        with pytest.raises(ValueError, match=said):
            async with worker_before(server, engine_api_key=key):
                pass


async def test_a_worker_whose_key_is_refused_later_leaves_the_pool_until_it_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        engine_server(Options(key="right")) as server,
        worker_before(server, engine_api_key="right") as front,
    ):
        server.options.key = "other"
        await front.router.send(make_request("r", [1, 2, 3], 4))
        await front.router.until_finished("r")
        assert front.router.last("r").refusal is RefusalKind.BROKEN
        assert "401" not in (front.router.last("r").error or "")
        await front.consolidator.until(lambda journal: journal.goodbyes)
        server.options.key = "right"
        await front.consolidator.until(lambda journal: len(journal.cards) > 1)
        await works(front)
    assert "engine_api_key is not the one" in caplog.text


async def test_a_slow_server_that_shows_signs_of_life_is_not_given_up() -> None:
    async with engine_server() as server, worker_before(server, progress_timeout_ms=200) as front:

        async def slow(reply: Reply) -> None:
            await reply.begin()
            for _ in range(20):
                await reply.chunk(b": computing\n\n")
                await asyncio.sleep(0.05)
            await reply.event(choice(7, finish="stop"))
            await reply.event(b"[DONE]")
            await reply.end()

        server.faults.scripts.append(slow)
        await front.router.send(make_request("r", [1, 2, 3], 4))
        await front.router.until_finished("r")
        assert front.router.output("r") == pack_tokens([7])


def late(tokens: int, every: Callable[[], Awaitable[None]]) -> Script:
    """A first token after a second, with something done ``every`` 50 ms until then."""

    async def script(reply: Reply) -> None:
        await reply.begin()
        for _ in range(20):
            await every()
            await asyncio.sleep(0.05)
        for token in range(tokens):
            await reply.event(choice(token + 3, finish="stop" if token + 1 == tokens else None))
        await reply.event(b"[DONE]")
        await reply.end()

    return script


@pytest.mark.parametrize(("prompt_tokens", "has_events"), [(10, True), (600, False)])
async def test_a_long_prefill_is_progress_while_events_come_or_its_prompt_explains_it(
    prompt_tokens: int, has_events: bool
) -> None:
    async with engine_server() as server, worker_before(server, progress_timeout_ms=200) as front:

        async def event() -> None:
            if has_events:
                await server.reset_prefix_cache()

        server.faults.scripts.append(late(2, event))
        await front.router.send(make_request("r", [1] * prompt_tokens, 4))
        await front.router.until_finished("r")
        assert front.router.output("r") == pack_tokens([3, 4])
        assert not front.journal.goodbyes


async def test_a_server_that_answers_late_how_it_is_is_not_given_up_while_it_streams() -> None:
    options = Options(step_s=0.02)
    async with engine_server(options) as server, worker_before(server, health_timeout_ms=100) as front:
        await front.router.send(make_request("r", [1, 2, 3], 50))
        await front.router.until_started("r")
        options.health_s = 0.3
        await front.router.until_finished("r")
        assert front.router.last("r").finish_reason is FinishReason.LENGTH
        await front.consolidator.until(lambda journal: journal.goodbyes)  # now nothing shows that it lives


def test_blocks_of_another_size_than_was_given_are_an_error_that_names_the_option(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with engine_server() as server, worker_before(server, kv_block_size=16) as front:
            await front.router.send(make_request("r", list(range(40)), 4))
            await front.router.until_finished("r")
            async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as client:
                while True:
                    health = (await client.get(f"{front.http_url}/health")).json()
                    if "kv_block_size 4" in health["engine_server"]["events"][0]["reason"]:
                        return
                    await asyncio.sleep(0.02)

    asyncio.run(scenario())
    assert "stores blocks of 4 tokens, and its label has 16" in caplog.text


class Piece(bytes):
    """What must not be put behind what came before: that copies all of it, for each piece again."""

    def __radd__(self, before: bytes) -> bytes:
        raise AssertionError(f"{len(before)} bytes are copied for {len(self)} more")


@given(
    st.lists(st.sampled_from([b"data: {}", b"data:[DONE]", b": x", b"", b"event: x", b"data:  1 \r"]), max_size=9),
    st.binary(max_size=9),
    st.data(),
)
def test_events_are_the_same_however_they_are_torn(lines: list[bytes], rest: bytes, data: st.DataObject) -> None:
    rest = rest.replace(b"\n", b"")
    whole = b"".join(line + b"\n" for line in lines) + rest
    at = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    stream, taken = ServerSentEvents(), []
    for start, end in zip([0, *at], [*at, len(whole)], strict=True):
        taken += list(stream.take(Piece(whole[start:end])))

    fields = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    assert taken == [field for field in fields if field != b"[DONE]"]
    assert stream.done is (b"[DONE]" in fields)


def test_a_line_in_small_pieces_is_never_copied_whole() -> None:
    stream = ServerSentEvents()
    line = b"data: " + b"1" * 3_000_000
    for at in range(0, len(line), 1200):
        assert not list(stream.take(Piece(line[at : at + 1200])))
    assert list(stream.take(Piece(b"\n"))) == [line[6:]]


@pytest.mark.parametrize("ends", [b"", b"\n", b"\ndata: 1\n"])
def test_a_line_beyond_the_bound_is_refused_before_it_is_kept(ends: bytes) -> None:
    stream = ServerSentEvents()
    list(stream.take(b"x" * LINE_BYTES_MAX))
    with pytest.raises(LineTooLong):
        list(stream.take(b"y" + ends))
    assert len(stream._rest) == LINE_BYTES_MAX


def test_the_client_of_the_load_generator_reads_the_same_way() -> None:
    exchange = Loaded()
    exchange.status = 200
    exchange.take_body(Piece(b"data: {"))
    for _ in range(1000):
        exchange.take_body(Piece(b" " * 1000))
    exchange.take_body(Piece(b"}\n"))
    exchange.take_body(Piece(b" " * EVENT_BYTES_MAX))
    with pytest.raises(RequestFailed):
        exchange.take_body(Piece(b" "))
