"""A whole worker service over a ``ServerEngine`` in one event loop, without sockets: the test writes what the engine
server answers, and every frame to routers and to the pool is decoded by the wire's own codecs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from prometheus_client import CollectorRegistry

from poolgrid.http.http_client import ClientExchange, RequestFailed
from poolgrid.process.clock import SystemClock
from poolgrid.wire import codec
from poolgrid.wire.card import WorkerCard, WorkerLimits
from poolgrid.wire.events import AnyEvent, EventBatch, LoadReported
from poolgrid.wire.identifiers import Role
from poolgrid.wire.requests import Generate, TokenBatch, TokenDelta
from poolgrid.workers.adapters.sockets import RequestSocket
from poolgrid.workers.engines.server.cache_events import CacheEvents
from poolgrid.workers.engines.server.core.calls import ServerDialect
from poolgrid.workers.engines.server.dialects.sglang import SglangDialect
from poolgrid.workers.engines.server.dialects.trtllm_serve import TrtllmServeDialect
from poolgrid.workers.engines.server.dialects.vllm import VllmDialect
from poolgrid.workers.engines.server.engine import ServerEngine, ServerLimits
from poolgrid.workers.engines.server.server_client import ServerClient
from poolgrid.workers.metrics import WorkerMetrics
from poolgrid.workers.publisher import EventPublisher
from poolgrid.workers.service import ServiceLimits, WorkerService
from tests.workers.fakes import PATIENCE_S

PEER = b"router"
CARD = WorkerCard("m", Role.AGGREGATED, 4, WorkerLimits(8, 64, 256, 4096), "tcp://127.0.0.1:1")
LIMITS = ServerLimits(1024, 16, 60_000.0, 60_000.0, 60_000.0, 60_000.0)

DIALECTS: dict[str, Callable[[], ServerDialect]] = {
    "vllm": lambda: VllmDialect("m"),
    "sglang": lambda: SglangDialect(follows_events=False),
    "trtllm-serve": lambda: TrtllmServeDialect("m"),
}


def chunks(
    kind: str, tokens: Sequence[int], cached: Any = 0, finish: str = "length", logprobs: bool = False
) -> list[dict[str, Any]]:
    """Return an answer in a server's words: a chunk a token, and what comes after the last one."""
    made: list[dict[str, Any]] = []
    for number, token in enumerate(tokens, 1):
        last = number == len(tokens)
        if kind == "sglang":
            meta = {"completion_tokens": number, "cached_tokens": cached}
            meta["finish_reason"] = {"type": finish, "length": number} if last else None
            if logprobs:
                meta["output_token_logprobs"] = [[-0.5, token, None]]
                meta["output_top_logprobs"] = [[[-0.5, token, None], [-1.5, token + 1, None]]]
            made.append({"output_ids": [token], "meta_info": meta})
            continue
        choice: dict[str, Any] = {"index": 0, "token_ids": [token], "finish_reason": finish if last else None}
        if logprobs and kind == "vllm":
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [-0.5],
                "top_logprobs": [{f"token_id:{token}": -0.5, f"token_id:{token + 1}": -1.5}],
            }
        elif logprobs:
            choice["logprobs"] = {"token_logprobs": [-0.5]}
        made.append({"choices": [choice]})
    if kind != "sglang":
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": len(tokens),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        made.append({"choices": [], "usage": usage})
    return made


def event(value: Any) -> bytes:
    """Return a chunk as a server sends it; text that is given goes as it is."""
    data = value if isinstance(value, str) else json.dumps(value)
    return b"data: " + data.encode() + b"\n\n"


class Stream:
    """One answer, which the test writes."""

    def __init__(self, exchange: ClientExchange) -> None:
        self.exchange = exchange
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, *values: Any) -> None:
        """Write chunks, all of which arrive together."""
        self._do(lambda: self.exchange.take_body(b"".join(map(event, values))))

    def end(self) -> None:
        """End the answer."""
        self._do(self.exchange.conclude)
        if not self.over.done():
            self.over.set_result(None)

    def _do(self, work: Callable[[], None]) -> None:
        if self.over.done():
            return  # its connection is closed
        try:
            work()
        except RequestFailed as error:
            self._fail(error)
        except Exception as error:  # as the parser reports what its callbacks raise
            self._fail(RequestFailed("protocol", f"not an HTTP response ({error})"))

    def _fail(self, error: RequestFailed) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class _Http:
    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}

    async def send(self, method: str, path: str, body: bytes, exchange: ClientExchange, *_: Any, **__: Any) -> None:
        """Wait for the answer's end."""
        exchange.status = 200
        asked = json.loads(body)
        prompt = asked.get("prompt") or asked["input_ids"]
        stream = self.streams[f"r{prompt[0]}"] = Stream(exchange)
        try:
            await stream.over
        finally:
            if not stream.over.done():
                stream.over.cancel()


