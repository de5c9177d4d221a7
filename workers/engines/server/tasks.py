"""Tasks of an engine server with OpenAI's API: ``/v1/embeddings``, ``/v1/images/generations`` and ``/v1/videos``.

Rules
    1. Embeddings and images are one exchange, which is cancelled by closing it. A video is a job of the server: begun,
       asked for every ``POLL_S``, fetched, and deleted, also when it is cancelled.
    2. What the server refuses, another worker may take (``refusal_of``). What cannot be read is broken.
    3. A server may answer nothing while it makes images: it counts as alive as long as it has a task.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from poolgrid.http.http_client import ClientExchange, RequestFailed
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.limits import IMAGES_PER_TASK_MAX, RESULT_BYTES_MAX, U32_MAX
from poolgrid.wire.tasks import MODALITIES, EmbeddingTask, TaskResult, VisualTask
from poolgrid.workers.core.refusal import BrokenError, BusyError, RefusedError, UnableError, UnknownModelError
from poolgrid.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.workers.engines.server.core.openai_words import refusal_of, retry_after_ms
from poolgrid.workers.engines.server.core.server_facts import ModelList, choose_model
from poolgrid.workers.engines.server.health import ServerHealth
from poolgrid.workers.engines.server.kinds import MODELS, ServerKind, version_of
from poolgrid.workers.engines.server.server_client import KeyRefused, ServerClient, ServerError
from poolgrid.workers.engines.server.settings import EngineServerSettings
from poolgrid.workers.engines.tasks import TaskEngine, Told, task_card

log = logging.getLogger(__name__)

PATHS: Final = {
    Stage.EMBEDDING: "/v1/embeddings",
    Stage.IMAGE: "/v1/images/generations",
    Stage.VIDEO: "/v1/videos",
}

CONCURRENCY: Final = {Stage.EMBEDDING: 64, Stage.IMAGE: 1, Stage.VIDEO: 1}
"""Tasks that a server is given at a time: embeddings are batched, and diffusion pipelines run one request."""

ANSWER_BYTES_MAX: Final = 4 * RESULT_BYTES_MAX
"""Largest answer: numbers in JSON take up to five times their bytes, base64 a third more."""

ASK_AGAIN_S: Final = 1.0
POLL_S: Final = 1.0

T = TypeVar("T")


class _Answer(ClientExchange):
    """A whole answer, whatever its status."""

    __slots__ = ("body", "media_type", "retry_after")

    def __init__(self) -> None:
        super().__init__()
        self.body = bytearray()
        self.media_type = ""
        self.retry_after = ""

    def take_header(self, name: bytes, value: bytes) -> None:
        if name == b"content-type":
            self.media_type = value[:256].decode("latin-1").partition(";")[0].strip()
        elif name == b"retry-after":
            self.retry_after = value[:64].decode("latin-1")

    def take_body(self, data: bytes) -> None:
        """Keep it."""
        if len(self.body) + len(data) > ANSWER_BYTES_MAX:
            raise RequestFailed("protocol", f"the answer exceeds {ANSWER_BYTES_MAX} bytes")
        self.body += data


class _Embedding(msgspec.Struct):
    index: int
    embedding: str | list[float]


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: Annotated[int, Meta(ge=0, le=U32_MAX)] = 0


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage = _Usage()


class _Image(msgspec.Struct):
    b64_json: str


class _Images(msgspec.Struct):
    data: Annotated[list[_Image], Meta(min_length=1, max_length=IMAGES_PER_TASK_MAX)]
    output_format: str | None = None


class _Video(msgspec.Struct):
    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,200}$")]
    status: str
    progress: Any = None
    error: Any = None


class _Paths(msgspec.Struct):
    paths: dict[str, Any] = {}


class ServerTasks:
    """Does tasks of one kind by asking a server."""

    is_interruptible = True

    def __init__(self, client: ServerClient, title: str, model: str, stage: Stage) -> None:
        self.concurrency = CONCURRENCY[stage]
        self.running = 0
        self._client = client
        self._title = title
        self._model = model

    async def make(self, task: EmbeddingTask | VisualTask, told: Told) -> TaskResult:
        self.running += 1
        try:
            if isinstance(task, EmbeddingTask):
                return await self._embed(task)
            return await (self._video(task, told) if task.video else self._draw(task))
        finally:
            self.running -= 1

    async def _embed(self, task: EmbeddingTask) -> TaskResult:
        body: dict[str, Any] = {"model": self._model, "input": task.inputs, "encoding_format": "base64"}
        if task.inputs and not isinstance(task.inputs[0], str):
            body["input"] = [list(each) for each in task.inputs]
        if task.dimensions is not None:
            body["dimensions"] = task.dimensions
        answer = self._read(await self._ask("POST", PATHS[Stage.EMBEDDING], body), _Embeddings)
        rows = sorted(answer.data, key=lambda row: row.index)
        if [row.index for row in rows] != list(range(len(task.inputs))):
            raise BrokenError(f"{self._title} answered {len(rows)} vectors for {len(task.inputs)} texts")
        return TaskResult(tuple(_vector(row.embedding) for row in rows), prompt_tokens=answer.usage.prompt_tokens)

    async def _draw(self, task: VisualTask) -> TaskResult:
        body = {**self._visual(task), "n": task.count, "response_format": "b64_json"}
        if task.output_format:
            body["output_format"] = task.output_format
        answer = self._read(await self._ask("POST", PATHS[Stage.IMAGE], body), _Images)
        form = answer.output_format or task.output_format or "png"
        return TaskResult(tuple(_unpacked(each.b64_json) for each in answer.data), f"image/{form}")

    async def _video(self, task: VisualTask, told: Told) -> TaskResult:
        body = self._visual(task)
        given = {"seconds": task.seconds, "fps": task.frame_rate, "num_frames": task.frames}
        body |= {name: value for name, value in given.items() if value is not None}
        if task.output_format:
            body["output_format"] = task.output_format
        video = self._read(await self._ask("POST", PATHS[Stage.VIDEO], body), _Video)
        path = f"{PATHS[Stage.VIDEO]}/{video.id}"
        try:
            while video.status not in ("completed", "failed"):
                if type(video.progress) in (int, float):
                    told(int(video.progress))
                await asyncio.sleep(POLL_S)
                video = self._read(await self._ask("GET", path), _Video)
            if video.status == "failed":
                log.warning("%s failed to make a video: %s", self._title, str(video.error)[:500])
                raise BrokenError(f"{self._title} failed to make the video")
            content = await self._ask("GET", f"{path}/content")
            return TaskResult((bytes(content.body),), content.media_type or "video/mp4")
        finally:
            with suppress(RefusedError):
                await asyncio.shield(self._ask("DELETE", path))

    def _visual(self, task: VisualTask) -> dict[str, Any]:
        size = f"{task.width}x{task.height}" if task.width and task.height else None
        given = {
            "size": size,
            "negative_prompt": task.negative_prompt,
            "num_inference_steps": task.steps,
            "guidance_scale": task.guidance_scale,
            "seed": task.seed,
            "input_reference": base64.b64encode(task.reference).decode() or None,
            "extra_params": msgspec.json.decode(task.extra) if task.extra else None,
        }
        named = {name: value for name, value in given.items() if value is not None}
        return {"model": self._model, "prompt": task.prompt, **named}

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> _Answer:
        """Return an answer with a status below 300; raises ``RefusedError``."""
        answer = _Answer()
        try:
            await self._client.http.send(method, path, b"" if body is None else msgspec.json.encode(body), answer)
        except RequestFailed as failed:
            raise BrokenError(f"{self._title} cannot be asked ({failed.kind})") from failed
        if answer.status < 300:
            return answer
        pause_ms = retry_after_ms(answer.retry_after, time.time()) if answer.retry_after else None
        failure = refusal_of(self._title, answer.status, bytes(answer.body[:65536]), pause_ms)
        log.warning("%s: %s %s", failure.reason, method, path)
        if failure.kind is BusyError.kind:
            raise BusyError(failure.reason, failure.retry_after_ms)
        if failure.kind is UnableError.kind:
            raise (UnknownModelError if failure.unknown_model else UnableError)(failure.reason)
        raise BrokenError(failure.reason)

    def _read(self, answer: _Answer, form: type[T]) -> T:
        try:
            return msgspec.json.decode(bytes(answer.body), type=form)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenError(f"the answer of {self._title} cannot be read: {error}") from None


def _vector(given: str | list[float]) -> bytes:
    return _unpacked(given) if isinstance(given, str) else np.array(given, "<f4").tobytes()


def _unpacked(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BrokenError("the server answered with base64 that is none") from None


@asynccontextmanager
async def open_tasks(
    settings: EngineServerSettings, around: EngineHost, kind: ServerKind
) -> AsyncIterator[OpenedEngine]:
    """Ask a running server what it serves, and give it tasks; raises ``ValueError`` for one that serves none."""
    stage = MODALITIES[settings.modality]
    client = ServerClient(settings.server_url, around.clock, settings.engine_api_key)
    try:
        model = await _model(client, settings, stage)
        maker = ServerTasks(client, kind.title, model, stage)

        async def confirm(all_facts: bool) -> str:
            try:
                choose_model(await client.ask_for(MODELS, ModelList), model)
            except ValueError as error:
                return str(error)
            return ""

        health = ServerHealth(
            client,
            confirm,
            lambda: True,
            lambda now_ms: "",
            lambda since_ms: maker.running > 0,
            settings.health_interval_ms,
            settings.health_timeout_ms,
            around.clock,
            around.metrics,
        )
        around.metrics.engine_healthy.set(1)
        engine = TaskEngine(stage, maker, health)
        card = task_card(
            stage,
            model,
            f"{kind.title} {await version_of(client)}".strip(),
            maker.concurrency,
            f"tcp://{settings.advertised_host}:{around.request_port}",
            f"{settings.http_scheme}://{settings.advertised_host}:{around.http_port}",
        )
        try:
            yield OpenedEngine(engine, card)
        finally:
            await engine.close()
    finally:
        client.close()


async def _model(client: ServerClient, settings: EngineServerSettings, stage: Stage) -> str:
    """Return the model that a server serves; waits until it answers."""
    said = ""
    while True:
        try:
            model = choose_model(await client.ask_for(MODELS, ModelList), settings.served_model_name).id
            described = await client.ask_if_there("/openapi.json", _Paths)
            break
        except KeyRefused as error:
            raise ValueError(str(error)) from None
        except (ServerError, DecodeError) as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting for the engine server: %s", said)
        await asyncio.sleep(ASK_AGAIN_S)
    if described is not None and described.paths and PATHS[stage] not in described.paths:
        raise ValueError(
            f"modality is {settings.modality!r}, and the server at {client.target.url} has no {PATHS[stage]}: start it "
            "with a model of this kind"
        )
    return model
