"""Forms on their way to a server: held whole up to a bound, streamed beyond it, with bounded memory."""

from __future__ import annotations

import hashlib
import threading

import pytest

from poolgrid.server.proxy.upload import HELD_BYTES_MAX
from tests.e2e.processes import becomes, metric
from tests.proxy.pool import GROWTH_BYTES_MAX, ScriptedPool
from tests.proxy.raw_client import RawClient
from tests.proxy.scripted_server import PATIENCE_S, Call, chunk, serve_plainly, whole

pytestmark = pytest.mark.e2e

PATH = "/v1/audio/transcriptions"
BOUNDARY = "----4711"
FORM = f"content-type: multipart/form-data; boundary={BOUNDARY}"
LIMIT_BYTES = 400 << 20
PIECE = bytes(range(256)) * 4096
"""A mebibyte of a file."""

UNFINISHED = "poolgrid_http_unfinished_bytes"


@pytest.fixture(scope="module")
def pool_options() -> tuple[str, ...]:
    return (f"max-body-bytes={LIMIT_BYTES}",)


def field(name: str, value: str) -> bytes:
    return f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


FILE = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode()
END = f"\r\n--{BOUNDARY}--\r\n".encode()


def behind_file(mebibytes: int, model: str) -> bytes:
    """Return a form with its model behind the file, as curl's examples have it."""
    return FILE + PIECE * mebibytes + b"\r\n" + field("model", model) + END[2:]


