"""One form, without a server: its limits, and the models that a tenant may name in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from poolgrid.kernel.requests.inference import Refused
from poolgrid.server.frontend.access.tenants import Caller
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.http.guard import Guard
from poolgrid.server.proxy.server_connection import ServerConnection
from poolgrid.server.proxy.upload import HELD_BYTES_MAX, Upload

BOUNDARY = b"x"
END = b"\r\n--x--\r\n"
HALF = b"f" * (HELD_BYTES_MAX // 2)


def field(name: str, value: str) -> bytes:
    return f'\r\n--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()


FILE = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'


class Limited:
    """A caller that may use one model."""

    may_use_any_model = False

    def check_model(self, model: str) -> None:
        if model != "mine":
            raise Refused(403, "model_not_allowed", f"not {model}")


class Counting:
    """A guard that counts what it is told."""

    def __init__(self) -> None:
        self.bytes = 0

    def passed(self, size: int) -> None:
        self.bytes += size


class Taking:
    """A connection that takes what it gets, when it has room."""

    def __init__(self) -> None:
        self.data = b""
        self.is_sent = False
        self.room = asyncio.Event()
        self.room.set()

    async def has_room(self) -> None:
        await self.room.wait()

    def write(self, data: bytes) -> None:
        self.data += data

    def request_sent(self) -> None:
        self.is_sent = True


class Client:
    """Sends pieces, each when it is read."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = list(pieces)
        self.read = 0

    def leave(self) -> None:
        self.read = len(self._pieces)

    async def receive(self) -> dict[str, Any]:
        if self.read == len(self._pieces):
            return {"type": "http.disconnect"}
        self.read += 1
        more = self.read < len(self._pieces)
        return {"type": "http.request", "body": self._pieces[self.read - 1], "more_body": more}


def upload(
    client: Client, guard: Counting, length: int | None = None, bytes_max: int = 1 << 30, caller: object | None = None
) -> Upload:
    return Upload(client.receive, cast(Guard, guard), BOUNDARY, length, bytes_max, cast(Caller | None, caller))


async def sent(form: Upload, connection: Taking) -> RequestError | Refused | None:
    """Send the rest of a form; return why it was refused."""
    refusals: list[RequestError | Refused] = []
    over = asyncio.Event()

    def refuse(error: RequestError | Refused) -> None:
        refusals.append(error)
        over.set()

    form.start(cast(ServerConnection, connection), refuse)
    assert form._sending is not None
    form._sending.add_done_callback(lambda _: over.set())
    async with asyncio.timeout(60):
        await over.wait()
    return refusals[0] if refusals else None


async def test_nothing_beyond_the_beginning_is_read_while_the_server_takes_nothing() -> None:
    client, guard, connection = Client([FILE, HALF, HALF, HALF, END]), Counting(), Taking()
    form = upload(client, guard)
    beginning = await form.begin()
    assert beginning == FILE + HALF + HALF
    assert not form.is_whole
    connection.room.clear()

    form.start(cast(ServerConnection, connection), lambda error: None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (client.read, form.has_begun, guard.bytes) == (3, False, 0)
    form.stop()

    connection.room.set()
    assert await sent(form, connection) is None
    assert (form.has_begun, form.is_whole, connection.is_sent) == (True, True, True)
    assert guard.bytes == len(FILE + HALF * 3 + END)
    assert form.first() != beginning, "it is forgotten"


@pytest.mark.parametrize("chunked", [False, True])
async def test_form_without_a_length_that_becomes_too_long_is_refused(chunked: bool) -> None:
    pieces = [FILE, HALF, HALF, HALF, HALF, END]
    form = upload(Client(pieces), Counting(), None if chunked else 1, bytes_max=HELD_BYTES_MAX + len(HALF))
    await form.begin()
    connection = Taking()

    refusal = await sent(form, connection)

    assert isinstance(refusal, RequestError)
    assert (refusal.status, refusal.code) == (413, "body_too_large")
    assert not connection.is_sent
    with pytest.raises(RequestError, match="max_body_bytes"):
        await upload(Client(pieces), Counting(), bytes_max=1000).begin()


async def test_client_that_leaves_ends_the_form() -> None:
    assert await upload(Client([]), Counting()).begin() is None
    client, connection = Client([FILE, HALF, HALF, HALF, END]), Taking()
    form = upload(client, Counting())
    await form.begin()
    client.leave()

    assert await sent(form, connection) is None
    assert not connection.is_sent


@pytest.mark.parametrize("model", ["mine", "foreign"])
@pytest.mark.parametrize("before", [b"", field("model", "mine")])
async def test_tenant_may_name_its_model_alone_wherever_it_stands(model: str, before: bytes) -> None:
    """Servers take the last one."""
    behind = field("model", model)
    pieces = [FILE + before, HALF, HALF, behind[:-3], behind[-3:], END]
    form, connection = upload(Client(pieces), Counting(), caller=Limited()), Taking()
    await form.begin()

    refusal = await sent(form, connection)

    assert (refusal is None) is (model == "mine")
    assert connection.is_sent is (model == "mine")
    assert END not in connection.data or model == "mine"

    short = upload(Client([FILE + before, behind, END]), Counting(), caller=Limited())
    if model == "mine":
        await short.begin()
        assert short.is_whole
    else:
        with pytest.raises(Refused, match="foreign"):
            await short.begin()


@pytest.mark.parametrize("body", [FILE + field("a", "") * 200 + field("model", "foreign") + END, FILE, b"no form"])
async def test_tenant_with_models_of_its_own_needs_a_form_that_can_be_read(body: bytes) -> None:
    with pytest.raises(RequestError, match="its end cannot be found"):
        await upload(Client([body]), Counting(), caller=Limited()).begin()
    assert await upload(Client([body]), Counting()).begin() == body
