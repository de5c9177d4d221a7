"""An engine server of tasks: embeddings, images at once, and videos as jobs, as trtllm-serve and vLLM have them."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from typing import Any

from poolgrid.wire.tasks import VisualTask
from poolgrid.workers.engines.simulated.core import pictures
from tests.fakes.engine_server.http import HttpServer, Reply, Request

PATHS = ("/v1/embeddings", "/v1/images/generations", "/v1/videos")


class TaskServer:
    """One model for tasks; ``refusals`` are statuses that answer the next tasks."""

    def __init__(self, model: str = "maker", paths: tuple[str, ...] = PATHS) -> None:
        self.model = model
        self.paths = paths
        self.refusals: deque[tuple[int, Any]] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.videos: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.progress_per_question = 50
        self.draws = asyncio.Event()
        """Images wait for it."""
        self.draws.set()
        self.http = HttpServer(self._handle)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.port}"

    async def _handle(self, request: Request, reply: Reply) -> None:
        path = request.path
        if path == "/health":
            await reply.whole(200, {})
        elif path == "/v1/models":
            rows = [{"id": self.model, "object": "model", "owned_by": "vllm", "root": self.model}]
            await reply.whole(200, {"object": "list", "data": rows})
        elif path == "/openapi.json":
            await reply.whole(200, {"paths": {each: {} for each in self.paths}})
        elif request.method == "POST" and path in self.paths:
            self.bodies.append(request.json())
            if self.refusals:
                await reply.whole(*self.refusals.popleft())
                return
            await self._make(path, request.json(), reply)
        elif path.startswith("/v1/videos/"):
            await self._video(request, path.removeprefix("/v1/videos/"), reply)
        else:
            await reply.whole(404, {"detail": "Not Found"})

    async def _make(self, path: str, body: dict[str, Any], reply: Reply) -> None:
        if path == "/v1/embeddings":
            inputs = body["input"]
            rows = [
                {"index": number, "embedding": base64.b64encode(pictures.vector(str(each), 8)).decode()}
                for number, each in enumerate(inputs)
            ]
            # Servers may answer in any order.
            await reply.whole(200, {"data": rows[::-1], "usage": {"prompt_tokens": 3 * len(inputs)}})
        elif path == "/v1/images/generations":
            await self.draws.wait()
            image = base64.b64encode(pictures.image(VisualTask(body["prompt"]), 8, 8)).decode()
            await reply.whole(200, {"created": 1, "data": [{"b64_json": image}] * body["n"], "output_format": "png"})
        else:
            name = f"video_{len(self.videos)}"
            self.videos[name] = {"id": name, "status": "queued", "progress": 0, "prompt": body["prompt"]}
            await reply.whole(202, self.videos[name])

    async def _video(self, request: Request, rest: str, reply: Reply) -> None:
        name, _, content = rest.partition("/")
        video = self.videos.get(name)
        if video is None:
            await reply.whole(404, {"error": {"message": "no such video"}})
        elif request.method == "DELETE":
            self.deleted.append(name)
            await reply.whole(200, {"deleted": True})
        elif content:
            await reply.whole(200, f"the video of {video['prompt']}".encode(), "video/mp4")
        else:
            video["progress"] += self.progress_per_question
            video["status"] = "completed" if video["progress"] >= 100 else "in_progress"
            await reply.whole(200, video)
