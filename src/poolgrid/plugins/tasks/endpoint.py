"""The endpoints of tasks: one request from its body to its answer, as ``poolgrid.server.frontend.inference_endpoint``
has it.

A task has one answer, whole at its end. When its client leaves before, it is cancelled on its worker; a video whose
client did not ask to wait continues (``poolgrid.plugins.tasks.videos``).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from poolgrid.kernel.requests.inference import InferenceBackend, InferenceRequest, ServedModel
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.limits import MULTIMODAL_BYTES_MAX
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.kernel.wire.tasks import TaskResult
from poolgrid.plugins.tasks.output import TaskOutput
from poolgrid.plugins.tasks.result_endpoints import VIDEOS_PATH
from poolgrid.plugins.tasks.result_files import new_id, shown_type
from poolgrid.plugins.tasks.schema import (
    EmbeddingBody,
    PreparedTask,
    Reader,
    VideoBody,
    read_embeddings,
    read_images,
    read_video,
)
from poolgrid.plugins.tasks.videos import NewVideo, VideoJobs
from poolgrid.server.frontend.access.owner import Owner
from poolgrid.server.frontend.access.tenants import Caller
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.inference_endpoint import InferenceEndpoint, InferenceExchange
from poolgrid.server.frontend.request_body import too_large
from poolgrid.server.http.client_address import client_address

NO_TOKENS: Final = Sampling(1)
"""Sampling of a task, which generates no tokens."""

VECTORS_PER_STEP: Final = 16
"""Vectors that are written as JSON before other requests have their turn: about two milliseconds."""

WORD: Final = {Stage.EMBEDDING: "embeddings", Stage.IMAGE: "images", Stage.VIDEO: "videos"}

EMBEDDINGS_PATH: Final = "/v1/embeddings"
IMAGES_PATH: Final = "/v1/images/generations"

READERS: Final[Mapping[str, tuple[Stage, Reader]]] = {
    EMBEDDINGS_PATH: (Stage.EMBEDDING, read_embeddings),
    IMAGES_PATH: (Stage.IMAGE, read_images),
    VIDEOS_PATH: (Stage.VIDEO, read_video),
}
"""By path, what is asked for there, and what reads the bodies."""


class TaskEndpoint(InferenceEndpoint):
    """One of the endpoints of tasks."""

    def __init__(self, front: FrontEnd, path: str, videos: VideoJobs) -> None:
        self.stage, self.read = READERS[path]
        super().__init__(front, WORD[self.stage], _no_prompts)
        self.takes_forms = self.read is read_video
        self.videos = videos
        self.owner_of = front.owner_of
        self._served_by_name = front.preparation.served

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        return TaskExchange(self, scope, self._clock.monotonic_ms(), receive, send).run()

    @property
    def backend(self) -> InferenceBackend:
        return self._backend

    def check_served(self) -> None:
        """Raise ``RequestError`` where no model serves these tasks, whatever a body says: it is not read then."""
        if not self._serving():
            what = f"{WORD[self.stage]} are served by no model now"
            raise RequestError(404, "model_not_found", what, param="model")

    def _serving(self) -> list[ServedModel]:
        return [each for each in self._backend.models() if self.stage in each.tasks]

    def model_of(self, prepared: PreparedTask) -> ServedModel:
        """Return the model that serves a task; raises ``RequestError``."""
        stage, serving = self.stage, self._serving()
        names = ", ".join(each.name for each in serving)
        if prepared.model is None:
            if len(serving) != 1:
                raise invalid(
                    "model",
                    f"model is missing: it may be left out where one model serves {WORD[stage]}; they are served by "
                    f"{names}",
                    "missing_required_parameter",
                )
            return serving[0]
        found = self._served_by_name(prepared.model)
        if found is not None and not found[1] and stage in found[0].tasks:
            return found[0]
        lack = "does not exist here" if found is None else f"has no worker for {WORD[stage]}"
        what = f"model {quoted(prepared.model)} {lack}; {WORD[stage]} are served by {names}"
        raise RequestError(404, "model_not_found", what, param="model")


class TaskExchange(InferenceExchange):
    """One task and its answer."""

    async def _serve_body(self, body: bytes) -> None:
        endpoint = self._endpoint
        assert isinstance(endpoint, TaskEndpoint), "made by one"
        if len(body) > MULTIMODAL_BYTES_MAX:
            raise too_large(str(len(body)), MULTIMODAL_BYTES_MAX)  # a task is one message
        endpoint.check_served()
        prepared = endpoint.read(body, self.headers.get(b"content-type", b""))
        del body
        served = endpoint.model_of(prepared)
        self.model = served.name
        if self._caller is not None:
            self._caller.check_model(served.name)
        where = getattr(prepared.body, "response_format", None)
        waits = not isinstance(prepared.body, VideoBody) or where is not None
        owner = endpoint.owner_of(self._caller)
        if owner is None and (where != "b64_json" and not isinstance(prepared.body, EmbeddingBody)):
            raise unsupported(
                "response_format", "nothing is kept without API keys here (setting isolate_tenants); give b64_json"
            )
        [request_id] = endpoint._request_ids.of_sequences(self._wanted_id, 1)
        request = InferenceRequest(request_id, served.name, b"", NO_TOKENS, task=prepared.task)
        self.join_trace([request])
        if self._caller is not None:
            self._caller.admit([request], prepared.tokens, self._clock.monotonic_ms())
        else:
            request.address = client_address(self._scope)
        if not waits:
            assert isinstance(prepared.body, VideoBody), "others are waited for"
            assert owner is not None, "checked above"
            request.trace = None  # it ends with this exchange
            video = NewVideo(prepared.body, served.name, owner, self._caller)
            await self._write(await endpoint.videos.begin(video, request))
            return
        output = TaskOutput(request)
        self._outputs.append(output)
        output.stream = await endpoint.backend.submit(request)
        while output.result is None:
            await output.next()
        await self._answer_result(prepared, output.result, owner, where)

    async def _answer_result(
        self, prepared: PreparedTask, result: TaskResult, owner: Owner | None, where: str | None
    ) -> None:
        created_s = self._clock.wall_ms() // 1000
        if isinstance(prepared.body, EmbeddingBody):
            await self._write(await embeddings_answer(result, prepared.model or self.model, prepared.body))
            return
        video = isinstance(prepared.body, VideoBody)
        rows = [await self._place(item, result.media_type, owner, where, video, created_s) for item in result.items]
        form = shown_type(result.media_type).partition("/")[2] if result.media_type else None
        if not video:
            answer = {"created": created_s, "data": rows, "output_format": form}
        else:
            answer = {
                "id": new_id("video"),
                "object": "video",
                "model": self.model,
                "status": "completed",
                "progress": 100,
                "created": created_s,
                "data": [{"output_format": form, **row} for row in rows],
                "error": None,
                "inference_time_s": (self._clock.monotonic_ms() - self._arrived_ms) / 1000,
            }
        await self._write(msgspec.json.encode(answer))

    async def _place(
        self, item: bytes, media_type: str, owner: Owner | None, where: str | None, video: bool, created_s: int
    ) -> dict[str, str]:
        """Return a result as it was asked for: base64, or the URL at which it is kept."""
        if where == "b64_json" or owner is None:
            return {"b64_json": base64.b64encode(item).decode()}
        result_id = new_id("video" if video else "image")
        kept = {"id": result_id, "object": "file", "created_at": created_s, "media_type": media_type}
        endpoint = self._endpoint
        assert isinstance(endpoint, TaskEndpoint), "made by one"
        try:
            await asyncio.to_thread(endpoint.videos.files.keep, owner, result_id, msgspec.json.encode(kept), item)
        except OSError as error:
            raise RequestError(
                503, "results_unavailable", f"keeping a result of {len(item)} bytes: {error}; ask for b64_json"
            ) from None
        host = self.headers.get(b"host", b"").decode("latin-1")
        # TLS may end at a proxy, which says so.
        scheme = self.headers.get(b"x-forwarded-proto", b"").decode("latin-1")
        scheme = scheme if scheme in ("http", "https") else self._scope.get("scheme", "http")
        return {"url": f"{scheme}://{host}/v1/{'videos' if video else 'images'}/{result_id}/content"}

    async def _write(self, body: bytes) -> None:
        headers = [*self.response_headers(), (b"content-type", b"application/json")]
        self.begin(200, headers)
        await self.answer(200, headers, body)

    def _count_tokens(self) -> None:
        """Count the prompt tokens of embeddings, as their engine counted them."""
        results = (each.result for each in self._outputs if isinstance(each, TaskOutput))
        tokens = sum(result.prompt_tokens for result in results if result is not None)
        self._metrics.prompt_tokens.value += tokens
        if self._caller is not None and all(output.stream is None for output in self._outputs):
            self._caller.not_dispatched(self._clock.monotonic_ms())


async def embeddings_answer(result: TaskResult, model: str, body: EmbeddingBody) -> bytes:
    """Return OpenAI's list of embeddings, as numbers or as float32 in base64."""
    rows: list[bytes] = []
    for index, item in enumerate(result.items):
        if body.encoding_format == "base64":
            vector = b'"' + base64.b64encode(item) + b'"'
        else:
            vector = msgspec.json.encode(np.frombuffer(item, "<f4").tolist())
        rows.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, vector))
        if index % VECTORS_PER_STEP == VECTORS_PER_STEP - 1:
            await asyncio.sleep(0)
    usage = {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens}
    end = msgspec.json.encode({"model": model, "usage": usage})
    return b'{"object":"list","data":[' + b",".join(rows) + b"]," + end[1:]


def _no_prompts(raw: bytes, caller: Caller | None) -> Any:
    raise AssertionError("the bodies of tasks have their own readers")
