"""Impossible numbers of an engine server cost at most their own request; its neighbours get whole, right answers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from poolgrid.wire.events import CacheCleared
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.requests import FinishReason, RefusalKind, TokenDelta
from poolgrid.workers.core.push_stream import TokenCoalescer
from poolgrid.workers.engines.server.engine import ServerEngine
from poolgrid.workers.engines.server.request_ledger import RequestLedger
from poolgrid.workers.service import WorkerService
from tests.workers.builders import make_request, prefill_leg
from tests.workers.server.harness import DIALECTS, Harness, chunks, harness

KINDS = sorted(DIALECTS)
TOKENS = (11, 12, 13)
WRONG = [-1, -(2**63), 2**32, 2**64, 10**40, 1.5, True, "7", None, [], {}]


async def ends_together(worker: Harness, values: list[Any]) -> None:
    """Have the ends of several answers arrive in one turn; ``values`` are their numbers of cached tokens."""
    requests = [make_request(f"r{number}", (number, 2, 3), 3) for number in range(1, len(values) + 1)]
    streams = await worker.ask(*requests)
    for stream, value in zip(streams, values, strict=True):
        stream.send(*chunks(worker.kind, TOKENS, value))
        stream.end()
    await worker.until_finished(*(each.request_id for each in requests))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", WRONG, ids=repr)
async def test_cached_tokens_that_cannot_be_are_absent_and_lose_no_answer(kind: str, value: Any) -> None:
    async with harness(kind) as worker:
        await ends_together(worker, [2, 2, value, 2])
        for name in ("r1", "r2", "r3", "r4"):
            assert worker.output(name) == pack_tokens(TOKENS)
        cached = [each.cached_tokens for each in worker.requests.deltas["r3"] if each.cached_tokens is not None]
        assert cached == []
        assert worker.metrics.cached_tokens._value.get() == 6
        assert worker.service.describe()["running_requests"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [*WRONG, "x"], ids=repr)
async def test_a_token_that_cannot_be_breaks_its_own_request_only(kind: str, token: Any) -> None:
    async with harness(kind) as worker:
        streams = await worker.ask(*(make_request(f"r{number}", (number, 2, 3), 3) for number in (1, 2, 3)))
        wrong = chunks(kind, TOKENS)
        if kind == "sglang":
            wrong[1]["output_ids"] = [token]
        else:
            wrong[1]["choices"][0]["token_ids"] = [token]
        for stream, values in zip(streams, (chunks(kind, TOKENS), wrong, chunks(kind, TOKENS)), strict=True):
            stream.send(*values)
            stream.end()
        await worker.until_finished("r1", "r2", "r3")
        last = worker.last("r2")
        assert last is not None
        assert (last.finish_reason, last.refusal) == (FinishReason.ERROR, RefusalKind.BROKEN)
        assert worker.output("r2") == pack_tokens(TOKENS[:1])
        assert worker.output("r1") == worker.output("r3") == pack_tokens(TOKENS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [True, False])
async def test_an_answer_is_cut_at_max_tokens(kind: str, together: bool) -> None:
    async with harness(kind) as worker:
        first, second = await worker.ask(*(make_request(f"r{number}", (number, 2, 3), 3) for number in (1, 2)))
        if together:
            many = list(range(100_000))
            meta = {"completion_tokens": len(many)}
            first.send(
                {"output_ids": many, "meta_info": meta}
                if kind == "sglang"
                else {"choices": [{"index": 0, "token_ids": many}]}
            )
            wanted = many[:3]
        else:
            wanted = [0, 1, 2]
            for value in chunks(kind, range(9))[:7]:
                first.send(value)
        second.send(*chunks(kind, TOKENS))
        second.end()
        await worker.until_finished("r1", "r2")
        assert worker.output("r1") == pack_tokens(wanted)
        last = worker.last("r1")
        assert last is not None
        assert last.finish_reason is FinishReason.LENGTH
        await worker.until(first.over.done)
        assert first.over.cancelled(), "its connection is closed"
        assert worker.metrics.overlong_answers._value.get() == 1
        assert worker.output("r2") == pack_tokens(TOKENS)
        assert not worker.engine._active


# -- faults of ours ----------------------------------------------------------------------------------------------------


def raises_for(name: str, method: Any) -> Any:
    """Return a method that fails for one request."""

    def wrapped(self: Any, first: Any, *rest: Any, **named: Any) -> Any:
        of = getattr(first, "request_id", first)
        if of == name:
            raise RuntimeError("injected")
        return method(self, first, *rest, **named)

    return wrapped


@pytest.mark.parametrize(
    ("owner", "place"),
    [
        (ServerEngine, "_take"),
        (RequestLedger, "grow"),
        (RequestLedger, "_book"),
        (ServerEngine, "_on_end"),
        (TokenCoalescer, "add"),
    ],
)
async def test_a_fault_of_one_request_or_of_its_delta_is_its_own(
    owner: type, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner, place, raises_for("r2", getattr(owner, place)))

    async with harness("vllm") as worker:
        await ends_together(worker, [1, 1, 1])
        last = worker.last("r2")
        assert last is not None
        assert last.refusal is RefusalKind.BROKEN
        assert worker.output("r1") == worker.output("r3") == pack_tokens(TOKENS)
        assert worker.metrics.request_faults._value.get() >= 1
        await worker.until(lambda: not worker.engine._active)
        assert worker.service.describe()["running_requests"] == 0
        await ends_together(worker, [1])
    assert "injected" in caplog.text


async def test_a_delta_that_no_message_can_carry_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    add = TokenCoalescer.add

    def swell(self: TokenCoalescer, delta: TokenDelta, ready: list[TokenDelta]) -> None:
        add(self, TokenDelta("r2", 2**70, b"") if delta.request_id == "r2" else delta, ready)

    monkeypatch.setattr(TokenCoalescer, "add", swell)

    async with harness("vllm") as worker:
        await ends_together(worker, [1, 1, 1])
        last = worker.last("r2")
        assert last is not None
        assert last.refusal is RefusalKind.BROKEN
        assert worker.output("r1") == worker.output("r3") == pack_tokens(TOKENS)


@pytest.mark.parametrize(
    ("owner", "place"),
    [(WorkerService, "_deliver"), (RequestLedger, "load"), (WorkerService, "_note_if_empty")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_fault_of_a_whole_report_ends_every_request_at_once(
    owner: type, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    method, armed = getattr(owner, place), False

    def broken(*given: Any) -> Any:
        if armed:
            raise RuntimeError("injected")
        return method(*given)

    monkeypatch.setattr(owner, place, broken)

    async def scenario() -> None:
        nonlocal armed
        worker = Harness("vllm")
        task = asyncio.create_task(worker.run())
        await asyncio.sleep(0)
        requests = [make_request(f"r{number}", (number, 2, 3), 9) for number in (1, 2, 3)]
        streams = await worker.ask(*requests)
        armed = True
        streams[0].send(*chunks("vllm", TOKENS)[:2])
        with pytest.raises(RuntimeError, match="injected"):
            async with asyncio.timeout(120):
                await task
        for name in ("r1", "r2", "r3"):
            last = worker.last(name)
            assert last is not None, name
            assert last.refusal is RefusalKind.BROKEN
        assert worker.publisher.goodbyes
        await worker.engine.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "injected" in caplog.text


async def test_a_request_whose_submission_fails_is_refused_and_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("injected")

    async with harness("vllm") as worker:
        with monkeypatch.context() as patched:
            patched.setattr(ServerEngine, "submit", broken)
            worker.requests.receive(make_request("r1", (1, 2, 3), 3))
        last = worker.last("r1")
        assert last is not None
        assert last.refusal is RefusalKind.BROKEN
        await ends_together(worker, [1])


async def test_a_fault_over_cache_events_ends_every_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets log what a handler of theirs raises, and go on: a report that is lost there would be lost for good."""
    armed = False
    method = RequestLedger.load

    def broken(self: RequestLedger, dp_rank: int) -> Any:
        if armed:
            raise RuntimeError("injected")
        return method(self, dp_rank)

    monkeypatch.setattr(RequestLedger, "load", broken)

    worker = Harness("vllm")
    task = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    await worker.ask(*(make_request(f"r{number}", (number, 2, 3), 9) for number in (1, 2)))
    armed = True
    worker.engine._on_cache(0, [CacheCleared()])
    with pytest.raises(RuntimeError, match="injected"):
        async with asyncio.timeout(120):
            await task
    for name in ("r1", "r2"):
        last = worker.last(name)
        assert last is not None, name
        assert last.refusal is RefusalKind.BROKEN
    await worker.engine.close()


async def test_a_fault_over_a_leg_that_left_at_once_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    grow = RequestLedger.grow

    def faulty(self: RequestLedger, active: Any, piece: Any, now_ms: float, finish: Any = None, *rest: Any) -> None:
        if active.request_id == "r2" and finish is FinishReason.PREFILLED:
            raise RuntimeError("injected")
        grow(self, active, piece, now_ms, finish, *rest)

    monkeypatch.setattr(RequestLedger, "grow", faulty)

    async with harness("sglang") as worker:
        whole = make_request("r1", (1, 2, 3), 3)
        (stream, _) = await worker.ask(whole, prefill_leg(make_request("r2", (2, 2, 3), 3)))
        stream.send(*chunks("sglang", TOKENS))
        stream.end()
        await worker.until_finished("r1", "r2")
        last = worker.last("r2")
        assert last is not None
        assert last.refusal is RefusalKind.BROKEN
        assert worker.output("r1") == pack_tokens(TOKENS)