def begin(client: RawClient, length: int | None) -> None:
    """Send the head of an upload."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    client.write(f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\n{FORM}\r\n{framing}\r\n\r\n".encode())


class Reader:
    """A script that reads bodies as they come, and keeps their digest."""

    def __init__(self, pool: ScriptedPool) -> None:
        self.came = 0
        self.digest = hashlib.sha256()
        self.calls: list[Call] = []
        self.is_cut = False
        """The connection ended within a body."""
        for each in pool.servers:
            each.reads_bodies = False

    def __call__(self, call: Call) -> None:
        self.calls.append(call)
        self.came, self.digest = 0, hashlib.sha256()
        length = int(call.header("content-length") or -1)
        data, last = call.body, b""
        while True:
            self.came += len(data)
            self.digest.update(data)
            last = (last + data)[-5:]
            if self.came == length or (length < 0 and last == b"0\r\n\r\n"):
                break
            data = call.receive()
            if not data:
                self.is_cut = True
                call.is_left.set()
                return
        call.send(whole(b'{"text":"hi"}'))


def test_form_that_is_held_is_sent_whole_and_once_more_to_another_server(pool: ScriptedPool) -> None:
    body = behind_file(20, "tiny")
    calls: list[Call] = []

    def script(call: Call) -> None:
        calls.append(call)
        if len(calls) == 1:
            call.cut()
        else:
            serve_plainly(call)

    pool.on(script)

    assert pool.post(PATH, body, FORM).status == 200

    assert [call.body == body for call in calls] == [True, True]
    assert [call.header("content-length") for call in calls] == [str(len(body))] * 2
    assert sorted(len(each.calls) for each in pool.servers) == [1, 1]


@pytest.mark.parametrize("mebibytes", [0, 2, 30])
def test_model_behind_a_file_chooses_the_server(pool: ScriptedPool, mebibytes: int) -> None:
    pool.on(serve_plainly)
    for number, model in enumerate(("adapter-a", "adapter-b")):
        pool.forget()
        assert pool.post(PATH, behind_file(mebibytes, model), FORM).status == 200
        assert [len(each.calls) for each in pool.servers] == [1 - number, number]


def test_longer_form_passes_while_it_comes_with_bounded_memory(pool: ScriptedPool) -> None:
    script = Reader(pool)
    pool.on(script)
    form = hashlib.sha256()
    head = field("model", "tiny") + FILE
    pieces = 300
    length = len(head) + pieces * len(PIECE) + len(END)
    before, peak, unfinished = pool.memory_bytes(), 0, 0.0

    with pool.client() as client:
        begin(client, length)
        client.write(head)
        form.update(head)
        for number in range(pieces):
            client.write(PIECE)
            form.update(PIECE)
            if number % 10 == 0:
                peak = max(peak, pool.memory_bytes())
            if number == 100:
                becomes(lambda: script.came > 90 << 20, True)
                unfinished = metric(pool.url, UNFINISHED)
        client.write(END)
        form.update(END)
        answer = client.answer()

    assert (answer.status, answer.body) == (200, b'{"text":"hi"}')
    assert (script.came, script.digest.digest()) == (length, form.digest())
    (call,) = script.calls
    assert (call.header("content-length"), call.header("transfer-encoding")) == (str(length), None)
    assert peak - before < HELD_BYTES_MAX * 2 + GROWTH_BYTES_MAX
    assert unfinished < 4 << 20
    becomes(lambda: metric(pool.url, UNFINISHED), 0.0)


def test_longer_form_without_a_length_passes_in_chunks(pool: ScriptedPool) -> None:
    parts: list[bytes] = []

    def keeping(call: Call) -> None:
        parts.append(call.body)
        while not b"".join(parts[-5:]).endswith(b"0\r\n\r\n"):
            parts.append(call.receive())
            assert parts[-1]
        call.send(whole(b"{}"))

    for each in pool.servers:
        each.reads_bodies = False
    pool.on(keeping)
    form = field("model", "tiny") + FILE + PIECE * 40 + END

    with pool.client() as client:
        begin(client, None)
        for at in range(0, len(form), 3_000_000):
            client.write(chunk(form[at : at + 3_000_000]))
        client.write(b"0\r\n\r\n")
        answer = client.answer()

    assert (answer.status, answer.body) == (200, b"{}")
    (call,) = pool.calls
    assert (call.header("content-length"), call.header("transfer-encoding")) == (None, "chunked")
    assert unchunked(b"".join(parts)) == form


def unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while True:
        cut = body.index(b"\r\n", at)
        size = int(body[at:cut], 16)
        if not size:
            assert body[cut:] == b"\r\n\r\n"
            return b"".join(parts)
        parts.append(body[cut + 2 : cut + 2 + size])
        assert body[cut + 2 + size : cut + 4 + size] == b"\r\n"
        at = cut + 4 + size


def fill(client: RawClient, most: int) -> int:
    """Send a file until the client is held back for a second, or ``most`` bytes; return how many were taken."""
    client.connection.settimeout(1.0)
    taken = 0
    try:
        while taken < most:
            taken += client.connection.send(PIECE)
    except TimeoutError:
        pass
    finally:
        client.connection.settimeout(PATIENCE_S)
    return taken


def test_server_that_takes_nothing_holds_the_client_back(pool: ScriptedPool) -> None:
    release = threading.Event()

    def script(call: Call) -> None:
        release.wait(PATIENCE_S)
        call.cut()

    for each in pool.servers:
        each.reads_bodies = False
    pool.on(script)
    before = pool.memory_bytes()
    head = field("model", "tiny") + FILE
    with pool.client() as client:
        begin(client, LIMIT_BYTES)
        client.write(head)
        taken = fill(client, 300 << 20)

        assert HELD_BYTES_MAX <= taken < HELD_BYTES_MAX + (24 << 20)
        assert pool.memory_bytes() - before < HELD_BYTES_MAX * 2 + GROWTH_BYTES_MAX
        release.set()
        assert client.answer().status == 502


def test_answer_before_the_end_of_a_form_reaches_the_client(pool: ScriptedPool) -> None:
    for each in pool.servers:
        each.reads_bodies = False
    pool.on(lambda call: call.send(whole(b'{"error":"too large"}', 413)))
    with pool.client() as client:
        begin(client, LIMIT_BYTES)
        client.write(field("model", "tiny") + FILE)
        client.write(PIECE * 33)
        answer = client.answer()

    assert (answer.status, answer.body) == (413, b'{"error":"too large"}')


def test_longer_form_goes_to_another_server_while_only_its_beginning_was_read(pool: ScriptedPool) -> None:
    script = Reader(pool)
    cut: list[Call] = []

    def first_cuts(call: Call) -> None:
        if not cut:
            cut.append(call)
            call.cut()
        else:
            script(call)

    pool.on(first_cuts)
    head = field("model", "tiny") + FILE
    rest = PIECE + END
    beginning = head + PIECE * 40
    beginning = beginning[:HELD_BYTES_MAX]
    with pool.client() as client:
        begin(client, len(beginning) + len(rest))
        client.write(beginning)
        becomes(lambda: len(script.calls), 1)
        client.write(rest)
        answer = client.answer()

    assert (answer.status, script.came) == (200, len(beginning) + len(rest))
    assert cut[0].server is not script.calls[0].server


def test_longer_form_is_never_sent_again_once_more_of_it_was_read(pool: ScriptedPool) -> None:
    calls: list[Call] = []

    def script(call: Call) -> None:
        calls.append(call)
        came = len(call.body)
        while came < 36 << 20:
            came += len(call.receive())
        call.cut()

    for each in pool.servers:
        each.reads_bodies = False
    pool.on(script)
    with pool.client() as client:
        begin(client, 80 << 20)
        client.write(field("model", "tiny") + FILE)
        for _ in range(40):
            client.write(PIECE)
        answer = client.answer()

    assert (answer.status, answer.json()["error"]["code"], len(calls)) == (502, "server_lost", 1)


def test_client_that_leaves_within_a_form_ends_it_at_the_server(pool: ScriptedPool) -> None:
    script = Reader(pool)
    pool.on(script)
    with pool.client() as client:
        begin(client, LIMIT_BYTES)
        client.write(field("model", "tiny") + FILE)
        for _ in range(40):
            client.write(PIECE)
        becomes(lambda: script.came > 33 << 20, True)
    becomes(lambda: script.is_cut, True)


@pytest.mark.parametrize("length", [LIMIT_BYTES + 1, 1 << 62])
def test_form_beyond_the_limit_is_refused_by_its_length(pool: ScriptedPool, length: int) -> None:
    with pool.client() as client:
        begin(client, length)
        answer = client.answer()

    assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert "max_body_bytes" in answer.json()["error"]["message"]
    assert pool.calls == []


def test_uploads_at_once_do_not_push_each_other_out(pool: ScriptedPool) -> None:
    """Twenty of them are longer together than what unfinished requests may hold."""
    for each in pool.servers:
        each.reads_bodies = False
    statuses: list[int] = []

    def script(call: Call) -> None:
        came, length = len(call.body), int(call.header("content-length") or 0)
        while came < length and (data := call.receive()):
            came += len(data)
        call.send(whole(b"{}"))

    pool.on(script)

    def upload() -> None:
        with pool.client() as client:
            begin(client, (48 << 20) + len(END) + len(FILE))
            client.write(FILE)
            for _ in range(48):
                client.write(PIECE)
            client.write(END)
            statuses.append(client.answer().status)

    for _ in range(3):
        threads = [threading.Thread(target=upload) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert statuses == [200] * 15
