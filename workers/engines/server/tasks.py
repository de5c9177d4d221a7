"""Embeddings of an engine server with OpenAI's ``/v1/embeddings``, as tasks.

Rules
    1. A task is one exchange, which is cancelled by closing it.
    2. What the server refuses, another worker may take (``refusal_of``). What cannot be read is broken.
    3. A server whose answer to a health check is late counts as alive while it has a task.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from poolgrid.http.http_client import ClientExchange, RequestFailed
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.identifiers import Stage
from poolgrid.wire.limits import RESULT_BYTES_MAX, U32_MAX
from poolgrid.wire.tasks import EmbeddingTask, TaskResult
from poolgrid.workers.core.refusal import BrokenError, BusyError, UnableError, UnknownModelError
from poolgrid.workers.engines.definition import EngineHost, OpenedEngine
from poolgrid.workers.engines.server.core.openai_words import refusal_of, retry_after_ms
from poolgrid.workers.engines.server.core.server_facts import ModelList, choose_model
from poolgrid.workers.engines.server.health import ServerHealth
from poolgrid.workers.engines.server.kinds import MODELS, ServerKind, version_of
from poolgrid.workers.engines.server.server_client import SCHEMA_BYTES_MAX, KeyRefused, ServerClient, ServerError
from poolgrid.workers.engines.server.settings import EngineServerSettings
from poolgrid.workers.engines.tasks import TaskEngine, Told, task_card

log = logging.getLogger(__name__)

PATH: Final = "/v1/embeddings"

CONCURRENCY: Final = 64
"""Tasks that a server is given at a time: it batches them."""

ANSWER_BYTES_MAX: Final = 4 * RESULT_BYTES_MAX
"""Largest answer: numbers in JSON take up to five times their bytes, base64 a third more."""

ASK_AGAIN_S: Final = 1.0


class _Answer(ClientExchange):
    """A whole answer, whatever its status."""

    __slots__ = ("body", "retry_after")

    def __init__(self) -> None:
        super().__init__()
        self.body = bytearray()
        self.retry_after = ""

    def take_header(self, name: bytes, value: bytes) -> None:
        if name == b"retry-after":
            self.retry_after = value[:64].decode("latin-1")

    def take_body(self, data: bytes) -> None:
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


class _Paths(msgspec.Struct):
    paths: dict[str, Any] = {}


class ServerEmbeddings:
    """Has a server embed texts."""

    concurrency = CONCURRENCY
    is_interruptible = True

    def __init__(self, client: ServerClient, title: str, model: str) -> None:
        self.running = 0
        self._client = client
        self._title = title
        self._model = model

    async def make(self, task: EmbeddingTask, told: Told) -> TaskResult:
        self.running += 1
        try:
            return await self._embed(task)
        finally:
            self.running -= 1

    async def _embed(self, task: EmbeddingTask) -> TaskResult:
        body: dict[str, Any] = {"model": self._model, "input": task.inputs, "encoding_format": "base64"}
        if task.dimensions is not None:
            body["dimensions"] = task.dimensions
        answer = await self._ask(msgspec.json.encode(body))
        rows = sorted(answer.data, key=lambda row: row.index)
        if [row.index for row in rows] != list(range(len(task.inputs))):
            raise BrokenError(f"{self._title} answered {len(rows)} vectors for {len(task.inputs)} texts")
        return TaskResult(tuple(_vector(row.embedding) for row in rows), prompt_tokens=answer.usage.prompt_tokens)

    async def _ask(self, body: bytes) -> _Embeddings:
        """Return the server's answer; raises ``RefusedError``."""
        answer = _Answer()
        try:
            await self._client.http.send("POST", PATH, body, answer)
        except RequestFailed as failed:
            raise BrokenError(f"{self._title} cannot be asked ({failed.kind})") from failed
        if answer.status != 200:
            pause_ms = retry_after_ms(answer.retry_after, time.time()) if answer.retry_after else None
            failure = refusal_of(self._title, answer.status, bytes(answer.body[:65536]), pause_ms)
            log.warning("%s", failure.reason)
            if failure.kind is BusyError.kind:
                raise BusyError(failure.reason, failure.retry_after_ms)
            if failure.kind is UnableError.kind:
                raise (UnknownModelError if failure.unknown_model else UnableError)(failure.reason)
            raise BrokenError(failure.reason)
        try:
            return msgspec.json.decode(bytes(answer.body), type=_Embeddings)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenError(f"the answer of {self._title} cannot be read: {error}") from None


def _vector(given: str | list[float]) -> bytes:
    if not isinstance(given, str):
        return np.array(given, "<f4").tobytes()
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise BrokenError("the server answered with base64 that is none") from None


@asynccontextmanager
async def open_tasks(
    settings: EngineServerSettings, around: EngineHost, kind: ServerKind
) -> AsyncIterator[OpenedEngine]:
    """Ask a running server what it serves, and give it tasks; raises ``ValueError`` for one that serves none."""
    client = ServerClient(settings.server_url, around.clock, settings.engine_api_key)
    try:
        model = await _model(client, settings)
        maker = ServerEmbeddings(client, kind.title, model)

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
        engine = TaskEngine(Stage.EMBEDDING, maker, health)
        card = task_card(
            Stage.EMBEDDING,
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


async def _model(client: ServerClient, settings: EngineServerSettings) -> str:
    """Return the model that a server serves; waits until it answers."""
    said = ""
    while True:
        try:
            model = choose_model(await client.ask_for(MODELS, ModelList), settings.served_model_name).id
            described = await client.ask_if_there("/openapi.json", _Paths, SCHEMA_BYTES_MAX)
            if described is not None and described.paths and PATH not in described.paths:
                raise ValueError(
                    f"modality is {settings.modality!r}, and the server at {client.target.url} has no {PATH}: start "
                    "it with a model of this kind"
                )
            return model
        except KeyRefused as error:
            raise ValueError(str(error)) from None
        except (ServerError, DecodeError) as error:
            if str(error) != said:
                said = str(error)
                log.warning("waiting for the engine server: %s", said)
        await asyncio.sleep(ASK_AGAIN_S)
