"""The pool that tests send requests to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from tests.e2e.fleet import pools
from tests.e2e.processes import Process, becomes, sum_of
from tests.proxy.raw_client import CHAT, Answer, RawClient, chat_body
from tests.proxy.scripted_server import Call, Script, ScriptedServer, serve_plainly, whole

SERVER_KEY = "server/key-4711"
"""What the servers want."""

GROWTH_BYTES_MAX = 48 << 20
"""Most that a router may grow by for one request of a test, whose servers send more than twice as much."""


POOLS = ("near", "far")

TWO_POOLS: dict[str, Any] = {
    "version": 1,
    "mode": "aggregated",
    "aggregated": {
        "pools": [{"name": name, "priority": rank} for rank, name in enumerate(POOLS)],
        "isl_min": 0,
        "isl_max": 2000,
        "isl_resolution": 2,
        "ttft_min_ms": 0,
        "ttft_max_ms": 4000,
        "ttft_resolution": 2,
        "itl_min_ms": 0,
        "itl_max_ms": 100,
        "itl_resolution": 1,
        "mapping": [[["near"], ["far"]], [["near"], ["near"]]],
        "priority_overrides": [{"min_priority": 50, "max_priority": 100, "target_pool": "far"}],
    },
    "defaults": {"ttft_target_ms": 3000, "itl_target_ms": 50},
}
"""A pool-grid document: urgent and long prompts go near, all others far."""


def rows(url: str, target: str) -> list[dict[str, Any]]:
    """Return a list of a router. Every test asks for some, and an HTTP library takes several times the CPU."""
    with RawClient(url) as client:
        client.ask("GET", target)
        found: list[dict[str, Any]] = client.answer("GET").json()["data"]
        return found


class ScriptedPool:
    """A router in front of two scripted servers, or a global router in front of a pool of each."""

    def __init__(self, up: Process, servers: list[ScriptedServer], log: Path) -> None:
        self.up = up
        self.log = log
        self.url = up.url
        self.servers = servers
        self.is_global = bool(up.children("global-router"))
        self.router = psutil.Process(up.child("global-router" if self.is_global else "router").pid)
        self.routers = [row["url"] for row in pools(up.url).values()] if self.is_global else [up.url]
        """Those that choose servers."""

    def begin(self) -> None:
        """Wait until both servers take requests, and forget what came before."""
        for each in self.servers:
            each.script = None
            each.reads_bodies = True
        becomes(lambda: [row["state"] for url in self.routers for row in rows(url, "/v1/workers")], ["ready"] * 2)
        if self.is_global:
            becomes(lambda: {row["state"] for row in rows(self.url, "/v1/pools")}, {"available"})
        self.forget()

    def forget(self) -> None:
        """Forget what the servers got."""
        for each in self.servers:
            each.calls.clear()
            each.targets.clear()
            each.failures.clear()

    def end(self) -> None:
        """No script may have failed, no request may be left, and the next one is answered."""
        assert [error for each in self.servers for error in each.failures] == []
        becomes(self.running, 0.0)
        self.on(serve_plainly)
        assert self.post(CHAT, chat_body()).status == 200

    def on(self, script: Script) -> None:
        """Have a script answer all requests from now on."""
        for each in self.servers:
            each.script = script

    def says(self, data: bytes) -> None:
        """Have all requests answered with these bytes, after which the connection ends."""
        self.on(lambda call: call.cut(data))

    def answers(self, body: bytes, status: int = 200, *headers: str, kind: str = "application/json") -> None:
        """Have all requests answered."""
        self.on(lambda call: call.send(whole(body, status, *headers, kind=kind)))

    @property
    def calls(self) -> list[Call]:
        return [call for each in self.servers for call in each.calls]

    def only_call(self) -> Call:
        (call,) = self.calls
        return call

    def call(self, method: str, target: str, body: bytes | None = None, *headers: str) -> Answer:
        """Send one request on a connection of its own."""
        with RawClient(self.url) as client:
            client.ask(method, target, body, *headers)
            return client.answer(method)

    def post(self, target: str, body: bytes, *headers: str) -> Answer:
        return self.call("POST", target, body, *headers)

    def client(self, receive_buffer: int | None = None) -> RawClient:
        return RawClient(self.url, receive_buffer)

    def running(self) -> float:
        """Return how many requests the router counts as running."""
        return sum_of(self.metrics(), "poolgrid_frontend_in_flight_requests")

    def counted(self) -> list[float]:
        """Return the tokens that the router has counted."""
        names = ("prompt_tokens", "cached_tokens", "output_tokens")
        metrics = self.metrics()
        return [sum_of(metrics, f"poolgrid_frontend_{name}_total") for name in names]

    def metrics(self) -> str:
        return self.call("GET", "/metrics").body.decode()

    def memory_bytes(self) -> int:
        return int(self.router.memory_info().rss)
