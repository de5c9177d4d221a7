"""The simulated encode engine: images in, embeddings offered to the worker that computes the prompt.

Rules
    1. Requests are taken in order, as many images at a time as the batch holds; each takes ``ms_per_image``.
    2. A request ends with ``encoded`` and the descriptors of its tensors. They stay offered until the taker has them
       all, the request is cancelled, or a lease ends; then the request is ``released``.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksStored,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestStarted,
)
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.multimodal import TensorList
from poolgrid.kernel.wire.requests import FinishReason, Generate, TokenDelta
from poolgrid.kernel.worker_protocol.engine import AlwaysWell, EngineReport, RankReport
from poolgrid.kernel.worker_protocol.refusal import BusyError, RefusedError
from poolgrid.plugins.simulated.core.media import embed, images_of, read_media
from poolgrid.server.process.clock import Clock
from poolgrid.server.workers.tensor_transfer.offers import EmbeddingOffers

if TYPE_CHECKING:
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer

ENCODED = FinishReason.ENCODED
"""Finish reason of an encode leg."""


@dataclass(frozen=True, slots=True)
class EncodeLimits:
    """What the engine takes at a time."""

    max_batch_images: int = 8
    max_waiting_requests: int = 4096
    ms_per_image: float = 20.0
    """A vision transformer of 300 M parameters on one image of 576 patches takes about as long."""


class SimulatedEncodeEngine(AlwaysWell):
    """``poolgrid.kernel.worker_protocol.engine.Engine`` of an encode worker."""

    def __init__(self, limits: EncodeLimits, transfer: TensorTransfer, clock: Clock) -> None:
        self._limits = limits
        self._transfer = transfer
        self._clock = clock
        self._waiting: OrderedDict[str, Generate] = OrderedDict()
        self._running: set[str] = set()
        self._cancelled: set[str] = set()
        """Of the running ones."""
        self._offers = EmbeddingOffers(transfer, self._on_gone)
        self._deltas: list[TokenDelta] = []
        self._facts: list[AnyEvent] = []
        self._released: list[str] = []
        self._wake = asyncio.Event()

    def submit(self, request: Generate) -> None:
        """Take a request, or raise ``RefusedError`` and change nothing."""
        request_id = request.request_id
        if request_id in self._waiting or request_id in self._running or request_id in self._offers:
            raise RefusedError(f"request id {request_id!r} is already active on this worker")
        if len(self._waiting) >= self._limits.max_waiting_requests:
            raise BusyError(
                f"{len(self._waiting)} requests are waiting, allowed are at most "
                f"{self._limits.max_waiting_requests} (max_waiting_requests)"
            )
        media = read_media(request)
        if media is None or not all(item.data for item in images_of(media)) or not images_of(media):
            raise RefusedError("an encode leg needs images with their bytes")
        self._waiting[request_id] = request
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self._deltas.append(TokenDelta(request_id, 0, b"", FinishReason.CANCELLED))
            self._facts.append(RequestFinished(request_id, FinishReason.CANCELLED))
        elif request_id in self._running:
            self._cancelled.add(request_id)
        elif self._offers.withdraw(request_id):
            self._note_release(request_id, FinishReason.CANCELLED)
        self._wake.set()

    @property
    def dp_size(self) -> int:
        return 1

    def describe(self) -> dict[str, object]:
        return {"tensor_transport": self._transfer.kind, "kept_embeddings": len(self._offers)}

    def load(self, dp_rank: int = 0) -> LoadReported:
        return LoadReported(len(self._running), len(self._waiting), 0, 0, 0, 0)

    def resident_blocks(self, dp_rank: int = 0) -> list[BlocksStored]:
        return []

    def restate(self, dp_rank: int = 0) -> list[BlocksStored]:
        return []

    async def run(self, deliver: Callable[[EngineReport], None]) -> None:
        while True:
            batch = self._take_batch()
            if not batch and not (self._deltas or self._facts or self._released):
                self._wake.clear()
                await self._wake.wait()
                continue
            began_ms = self._clock.monotonic_ms()
            images = sum(count for _, count in batch)
            duration_ms = images * self._limits.ms_per_image
            if batch:
                self._running = {request.request_id for request, _ in batch}
                self._facts += [
                    RequestStarted(request.request_id, len(request.token_ids) // TOKEN_BYTES, 0, 0)
                    for request, _ in batch
                ]
                await asyncio.sleep(max(0.0, (began_ms + duration_ms - self._clock.monotonic_ms()) / 1e3))
            for request, _ in batch:
                self._finish(request)
            self._running = set()
            deltas, self._deltas = self._deltas, []
            facts, self._facts = self._facts, []
            released, self._released = self._released, []
            deliver(
                EngineReport(
                    deltas,
                    {0: RankReport(facts, self.load())},
                    steps=1 if batch else 0,
                    duration_ms=duration_ms,
                    released=released,
                    kept_transfers=len(self._offers),
                    keeps_encoded=True,
                )
            )

    def _take_batch(self) -> list[tuple[Generate, int]]:
        """Return the next requests with their numbers of images; at least one, however many images it has."""
        batch: list[tuple[Generate, int]] = []
        images = 0
        while self._waiting:
            request = next(iter(self._waiting.values()))
            media = read_media(request)
            assert media is not None, "checked when it came"
            count = len(images_of(media))
            if batch and images + count > self._limits.max_batch_images:
                break
            del self._waiting[request.request_id]
            batch.append((request, count))
            images += count
        return batch

    def _finish(self, request: Generate) -> None:
        request_id = request.request_id
        if request_id in self._cancelled:
            self._cancelled.discard(request_id)
            self._deltas.append(TokenDelta(request_id, 0, b"", FinishReason.CANCELLED))
            self._facts.append(RequestFinished(request_id, FinishReason.CANCELLED))
            return
        media = read_media(request)
        assert media is not None, "checked when it came"
        embedded = (
            (f"image {place}", embed(item.data, item.token_count)) for place, item in enumerate(images_of(media))
        )
        try:
            offered = self._offers.offer(request_id, embedded)
        except RefusedError as refusal:
            self._deltas.append(
                TokenDelta(request_id, 0, b"", FinishReason.ERROR, error=refusal.reason, refusal=refusal.kind)
            )
            self._facts.append(RequestFinished(request_id, FinishReason.ERROR))
            return
        params = codec.tensor_list.encode(TensorList(tuple(offered)))
        self._deltas.append(TokenDelta(request_id, 0, b"", ENCODED, disaggregated_params=params))
        self._facts.append(PrefillCompleted(request_id))

    def _on_gone(self, request_id: str, expired: bool) -> None:
        """Note that all tensors of a request were taken, or that one was not fetched in time."""
        self._note_release(request_id, FinishReason.EXPIRED if expired else ENCODED)
        self._wake.set()

    def _note_release(self, request_id: str, reason: FinishReason) -> None:
        self._released.append(request_id)
        self._facts.append(RequestFinished(request_id, reason))
