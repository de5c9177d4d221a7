"""Stands between a client and the pool, and has a model that writes at random call a tool first.

A coding agent leaves it to the model whether to call a tool. ``forced_calls`` passes its requests on unchanged, except
that a request whose last message is the user's is given a ``tool_choice``. All answers pass through as they come.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 120
OWN = ("host", "connection", "content-length", "accept-encoding", "transfer-encoding", "expect")
"""Headers of one connection; all others pass through."""


@dataclass
class Passed:
    """What went through."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of each request with a body, by lower-case name."""


def _asks(body: dict[str, Any]) -> bool:
    """Return whether the user speaks last; results of tools come from the user too in Anthropic's API."""
    turns = [turn for turn in body.get("input") or body.get("messages") or () if turn.get("role") != "system"]
    last = turns[-1] if turns else {}
    return last.get("role") == "user" and '"tool_result"' not in json.dumps(last)


@contextmanager
def forced_calls(url: str, choice: Any = None) -> Iterator[Passed]:
    """Yield the address to give to a client, and what it asked; without a ``choice`` nothing is changed."""
    passed = Passed()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            body = json.loads(raw)
            passed.bodies.append(body)
            passed.headers.append({name.lower(): value for name, value in self.headers.items()})
            if choice is not None and body.get("tools") and _asks(body):
                raw = json.dumps({**body, "tool_choice": choice}).encode()
            self._pass_on(raw)

        def _pass_on(self, raw: bytes | None) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN}
            request = urllib.request.Request(url + self.path, raw, headers, method=self.command)
            try:
                answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                if raw is not None:
                    passed.statuses.append(answer.status)
                self.send_response(answer.status)
                self.send_header("content-type", answer.headers.get("content-type", ""))
                self.end_headers()
                while part := answer.read1(65536):
                    self.wfile.write(part)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        passed.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield passed
        finally:
            server.shutdown()
            thread.join()
