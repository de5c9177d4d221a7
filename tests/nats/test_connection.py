"""A connection's questions, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from poolgrid.plugins.nats.connection import NatsConnection
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.tasks import cancel_all, owned

pytest.importorskip("nats", reason="nats-py is not installed: the extra nats brings it")


class _Message:
    data = b'{"seq": 1}'


class _Client:
    """As much of the client as questions need; it waits for an answer as nats-py does."""

    is_connected = True
    is_closed = False

    def __init__(self) -> None:
        self.answer: asyncio.Future[_Message] = asyncio.get_running_loop().create_future()

    async def request(self, *arguments: Any, **named: Any) -> _Message:
        return await asyncio.wait_for(self.answer, 60)


QUESTIONS: dict[str, Callable[[NatsConnection, _Client], Awaitable[Any]]] = {
    "asked": lambda connection, client: connection.asked("asking", client.request()),
    "publish": lambda connection, client: connection.publish("publishing", "subject", {}, b""),
}


@pytest.mark.parametrize("question", QUESTIONS)
async def test_who_is_cancelled_in_the_turn_in_which_the_answer_comes_ends(question: str) -> None:
    connection = NatsConnection(DiscoverySettings(), "test", SystemClock())
    client = connection._client = _Client()  # type: ignore[assignment]

    async def ask() -> None:
        await QUESTIONS[question](connection, client)
        await asyncio.Event().wait()  # what it would do next, for ever

    task = owned(ask(), "asking")
    await asyncio.sleep(0.01)
    client.answer.set_result(_Message())
    async with asyncio.timeout(120):
        await cancel_all([task])

    assert task.cancelled()
