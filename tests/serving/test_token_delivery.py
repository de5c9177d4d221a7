"""How a request's tokens reach whoever waits for them: as they come, or only when there is more than tokens."""

from __future__ import annotations

import asyncio

from poolgrid.inference.ports import StreamDelta
from poolgrid.serving.token_delivery import TokenDelivery
from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.requests import FinishReason


def _delivery(given_up: list[TokenDelivery] | None = None) -> TokenDelivery:
    told = [] if given_up is None else given_up
    return TokenDelivery("r", told.append)


def test_tokens_alone_wake_a_reader_of_a_stream_and_not_one_who_waits_for_the_end() -> None:
    async def run(until_end: bool) -> tuple[list[StreamDelta], int]:
        delivery = _delivery()
        reading = asyncio.ensure_future(delivery.next(until_end))
        await asyncio.sleep(0)
        delivery.append(pack_tokens([7]))
        delivery.append(pack_tokens([8]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        unread = delivery.unread_tokens
        delivery.finish(StreamDelta(pack_tokens([9]), FinishReason.LENGTH))
        deltas = await reading
        return deltas + (await delivery.next() if not until_end else []), unread

    end = StreamDelta(pack_tokens([9]), FinishReason.LENGTH)
    assert asyncio.run(run(False)) == ([StreamDelta(pack_tokens([7, 8])), end], 0)
    assert asyncio.run(run(True)) == ([StreamDelta(pack_tokens([7, 8])), end], 2)


async def test_a_request_that_is_given_up_tells_how_many_tokens_nobody_read() -> None:
    given_up: list[TokenDelivery] = []
    delivery = _delivery(given_up)
    reading = asyncio.ensure_future(delivery.next(True))
    await asyncio.sleep(0)
    for _ in range(3):
        delivery.append(pack_tokens([7]))
    reading.cancel()
    assert delivery.unread_tokens == 3
    delivery.cancel()
    delivery.cancel()
    assert given_up == [delivery]
    assert await delivery.next() == [
        StreamDelta(pack_tokens([7] * 3)),
        StreamDelta(b"", FinishReason.CANCELLED),
    ]
    assert delivery.unread_tokens == 0
