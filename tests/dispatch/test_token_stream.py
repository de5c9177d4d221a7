"""How a request's tokens reach whoever waits for them: as they come, or only when there is more than tokens."""

from __future__ import annotations

import asyncio

from dispatch.token_stream import ActiveRequest
from frontend.ports import InferenceRequest, StreamDelta
from wire.hashing import pack_tokens
from wire.identifiers import Stage, WorkerId, WorkerKey
from wire.requests import Sampling, TokenDelta


def _active() -> ActiveRequest:
    active = ActiveRequest(InferenceRequest("r", "m", pack_tokens(range(16)), Sampling(8)), [], lambda active: None)
    active.begin_dispatch(WorkerKey(WorkerId("w")), "tcp://w:1", Stage.WHOLE, "")
    return active


def _token(position: int, token_id: int, **more: object) -> TokenDelta:
    return TokenDelta("r", position, pack_tokens([token_id]), **more)  # type: ignore[arg-type]


def test_tokens_alone_wake_a_reader_of_a_stream_and_not_one_who_waits_for_the_end() -> None:
    async def run(until_end: bool) -> tuple[list[StreamDelta], int]:
        active = _active()
        reading = asyncio.ensure_future(active.next(until_end))
        await asyncio.sleep(0)
        assert active.extend(_token(0, 7))
        assert active.extend(_token(1, 8))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        unread = active.unread_tokens
        assert active.current is not None
        assert active.accept(active.current, _token(2, 9, finish_reason="length"))
        deltas = await reading
        return deltas + (await active.next() if not until_end else []), unread

    assert asyncio.run(run(False)) == ([StreamDelta(pack_tokens([7, 8])), StreamDelta(pack_tokens([9]), "length")], 0)
    assert asyncio.run(run(True)) == ([StreamDelta(pack_tokens([7, 8])), StreamDelta(pack_tokens([9]), "length")], 2)


def test_a_request_that_is_given_up_tells_how_many_tokens_nobody_read() -> None:
    async def run() -> None:
        active = _active()
        reading = asyncio.ensure_future(active.next(True))
        await asyncio.sleep(0)
        for position in range(3):
            assert active.extend(_token(position, 7))
        reading.cancel()
        assert active.unread_tokens == 3
        active.cancel()
        assert await active.next() == [StreamDelta(pack_tokens([7] * 3)), StreamDelta(b"", "cancelled")]
        assert active.unread_tokens == 0

    asyncio.run(run())


def test_only_tokens_in_their_place_are_taken_without_a_second_look() -> None:
    refused = [
        _token(1, 7),
        _token(0, 7, finish_reason="stop"),
        _token(0, 7, cached_tokens=0),
        _token(0, 7, logprobs=()),
        _token(0, 7, prompt_logprobs=()),
        TokenDelta("r", 0, b""),
        TokenDelta("another", 0, pack_tokens([7])),
    ]
    for delta in refused:
        active = _active()
        assert not active.extend(delta), delta
        assert (bytes(active.output), active.unread_tokens) == (b"", 0)
    decoding = _active()
    assert decoding.extend(_token(0, 7))
    decoding.kept = decoding.current
    decoding.begin_dispatch(WorkerKey(WorkerId("d")), "tcp://d:1", Stage.DECODE, "")
    assert not decoding.extend(TokenDelta("r~1", 0, pack_tokens([7])))
