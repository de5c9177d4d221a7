"""An engine server of embeddings, as vLLM has it."""

from __future__ import annotations

import base64
from collections import deque
from typing import Any

from poolgrid.plugins.simulated.core import pictures
from tests.fakes.engine_server.http import HttpServer, Reply, Request


class TaskServer:
    """One model; ``refusals`` are answers to the next tasks."""

    def __init__(self) -> None:
        self.refusals: deque[tuple[int, Any]] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.http = HttpServer(self._handle)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.port}"

    async def _handle(self, request: Request, reply: Reply) -> None:
        body = request.json()
        self.bodies.append(body)
        if self.refusals:
            await reply.whole(*self.refusals.popleft())
            return
        rows = [
            {"index": number, "embedding": base64.b64encode(pictures.vector(str(each), 8)).decode()}
            for number, each in enumerate(body["input"])
        ]
        # Servers may answer in any order.
        await reply.whole(200, {"data": rows[::-1], "usage": {"prompt_tokens": 3 * len(rows)}})
