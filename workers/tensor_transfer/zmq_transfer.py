"""Tensors in chunks over ZMQ: works everywhere, copies every byte twice.

The source has one ROUTER socket. The taker has a DEALER per source, opened for the first fetch and closed when no fetch
needs it; it keeps ``CHUNKS_AHEAD`` questions in flight, so that the wire is never idle and a source never queues more
than that for one taker. A source that is silent for ``timeout_ms`` has failed the fetch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import zmq

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.multimodal import FetchTensor, ReleaseTensor, TensorChunk, TensorDescriptor, TensorUnknown
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor, TensorUnavailable
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import Complaints, shown_peer
from poolgrid.server.transport.planes import name_plane
from poolgrid.server.transport.zmq_socket import CallbackSocket, bind, connect, make_socket, port_of
from poolgrid.server.workers.adapters.sockets import CLOSE_LINGER_MS
from poolgrid.server.workers.tensor_transfer.tensor_store import TensorMetrics, TensorStore

log = logging.getLogger(__name__)

CHUNKS_AHEAD = 4
"""Questions of one fetch in flight: two hide the round trip, four also hide a busy event loop."""

HIGH_WATER_MARK = 1024
"""Chunks queued for one taker that does not read; beyond it they are dropped, and its fetch times out."""


@dataclass(slots=True)
class _Fetch:
    """One tensor on its way here."""

    descriptor: TensorDescriptor
    chunk_bytes: int
    buffer: bytearray
    """Grows with what arrives: what a descriptor claims does not count before."""
    done: asyncio.Future[None]
    asked: int = 0
    """Bytes asked for, from the front."""
    received: int = 0
    heard_ms: float = 0.0


@dataclass(slots=True)
class _Source:
    """A connection to one source."""

    socket: CallbackSocket
    fetches: dict[str, _Fetch] = field(default_factory=dict)


class TensorTransfer:
    """One worker's end of tensor transfers, over ZMQ: a source of what it offers, a taker of what others offer.

    Made on a running event loop.
    """

    kind = "zmq"

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        advertise_host: str,
        store: TensorStore,
        clock: Clock,
        metrics: TensorMetrics,
        *,
        chunk_bytes: int,
        timeout_ms: float,
    ) -> None:
        """Bind ``host:port`` (0 = any free port); raises ``OSError`` that names the setting."""
        self._context = context
        self._store = store
        self._clock = clock
        self._complaints = Complaints(log, clock)
        self._metrics = metrics
        self._chunk_bytes = chunk_bytes
        self._timeout_ms = timeout_ms
        self._sources: dict[str, _Source] = {}
        self._told: Callable[[str, bool], None] = lambda tensor_id, expired: None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        socket = make_socket(context, zmq.ROUTER)
        name_plane(socket, "tensor")
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        bound = port_of(bind(socket, host, port, "tensor_port"))
        self.endpoint = f"tcp://{bracketed(advertise_host or host)}:{bound}"
        self._socket = CallbackSocket(socket, self._on_question)

    # -- as a source -----------------------------------------------------------------------------------------------

    def offer(self, name: str, tensor: Tensor) -> TensorDescriptor:
        """Keep a tensor for the holders of its descriptor, for one lease from the last question on.

        Raises ``RefusedError``: ``BusyError`` when no more can be kept.
        """
        return self._keep(name, tensor)[0]

    def _keep(self, name: str, tensor: Tensor) -> tuple[TensorDescriptor, Tensor]:
        tensor_id, kept = self._store.add(tensor, self._clock.monotonic_ms())
        self._count()
        self._set_timer()
        return (
            TensorDescriptor(tensor_id, name, tensor.dtype.name, tensor.shape, tensor.nbytes, self.endpoint),
            kept,
        )

    def _gone(self, tensor_id: str, expired: bool) -> None:
        """Tell that an offered tensor was released by its taker, or has expired."""
        self._told(tensor_id, expired)

    def withdraw(self, tensor_id: str) -> bool:
        kept = self._store.release(tensor_id)
        self._count()
        return kept

    def on_gone(self, told: Callable[[str, bool], None]) -> None:
        self._told = told

    def _on_question(self, frames: list[bytes]) -> None:
        try:
            message = codec.to_tensor_source.decode(frames[-1])
        except DecodeError as error:
            self._complaints.about(f"{shown_peer(frames[0])}, a taker of tensors", error)
            return
        if isinstance(message, ReleaseTensor):
            if self.withdraw(message.tensor_id):
                self._gone(message.tensor_id, False)
            return
        chunk = self._store.chunk(message.tensor_id, message.offset, message.size, self._clock.monotonic_ms())
        answer: TensorChunk | TensorUnknown
        if chunk is None:
            answer = TensorUnknown(message.tensor_id)
        else:
            answer = TensorChunk(message.tensor_id, message.offset, bytes(chunk))
        self._socket.send([frames[0], codec.from_tensor_source.encode(answer)])

    def _count(self) -> None:
        self._metrics.kept.set(len(self._store))
        self._metrics.kept_bytes.set(self._store.held_bytes)

    def _on_timer(self) -> None:
        self._timer = None
        now_ms = self._clock.monotonic_ms()
        gone = self._store.expire(now_ms)
        for tensor_id in gone:
            self._metrics.expired.inc()
            self._gone(tensor_id, True)
        if gone:
            self._count()
        for endpoint, source in list(self._sources.items()):
            for tensor_id, fetch in list(source.fetches.items()):
                if fetch.heard_ms + self._timeout_ms <= now_ms:
                    self._fail(endpoint, tensor_id, f"it was silent for {self._timeout_ms:.0f} ms")
        self._set_timer()

    def _set_timer(self) -> None:
        moments = [
            fetch.heard_ms + self._timeout_ms for source in self._sources.values() for fetch in source.fetches.values()
        ]
        expiry_ms = self._store.next_expiry_ms()
        if expiry_ms is not None:
            moments.append(expiry_ms)
        if self._closed or not moments:
            return
        when = self._loop.time() + max(0.001, (min(moments) - self._clock.monotonic_ms()) / 1e3)
        if self._timer is not None:
            if self._timer.when() <= when:
                return  # it finds nothing due then, and sets itself again
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_timer)

    # -- as a taker ------------------------------------------------------------------------------------------------

    async def fetch(self, descriptor: TensorDescriptor) -> Tensor:
        """Return a tensor of another worker and let its source go; raises ``TensorUnavailable``."""
        began_ms = self._clock.monotonic_ms()
        try:
            dtype = dtype_of(descriptor)
            buffer = await self._fetch_bytes(descriptor)
        except TensorUnavailable:
            self._metrics.fetched.labels(self.kind, "failed").inc()
            raise
        self._metrics.observe_fetch(self.kind, len(buffer), self._clock.monotonic_ms() - began_ms)
        return np.frombuffer(buffer, dtype).reshape(descriptor.shape)

    async def _fetch_bytes(self, descriptor: TensorDescriptor) -> bytearray:
        endpoint = descriptor.endpoint
        source = self._open(endpoint)
        if descriptor.tensor_id in source.fetches:
            raise TensorUnavailable(f"tensor {descriptor.tensor_id} of {endpoint} is being fetched already")
        fetch = _Fetch(
            descriptor,
            self._chunk_bytes,
            bytearray(),
            self._loop.create_future(),
            heard_ms=self._clock.monotonic_ms(),
        )
        source.fetches[descriptor.tensor_id] = fetch
        try:
            if descriptor.size_bytes == 0:
                fetch.done.set_result(None)
            self._ask(source, fetch)
            self._set_timer()
            await fetch.done
            return fetch.buffer
        finally:
            # However it ended: the source need not wait for its lease.
            self.release(descriptor)
            source.fetches.pop(descriptor.tensor_id, None)
            self._close_unused(endpoint)

    def release(self, descriptor: TensorDescriptor) -> None:
        """Let the source of a tensor go, without an answer."""
        source = self._open(descriptor.endpoint)
        source.socket.send([codec.to_tensor_source.encode(ReleaseTensor(descriptor.tensor_id))])
        self._close_unused(descriptor.endpoint)

    async def close(self) -> None:
        """End; offers are withdrawn, fetches in progress fail."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for endpoint, source in list(self._sources.items()):
            for tensor_id in list(source.fetches):
                self._fail(endpoint, tensor_id, "this worker is ending")
        for source in self._sources.values():
            source.socket.close()
        self._sources.clear()
        self._socket.close()

    def _open(self, endpoint: str) -> _Source:
        source = self._sources.get(endpoint)
        if source is None:
            if self._closed or not endpoint.startswith("tcp://"):
                raise TensorUnavailable(f"fetching a tensor: {endpoint!r} cannot be used; allowed is tcp://host:port")
            socket = make_socket(self._context, zmq.DEALER)
            try:
                connect(socket, endpoint)
            except zmq.ZMQError as error:
                socket.close()
                raise TensorUnavailable(f"fetching a tensor: {endpoint!r} cannot be used ({error})") from None
            source = self._sources[endpoint] = _Source(
                CallbackSocket(socket, lambda frames: self._on_answer(endpoint, frames))
            )
        return source

    def _close_unused(self, endpoint: str) -> None:
        source = self._sources.get(endpoint)
        if source is not None and not source.fetches:
            del self._sources[endpoint]
            source.socket.close(CLOSE_LINGER_MS)  # so that the last release leaves

    def _ask(self, source: _Source, fetch: _Fetch) -> None:
        """Keep ``CHUNKS_AHEAD`` questions in flight."""
        total = fetch.descriptor.size_bytes
        while fetch.asked < total and fetch.asked - fetch.received < CHUNKS_AHEAD * fetch.chunk_bytes:
            size = min(fetch.chunk_bytes, total - fetch.asked)
            question = FetchTensor(fetch.descriptor.tensor_id, fetch.asked, size)
            if not source.socket.send([codec.to_tensor_source.encode(question)]):
                return  # the socket is full of questions; the next answer asks on
            fetch.asked += size

    def _on_answer(self, endpoint: str, frames: list[bytes]) -> None:
        try:
            message = codec.from_tensor_source.decode(frames[-1])
        except DecodeError as error:
            self._complaints.about(f"the tensor source at {endpoint}", error)
            return
        source = self._sources[endpoint]
        fetch = source.fetches.get(message.tensor_id)
        if fetch is None:
            return
        if isinstance(message, TensorUnknown):
            self._fail(endpoint, message.tensor_id, "its source no longer keeps it")
            return
        expected = min(fetch.chunk_bytes, fetch.descriptor.size_bytes - fetch.received)
        if message.offset != fetch.received or len(message.data) != expected:
            # ZMQ keeps the order of one connection: anything else is a source that does not do what it says.
            self._fail(endpoint, message.tensor_id, f"its bytes came out of order at {message.offset}")
            return
        fetch.buffer += message.data
        fetch.received += expected
        fetch.heard_ms = self._clock.monotonic_ms()
        if fetch.received == fetch.descriptor.size_bytes:
            if not fetch.done.done():
                fetch.done.set_result(None)
        else:
            self._ask(source, fetch)

    def _fail(self, endpoint: str, tensor_id: str, why: str) -> None:
        fetch = self._sources[endpoint].fetches.get(tensor_id)
        if fetch is not None and not fetch.done.done():
            fetch.done.set_exception(TensorUnavailable(f"fetching tensor {tensor_id} of {endpoint}: {why}"))


def dtype_of(descriptor: TensorDescriptor) -> np.dtype[np.generic]:
    """Return the element type of a described tensor; raises ``TensorUnavailable`` when the description is not one."""
    try:
        dtype: np.dtype[np.generic] = np.dtype(descriptor.dtype)
    except TypeError:
        raise TensorUnavailable(f"tensor {descriptor.tensor_id} has the dtype {descriptor.dtype!r}") from None
    elements = 1
    for size in descriptor.shape:
        elements *= size
    if dtype.hasobject or dtype.names is not None or elements * dtype.itemsize != descriptor.size_bytes:
        raise TensorUnavailable(
            f"tensor {descriptor.tensor_id} is described as {descriptor.dtype} {descriptor.shape} in "
            f"{descriptor.size_bytes} bytes, which does not fit together"
        )
    return dtype.newbyteorder("<")
