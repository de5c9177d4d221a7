"""An answer that is no HTTP, or too much of it, harms its own request at most."""

from __future__ import annotations

import pytest

from tests.proxy.pool import GROWTH_BYTES_MAX, ScriptedPool
from tests.proxy.raw_client import CHAT, chat_body

pytestmark = pytest.mark.e2e

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
HOSTILE = {
    "a header without end": OK + b"x-long: " + b"y" * (4 << 20),
    "headers without end": OK + b"x: y\r\n" * 500_000,
    "a header of a megabyte": OK + b"x: " + b"y" * (1 << 20) + b"\r\ncontent-length: 2\r\n\r\n{}",
    "too short a body": OK + b"content-length: 100\r\n\r\n{}",
    "too long a body": OK + b"content-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\n",
    "a length that is none": OK + b"content-length: -1\r\n\r\n{}",
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "chunks that are none": OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a chunk of exabytes": OK + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}\r\n",
    "another transfer coding": OK + b"transfer-encoding: gzip\r\n\r\n{}",
    "a length and chunks": OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "interim answers": b"HTTP/1.1 102 Processing\r\n\r\n" * 100 + OK + b"content-length: 2\r\n\r\n{}",
    "a flood of interim answers": b"HTTP/1.1 102 Processing\r\n\r\n" * 50_000,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n{}",
    "status 999": b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}",
    "status 0": b"HTTP/1.1 0 Odd\r\ncontent-length: 2\r\n\r\n{}",
    "HTTP/1.0 without length": b"HTTP/1.0 200 OK\r\n\r\n{}",
    "zero bytes": b"\0" * 1000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("path", [CHAT, "/v1/odd"])
@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE.keys())
def test_client_gets_the_answer_or_an_error_and_the_next_one_is_served(
    pool: ScriptedPool, said: bytes, path: str
) -> None:
    """The fixture sends the next request."""
    before = pool.memory_bytes()
    pool.says(said)

    answer = pool.post(path, chat_body())

    if answer.status in (422, 502, 503):
        assert answer.json()["error"]["code"] in ("workers_lost", "server_lost", "no_worker")
    else:
        assert answer.status == 200
        assert answer.body == b"{}" or not answer.is_whole
    assert pool.memory_bytes() - before < GROWTH_BYTES_MAX
