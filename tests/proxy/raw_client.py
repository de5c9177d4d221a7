"""A client that writes and reads HTTP/1.1 as bytes."""

from __future__ import annotations

import json
import socket
import struct
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.proxy.scripted_server import MODEL, PATIENCE_S

CHAT = "/v1/chat/completions"


def chat_body(**more: Any) -> bytes:
    """Return a request for a chat."""
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}).encode()


class Answer:
    """What came back."""

    def __init__(self, head: bytes) -> None:
        line, *headers = head.split(b"\r\n")
        self.status = int(line.split(b" ")[1])
        pairs = (each.partition(b":") for each in headers)
        self.headers = [(name.decode("latin-1").lower(), value.strip().decode("latin-1")) for name, _, value in pairs]
        self.chunks: list[bytes] = []
        self.is_whole = False
        """Whether its end came, as its framing has it."""

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class RawClient:
    """One connection to the router."""

    def __init__(self, url: str, receive_buffer: int | None = None) -> None:
        parts = urlsplit(url)
        self._host = parts.netloc
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect((parts.hostname, parts.port))
        self._data = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self, reset: bool = False) -> None:
        """Close the connection."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    @property
    def connection(self) -> socket.socket:
        return self._socket

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def ask(self, method: str, target: str, body: bytes | None = None, *headers: str) -> None:
        """Send a request."""
        lines = [f"{method} {target} HTTP/1.1", f"host: {self._host}", *headers]
        if body is not None:
            if not any(each.lower().startswith("content-type:") for each in headers):
                lines.append("content-type: application/json")
            lines.append(f"content-length: {len(body)}")
        self.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b""))

    def more(self) -> bool:
        """Read some bytes; return whether there were any."""
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionError:
            return False
        self._data += data
        return bool(data)

    def until(self, mark: bytes) -> bytes:
        """Return what comes before a mark; raises ``EOFError``."""
        while mark not in self._data:
            if not self.more():
                raise EOFError(self._data)
        found, _, self._data = self._data.partition(mark)
        return found

    def exactly(self, count: int) -> bytes:
        """Return so many bytes; raises ``EOFError``."""
        parts, missing = [], count
        while True:
            part, self._data = self._data[:missing], self._data[missing:]
            parts.append(part)
            missing -= len(part)
            if not missing:
                return b"".join(parts)
            if not self.more():
                raise EOFError(part)

    def rest(self) -> bytes:
        """Return all that comes until the end of the connection."""
        while self.more():
            pass
        return self._data

    def head(self) -> Answer:
        """Read the head of an answer, and skip interim ones."""
        while True:
            answer = Answer(self.until(b"\r\n\r\n"))
            if answer.status >= 200 or answer.status == 101:
                return answer

    def next_chunk(self, answer: Answer) -> bytes:
        """Read one chunk of an answer; it is empty at the end. Raises ``EOFError``."""
        size = int(self.until(b"\r\n"), 16)
        data = self.exactly(size)
        assert self.exactly(2) == b"\r\n"
        if size:
            answer.chunks.append(data)
        else:
            answer.is_whole = True
        return data

    def read_until_it_breaks(self, answer: Answer) -> None:
        """Read the chunks of an answer that ends without its end."""
        try:
            while self.next_chunk(answer):
                pass
        except EOFError:
            return
        raise AssertionError("the answer is whole")

    def answer(self, method: str = "POST") -> Answer:
        """Read an answer to its end, or to that of the connection."""
        answer = self.head()
        try:
            if method == "HEAD" or answer.status in (204, 304):
                answer.is_whole = True
            elif answer.header("transfer-encoding") == "chunked":
                while self.next_chunk(answer):
                    pass
            elif (length := answer.header("content-length")) is not None:
                answer.chunks.append(self.exactly(int(length)))
                answer.is_whole = True
            else:
                answer.chunks.append(self.rest())
                answer.is_whole = True
        except EOFError:
            pass
        return answer
