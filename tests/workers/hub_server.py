"""A server on loopback that serves models as hubs do, and breaks off, refuses and holds as it is told."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"

WAIT_S = 120.0


class FileServer:
    """What is served, what is to go wrong, and what was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.heads: dict[str, dict[str, str]] = {}
        """Further fields of the answers for a path."""
        self.statuses: dict[str, list[int]] = {}
        """Statuses of the next answers for a path, in place of the file."""
        self.cuts: dict[str, list[int]] = {}
        """Bytes after which the next answers for a path break off."""
        self.holds: dict[str, int] = {}
        """Bytes after which answers for a path wait until ``go_on`` is set."""
        self.held = threading.Event()
        self.go_on = threading.Event()
        self.asked: list[tuple[str, str, str]] = []
        """Path, range and authorization of each request."""
        self.url = ""

    def ranges(self, path: str) -> list[str]:
        """Return the ranges in which a path was asked for, in order."""
        return [given for asked, given, _ in self.asked if asked == path]

    def serve_model(self, repository: str, files: Mapping[str, bytes], lfs: str = ".safetensors") -> None:
        """Serve a model as a hub does, the large files from a store elsewhere."""
        siblings: list[dict[str, Any]] = []
        tree: list[dict[str, Any]] = []
        for path, content in files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            each: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
            resolve = f"/{repository}/resolve/{COMMIT}/{path}"
            if path.endswith(lfs):
                sha256 = hashlib.sha256(content).hexdigest()
                each["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
                # The same server by another name: another place, for whoever must not be told the token.
                self.redirects[resolve] = self.url.replace("127.0.0.1", "localhost") + f"/store/{path}"
                self.files[f"/store/{path}"] = content
                self.heads[resolve] = {"x-linked-etag": f'"{sha256}"', "x-linked-size": str(len(content))}
            else:
                self.files[resolve] = content
            self.heads.setdefault(resolve, {}).update({"x-repo-commit": COMMIT, "etag": f'"{blob}"'})
            siblings.append(each)
            lfs_fields = {"lfs": {"oid": each["lfs"]["sha256"], **each["lfs"]}} if "lfs" in each else {}
            tree.append({"type": "file", "path": path, "size": len(content), "oid": blob, **lfs_fields})
        self.files[f"/api/models/{repository}/tree/{COMMIT}"] = json.dumps(tree).encode()
        info = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
        for revision in ("main", COMMIT):
            self.files[f"/api/models/{repository}/revision/{revision}"] = info
        self.files[f"/api/models/{repository}"] = info


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: FileServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        served = self.served
        path = unquote(urlsplit(self.path).path)
        given = self.headers.get("range", "")
        if self.command == "GET":
            served.asked.append((path, given, self.headers.get("authorization", "")))
        if served.statuses.get(path):
            self._answer(served.statuses[path].pop(0), b"")
            return
        fields = served.heads.get(path, {})
        if path in served.redirects:
            self._answer(302, b"", location=served.redirects[path], **fields)
            return
        content = served.files.get(path)
        if content is None:
            self._answer(404, b'{"error":"Repository not found"}', **{"x-error-code": "RepoNotFound"})
            return
        begin = int(given.removeprefix("bytes=").partition("-")[0]) if given else 0
        extra = {"content-range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if begin else {}
        self._answer(206 if begin else 200, content[begin:], path, **fields, **extra)

    def _answer(self, status: int, body: bytes, path: str = "", **headers: str) -> None:
        served = self.served
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if served.cuts.get(path):
                self.wfile.write(body[: served.cuts[path].pop(0)])
                self.close_connection = True
                return
            hold = served.holds.get(path)
            if hold is not None and not served.go_on.is_set():
                self.wfile.write(body[:hold])
                self.wfile.flush()
                served.held.set()
                served.go_on.wait(WAIT_S)
                body = body[hold:]
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # whoever asked is gone

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def file_server() -> Iterator[FileServer]:
    """Run a server until the end of the block."""
    served = FileServer()
    handler = type("Handler", (_Handler,), {"served": served})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield served
        finally:
            served.go_on.set()
            server.shutdown()
            thread.join()