class _Client:
    def __init__(self) -> None:
        self.http = _Http()

    async def ask(self, *_: Any, **__: Any) -> bytes:
        """Be well."""
        return b""


class _Publisher:
    """Decodes every batch of events, as a consolidator does."""

    is_registered = True

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.goodbyes: list[str] = []

    def start(self) -> None:
        """Begin."""

    def publish(self, events: list[AnyEvent], load: LoadReported | None = None) -> None:
        """Take a report's events."""
        batch = EventBatch("w", 0, 1, 0, 0, [*events, *([] if load is None else [load])])
        self.events += codec.event_batch.decode(codec.event_batch.encode(batch)).events

    def leave(self, reason: str) -> None:
        """Leave."""

    async def say_goodbye(self, reason: str, timeout_s: float) -> bool:
        """End."""
        self.goodbyes.append(reason)
        return True


class Requests:
    """The request plane: frames in from one router, frames out decoded as that router decodes them."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[TokenDelta]] = {}
        self._on_frames: Callable[[list[bytes]], None] | None = None

    def start(self, on_frames: Callable[[list[bytes]], None]) -> None:
        """Begin."""
        self._on_frames = on_frames

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Take what the worker sends; a frame that does not decode fails the test, and loses a real router's batch."""
        message = codec.from_worker.decode(frame)
        if isinstance(message, TokenBatch):
            for delta in message.deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
        return True

    def receive(self, request: Generate) -> None:
        """Give the worker a request."""
        assert self._on_frames is not None
        self._on_frames([PEER, codec.to_worker.encode(request)])


class Harness:
    """A running worker."""

    def __init__(self, kind: str) -> None:
        registry = CollectorRegistry()
        self.kind = kind
        self.metrics = WorkerMetrics(registry)
        self.client = _Client()
        self.requests = Requests()
        self.publisher = _Publisher()
        self.stop = asyncio.Event()
        clock = SystemClock()
        self.engine = ServerEngine(
            cast(ServerClient, self.client),
            DIALECTS[kind](),
            1,
            4,
            256,
            LIMITS,
            CacheEvents(),
            self._confirm,
            dict,
            clock,
            self.metrics,
        )
        self.service = WorkerService(
            "w",
            1,
            CARD,
            self.engine,
            cast(RequestSocket, self.requests),
            ServiceLimits(),
            clock,
            self.metrics,
        )

    async def _confirm(self, _all_facts: bool) -> str:
        return ""

    async def run(self) -> None:
        """Serve."""
        await self.service.run([cast(EventPublisher, self.publisher)], self.stop)

    async def ask(self, *requests: Generate) -> list[Stream]:
        """Give the worker requests whose prompts begin with the number in their names; return their answers."""
        for request in requests:
            self.requests.receive(request)
        streams = self.client.http.streams
        await self.until(lambda: all(each.request_id in streams for each in requests))
        return [streams.pop(each.request_id) for each in requests]

    async def until(self, holds: Callable[[], Any]) -> None:
        """Give the loop its turns until something holds."""
        ends_s = asyncio.get_running_loop().time() + PATIENCE_S
        while not holds():
            assert asyncio.get_running_loop().time() < ends_s, "it never came"
            await asyncio.sleep(0)

    async def until_finished(self, *request_ids: str) -> None:
        """Wait for the last deltas of requests."""
        await self.until(lambda: all(self.last(each) is not None for each in request_ids))

    def last(self, request_id: str) -> TokenDelta | None:
        """Return a request's last delta, ``None`` while it goes on."""
        found = self.requests.deltas.get(request_id)
        return found[-1] if found and found[-1].finish_reason is not None else None

    def output(self, request_id: str) -> bytes:
        """Return all tokens of a request; they must come in their places."""
        made = b""
        for delta in self.requests.deltas[request_id]:
            if delta.token_ids:
                assert delta.position == len(made) // 4
            made += delta.token_ids
        return made


@asynccontextmanager
async def harness(kind: str) -> AsyncIterator[Harness]:
    made = Harness(kind)
    task = asyncio.create_task(made.run())
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait({task})
        await made.engine.close()
        if not task.cancelled():
            made_error = task.exception()
            assert made_error is None or isinstance(made_error, RuntimeError), made_error
