"""An engine server whose answers are the exact bytes that a test sets, and which keeps the exact bytes that it gets.

It answers by itself what poolgrid asks of every server. Each connection has a thread, so scripts are plain functions.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0
"""For anything that is to happen, on a busy machine."""

NO_PROGRESS_S = 1.0
"""A connection that takes nothing for so long is held back."""

MODEL = "tiny"

METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="4000"} 1.0
"""


class Call:
    """One request, and the connection for its answer."""

    def __init__(self, server: ScriptedServer, connection: socket.socket, head: bytes, body: bytes) -> None:
        self.server = server
        self.connection = connection
        self.head = head
        self.body = body
        line, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        self.method, self.target, _ = line.decode("latin-1").split(" ")
        pairs = (each.partition(b":") for each in headers)
        self.headers = [(name.decode("latin-1"), value.strip().decode("latin-1")) for name, _, value in pairs]
        self.is_left = threading.Event()
        """Set once the connection has ended, by the router where a script waits for that."""

    def header(self, name: str) -> str | None:
        """Return a header, whose name is in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def fill(self, data: bytes, times: int) -> tuple[int, bool]:
        """Send data repeatedly; return how many bytes were taken, and whether the connection was held back."""
        self.connection.settimeout(NO_PROGRESS_S)
        taken = 0
        for _ in range(times):
            rest = memoryview(data)
            while rest:
                try:
                    sent = self.connection.send(rest)
                except TimeoutError:
                    self._unsent = bytes(rest)
                    return taken, True
                taken, rest = taken + sent, rest[sent:]
        return taken, False

    def fill_on(self, data: bytes, times: int) -> None:
        """Send what ``fill`` could not, and more."""
        self.connection.settimeout(PATIENCE_S)
        self.send(self._unsent)
        for _ in range(times):
            self.send(data)

    def receive(self) -> bytes:
        """Return what comes next; nothing at the end."""
        try:
            return self.connection.recv(65_536)
        except ConnectionError:
            return b""

    def wait_until_left(self) -> None:
        """Wait until the router closes the connection."""
        while self.receive():
            pass
        self.is_left.set()

    def cut(self, last: bytes = b"") -> None:
        """End the connection, after some last bytes."""
        with contextlib.suppress(OSError):
            self.send(last)
            self.connection.shutdown(socket.SHUT_RDWR)
        self.is_left.set()

    def reset(self) -> None:
        """End the connection without order, as a process that is killed."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.is_left.set()


Script = Callable[[Call], None]


class ScriptedServer:
    """One server; ``script`` answers what poolgrid does not ask by itself."""

    def __init__(self, root: str, *adapters: str) -> None:
        """``root`` is the directory of its model."""
        self._root = root
        self._adapters = adapters
        self.script: Script | None = None
        self.calls: list[Call] = []
        """Requests that a script has answered."""
        self.targets: list[str] = []
        """Method and target of each request."""
        self.failures: list[BaseException] = []
        """What scripts have raised."""
        self.reads_bodies = True
        """Whether a script gets a request with its whole body; else it receives the rest itself."""
        self.list_headers: tuple[str, ...] = ()
        """Further headers of its lists of models."""
        self.lists: list[Call] = []
        """Requests for these, the last ones."""
        self.connections_made = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def cards(self) -> list[dict[str, Any]]:
        base = {"object": "model", "owned_by": "vllm", "max_model_len": 8192, "x_field": {"deep": [1, None]}}
        own = {"id": MODEL, **base, "root": self._root, "parent": None}
        return [own, *({"id": each, **base, "root": f"/{each}", "parent": MODEL} for each in self._adapters)]

    def drop_idle(self) -> None:
        """End the connections, as servers do with those that were idle for long."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def stop_listening(self, kept: Call | None = None) -> None:
        """Take no new connections, and end those that are there but that of a call, as servers do on SIGTERM."""
        self._port = self._listener.getsockname()[1]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for connection in list(self._connections):
            if kept is None or connection is not kept.connection:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def listen_again(self) -> None:
        """Take connections at the same port."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def close(self) -> None:
        """End every connection and thread."""
        self.stop_listening()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            self.connections_made += 1
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while (call := self._read(connection)) is not None:
                if not self._answer(call):
                    break
                connection.settimeout(None)
        except OSError:
            pass
        finally:
            self._connections.discard(connection)
            connection.close()

    def _read(self, connection: socket.socket) -> Call | None:
        data = b""
        while b"\r\n\r\n" not in data:
            part = connection.recv(65_536)
            if not part:
                return None
            data += part
        head, mark, body = data.partition(b"\r\n\r\n")
        call = Call(self, connection, head + mark, body)
        missing = int(call.header("content-length") or 0) - len(body) if self.reads_bodies else 0
        parts = [body]
        while missing > 0:
            part = connection.recv(65_536)
            if not part:
                return None
            parts.append(part)
            missing -= len(part)
        call.body = b"".join(parts)
        return call

    def _answer(self, call: Call) -> bool:
        """Answer; return whether the connection takes another request."""
        self.targets.append(f"{call.method} {call.target}")
        known = self._known_answer(call)
        if known is not None:
            call.send(known)
            return True
        self.calls.append(call)
        script = self.script or serve_plainly
        try:
            script(call)
        except OSError:
            return False
        except BaseException as error:
            self.failures.append(error)
            return False
        return not call.is_left.is_set()

    def _known_answer(self, call: Call) -> bytes | None:
        """Answer what poolgrid asks of each server."""
        if call.method != "GET" or call.header("x-script"):
            return None
        known = {
            "/health": b"",
            "/version": b'{"version":"0.33.0"}',
            "/v1/models": json.dumps({"object": "list", "data": self.cards()}).encode(),
            "/openapi.json": b'{"openapi":"3.1.0","paths":{"/v1/completions":{}},"components":{"schemas":{}}}',
        }
        if call.target == "/v1/models":
            self.lists = [*self.lists[-9:], call]
            return whole(known[call.target], 200, *self.list_headers)
        if call.target in known:
            return whole(known[call.target])
        if call.target == "/metrics":
            return whole(METRICS, kind="text/plain")
        return None if call.target.startswith("/v1") else whole(b'{"detail":"Not Found"}', 404)


def whole(body: bytes, status: int = 200, *headers: str, kind: str = "application/json") -> bytes:
    """Return an answer with a length."""
    lines = [f"HTTP/1.1 {status} Said", f"content-type: {kind}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def stream_head(*headers: str) -> bytes:
    """Return the head of a stream."""
    lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked"]
    return "\r\n".join([*lines, *headers]).encode("latin-1") + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"

ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":5,"model":"tiny","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,'
    b'"completion_tokens":2,"total_tokens":5}}'
)


def serve_plainly(call: Call) -> None:
    """Answer anything."""
    call.send(whole(ANSWER))
