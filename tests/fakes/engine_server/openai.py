"""A server that reports nothing but OpenAI's API: no version, no health, no metrics, no events."""

from __future__ import annotations

from typing import Any

from tests.fakes.engine_server.http import Reply, Request
from tests.fakes.engine_server.vllm import Options, VllmServer


class OpenAiServer(VllmServer):
    """Answers completions as the other stand-ins do."""

    def __init__(self, context: Any, options: Options | None = None) -> None:
        super().__init__(context, options)
        self.options.publishes = False

    async def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/v1/models":
            listed = [{"id": self.options.model, "object": "model", "created": 1, "owned_by": "library"}]
            await reply.whole(200, {"object": "list", "data": listed})
        elif request.path == "/v1/completions":
            await super()._handle(request, reply)
        else:
            await reply.whole(404, b"404 page not found", "text/plain")
