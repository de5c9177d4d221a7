"""A low limit of open files bounds the connections, and keeps no client waiting."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest

SERVER = """
import asyncio, os, resource, sys
files, others = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
from poolgrid.server.http.http_server import HttpServer

async def application(scope, receive, send):
    if scope["path"] == "/slow":
        await asyncio.sleep(600)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

async def main():
    server = HttpServer(application, "127.0.0.1", 0, "port")
    server.start()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(others)]
    print(server.port, server.connections.limits.connections, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

FILES = 64
CROWD = [f"127.0.0.{2 + number % 8}" for number in range(90)]
BYSTANDER = "127.0.0.100"
ANSWERED_WITHIN_S = 5.0
"""Far below the 20 s after which a connection that waits for its request is closed anyway."""


class Server:
    """An HTTP server of its own process, with few file descriptors."""

    def __init__(self, others: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(FILES), str(others)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port, self.connections = map(int, self.process.stdout.readline().split())

    def connect(self, address: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60, (address, 0))

    def ask(self, address: str) -> tuple[bytes, float]:
        """Return the status line of an answer, and the time that it took."""
        began_s = time.monotonic()
        with closing(self.connect(address)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            return client.recv(12), time.monotonic() - began_s


@pytest.fixture(params=[0, 20], ids=["its own files", "files that others open later"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def test_the_limit_counts_the_files_that_are_open_and_those_that_others_need(server: Server) -> None:
    assert 1 <= server.connections < FILES // 2


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"], ids=["new", "idle"])
def test_connections_that_only_wait_keep_no_other_client_from_an_answer(server: Server, sent: bytes) -> None:
    with ExitStack() as held:
        for address in CROWD:
            client = held.enter_context(closing(server.connect(address)))
            client.sendall(sent)
        for _ in range(5):
            status, took_s = server.ask(BYSTANDER)
            assert status == b"HTTP/1.1 200"
            assert took_s < ANSWERED_WITHIN_S


def test_connections_with_a_request_in_work_keep_no_other_client_waiting(server: Server) -> None:
    with ExitStack() as held:
        for address in CROWD:
            client = held.enter_context(closing(server.connect(address)))
            with suppress(ConnectionResetError):  # the server has given it up for others
                client.sendall(b"GET /slow HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        for _ in range(5):
            status, took_s = server.ask(BYSTANDER)
            assert status in (b"HTTP/1.1 503", b"HTTP/1.1 200")  # the crowd may have been refused itself
            assert took_s < ANSWERED_WITHIN_S
