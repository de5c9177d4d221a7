"""An API server of Kubernetes that has EndpointSlices only, and is as unfriendly as the real one may be.

What it does is what ``k8s.io/apiserver`` does: lists with ``resourceVersion=0`` come whole from memory and ignore the
limit; others come in pages whose tokens are good for one state of the store, and 410 afterwards; a page after the first
must not say a version; answers are chunked; refusals are a ``Status``; tokens end.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import trustme

from poolgrid.plugins.kubernetes.registrations import KubernetesRegistrations
from poolgrid.server.process.clock import Clock, SystemClock

PATH = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
AUTHORITY = trustme.CA(key_type=trustme.KeyType.ECDSA)


class ApiServer:
    """Serves ``slices`` on loopback, to whoever shows ``token``."""

    def __init__(self, directory: Path, namespace: str = "llm") -> None:
        self.account = directory / "account"
        self.namespace = namespace
        self.slices: list[dict[str, Any]] = []
        self.pods: list[dict[str, Any]] = []
        """All of them have the labels that are asked for."""
        self.token = ""
        self.asked: list[dict[str, str]] = []
        """Questions of every list that was allowed."""
        self.refusals: list[tuple[int, dict[str, str]]] = []
        """Status and headers of the next answers; then it answers as it should."""
        self.from_memory = True
        """Whether its memory is ready; while it is not, ``resourceVersion=0`` is answered in pages too."""
        self.page = 0
        """Slices of a page; 0 = as many as asked for."""
        self.changes_between_pages = 0
        """So many times what was listed is gone from history before the next page."""
        self.url = ""
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._version = 100
        self.account.mkdir()
        (self.account / "namespace").write_text(namespace)
        self.renew("first")

    def renew(self, token: str, authority: trustme.CA = AUTHORITY, *, told: bool = True) -> None:
        """Take another token from now on; ``told`` = the kubelet has brought it already."""
        self.token = token
        if told:
            self.tell(authority)

    def tell(self, authority: trustme.CA = AUTHORITY) -> None:
        (self.account / "token").write_text(f"{self.token}\n")
        (self.account / "ca.crt").write_bytes(authority.cert_pem.bytes())

    def names(self, clock: Clock | None = None) -> KubernetesRegistrations:
        """Return a reader of it."""
        return KubernetesRegistrations(self.url, self.account, (), clock or SystemClock(), 0.0)

    async def start_proxy(self) -> None:
        """Serve as ``kubectl proxy`` does: without TLS, to processes without an account."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self, authority: trustme.CA = AUTHORITY, port: int = 0) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=context)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        served = dict(self._connections)
        for each in served.values():
            each.transport.abort()
        await asyncio.gather(*served)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                status, more, answer = self._answer(head[0].split(" ")[1], headers.get("authorization", ""))
                writer.write(f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\n".encode())
                writer.write("".join(f"{name}: {value}\r\n" for name, value in more.items()).encode())
                writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
                body = json.dumps(answer).encode()
                for first in range(0, len(body), 1000):
                    piece = body[first : first + 1000]
                    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            del self._connections[task]
            writer.close()

    def _answer(self, target: str, authorization: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        path, asked = urlsplit(target).path, dict(parse_qsl(urlsplit(target).query))
        if self.url.startswith("https:") and authorization != f"Bearer {self.token}":
            return 401, {}, status(401, "Unauthorized", "Unauthorized")
        if self.refusals:
            code, headers = self.refusals.pop(0)
            return code, headers, status(code, "TooManyRequests", "too many requests, please try again later")
        if path == f"/api/v1/namespaces/{self.namespace}/pods":
            self.asked.append(asked)
            return 200, {}, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self.pods}
        if path != PATH.format(self.namespace):
            said = (
                'endpointslices.discovery.k8s.io is forbidden: User "system:serviceaccount:llm:x" cannot list resource'
            )
            return 403, {}, status(403, "Forbidden", said)
        self.asked.append(asked)
        if "continue" in asked:
            if asked.get("resourceVersion", "0") != "0":
                said = "specifying resource version is not allowed when using continue"
                return 400, {}, status(400, "BadRequest", said)
            if self.changes_between_pages:
                self.changes_between_pages -= 1
                self._version += 1
            version, _, first = asked["continue"].partition(":")
            if int(version) != self._version:
                said = "The provided continue parameter is too old to display a consistent list result."
                return 410, {}, status(410, "Expired", said)
            return 200, {}, self._list(asked, int(first))
        return 200, {}, self._list(asked, 0)

    def _list(self, asked: dict[str, str], first: int) -> dict[str, Any]:
        wanted = [term.partition("=") for term in asked["labelSelector"].split(",")]
        found = [
            each
            for each in sorted(self.slices, key=lambda one: str(one["metadata"]["name"]))
            if all(
                name in each["metadata"]["labels"] and (not equal or each["metadata"]["labels"][name] == value)
                for name, equal, value in wanted
            )
        ]
        limit = self.page or int(asked.get("limit", "0")) or len(found)
        if self.from_memory and asked.get("resourceVersion") == "0":
            limit = len(found)
        metadata = {"resourceVersion": str(self._version)}
        if first + limit < len(found):
            metadata["continue"] = f"{self._version}:{first + limit}"
        return {
            "kind": "EndpointSliceList",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": metadata,
            "items": found[first : first + limit],
        }


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


@contextmanager
def proxy_in_a_thread(server: ApiServer) -> Iterator[ApiServer]:
    """Have it serve beside a test that waits for processes."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start_proxy(), loop).result(60)
        yield server
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
