"""Fetches the embeddings of requests from encode workers, a task per request, before the engine knows of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from wire import codec
from wire.errors import DecodeError
from wire.requests import Generate
from wire.tensors import TensorDescriptor
from workers.core.refusal import BusyError, RefusedError
from workers.tensor_transfer.port import Tensor, TensorTransfer, TensorUnavailable

log = logging.getLogger(__name__)


class EmbeddingFetcher:
    """The fetches of one worker; as many at a time as the service lets requests wait."""

    def __init__(self, transfer: TensorTransfer, fetches_max: int) -> None:
        self._transfer = transfer
        self._fetches_max = fetches_max
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._on_fetched: Callable[[str, Sequence[Tensor]], None] = _nobody
        self._on_failed: Callable[[str, str], None] = _nobody

    def start(self, on_fetched: Callable[[str, Sequence[Tensor]], None], on_failed: Callable[[str, str], None]) -> None:
        """Tell from now on what became of fetches: (request id, tensors in order) or (request id, why it failed)."""
        self._on_fetched = on_fetched
        self._on_failed = on_failed

    def begin(self, request: Generate) -> None:
        """Fetch what a request's parameters describe, or raise ``RefusedError``; the answer comes by callback."""
        assert request.disaggregated_params is not None, "the service looks before it asks"
        if len(self._tasks) >= self._fetches_max:
            raise BusyError(
                f"the embeddings of {len(self._tasks)} requests are being fetched, allowed are at most "
                f"{self._fetches_max}"
            )
        try:
            tensors = codec.tensor_list.decode(request.disaggregated_params).tensors
        except DecodeError as error:
            raise RefusedError(
                f"the disaggregated_params of request {request.request_id!r} describe no embeddings ({error})"
            ) from None
        self._tasks[request.request_id] = asyncio.get_running_loop().create_task(
            self._fetch(request.request_id, tensors), name=f"embeddings of {request.request_id}"
        )

    def end(self, request_id: str) -> None:
        """Give a fetch up, if there is one; its sources are let go of."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give every fetch up."""
        tasks = list(self._tasks.values())
        for request_id in list(self._tasks):
            self.end(request_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, request_id: str, tensors: Sequence[TensorDescriptor]) -> None:
        fetches = [asyncio.ensure_future(self._transfer.fetch(tensor)) for tensor in tensors]
        try:
            arrived = await asyncio.gather(*fetches)
        except TensorUnavailable as error:
            self._tasks.pop(request_id, None)
            log.warning("request %s: %s", request_id, error)
            self._on_failed(request_id, str(error))
            return
        finally:
            for fetch in fetches:
                fetch.cancel()
        if self._tasks.pop(request_id, None) is not None:
            self._on_fetched(request_id, arrived)


def _nobody(*_: object) -> None:
    raise AssertionError("a fetch began before start")
