"""How the soak's clients end: what they take for a fault, and which connections they use again."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from lab.benchmarks.soak_clients import Connection, Tally
from lab.benchmarks.soak_requests import Leaving, Planned

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"


def planned(leaving: Leaving, **fields: Any) -> Planned:
    values = {"patience": 0.0, "leave_at": 3, "streams": True, "reset": False, "status": 200, "end": b"end", **fields}
    return Planned(kind="test", data=b"POST / HTTP/1.1\r\n\r\n", leaving=leaving, **values)


def exchange(plan: Planned, body: bytes = b"answer end") -> tuple[str, bool, Tally]:
    """Return how an exchange ended whose answer comes in two parts, and whether its connection may be used again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + body[:4])
            if plan.leaving not in ("never", "close"):
                await reader.read()  # up to the client's end
            await writer.drain()
            writer.write(body[4:])
            if len(body) == 10 and plan.leaving == "never":
                await reader.read()
        writer.close()

    async def go() -> tuple[str, bool, Tally]:
        tally = Tally()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(tally), "127.0.0.1", port)
        how = await asyncio.wait_for(connection.exchange(plan), 120)
        is_open = connection.is_open
        connection.close()
        server.close()
        return how, is_open, tally

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("leaving", "how", "is_open"),
    [
        ("never", "answered", True),
        ("close", "answered", False),
        ("half-close", "answered", False),
        ("amid answer", "left", False),
        ("before answer", "left", False),
        ("amid request", "left", False),
    ],
)
def test_clients_end_as_planned(leaving: Leaving, how: str, is_open: bool) -> None:
    fields = {"leave_at": 0} if leaving in ("amid answer", "half-close") else {}
    if leaving == "before answer":
        # Nobody answers a request that is not complete.
        found = exchange(
            Planned("test", b"POST", 200, b"", leaving, reset=True, patience=0.0, leave_at=0, streams=True)
        )
    else:
        found = exchange(planned(leaving, **fields))
    assert found[:2] == (how, is_open)
    assert found[2].faults == []


@pytest.mark.parametrize(
    ("plan", "body", "said"),
    [
        (planned("never", end=b"other"), b"answer end", "ends without b'other'"),
        (planned("never", status=400), b"answer end", "status 200, not 400"),
        (planned("never"), b'data: {"error"', "an error amid the answer"),
    ],
)
def test_wrong_answers_are_faults(plan: Planned, body: bytes, said: str) -> None:
    _, _, tally = exchange(plan, body)
    assert said in " ".join(tally.faults)


def test_an_answer_that_is_cut_is_lost() -> None:
    assert exchange(planned("never"), b"answer")[0] == "lost"
