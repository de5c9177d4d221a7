"""Fetches the embeddings of requests from encode workers, a task per request, before the engine knows of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from poolgrid.process.log_lines import about
from poolgrid.process.tasks import cancel_all, detached
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.multimodal import TensorDescriptor
from poolgrid.wire.requests import Generate
from poolgrid.workers.core.refusal import BusyError, RefusedError
from poolgrid.workers.tensor_transfer.port import Tensor, TensorUnavailable

if TYPE_CHECKING:
    from poolgrid.workers.tensor_transfer.zmq_transfer import TensorTransfer

log = logging.getLogger(__name__)


class EmbeddingFetcher:
    """The fetches of one worker; as many at a time as the service lets requests wait."""

    def __init__(
        self,
        transfer: TensorTransfer,
        fetches_max: int,
        read: Callable[[bytes], Sequence[TensorDescriptor]] = lambda params: codec.tensor_list.decode(params).tensors,
    ) -> None:
        """``read`` finds the tensors in a request's ``disaggregated_params``, or raises ``DecodeError``."""
        self._read = read
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
            tensors = self._read(request.disaggregated_params)
        except DecodeError as error:
            raise RefusedError(
                f"the disaggregated_params of request {request.request_id!r} describe no embeddings ({error})"
            ) from None
        self._tasks[request.request_id] = detached(
            self._fetch(request.request_id, tensors), f"embeddings of {request.request_id}"
        )

    def end(self, request_id: str) -> None:
        """Give a fetch up, if there is one; its sources are released."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Give every fetch up."""
        tasks = list(self._tasks.values())
        for request_id in list(self._tasks):
            self.end(request_id)
        await cancel_all(tasks)

    async def _fetch(self, request_id: str, tensors: Sequence[TensorDescriptor]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                fetches = [group.create_task(self._transfer.fetch(tensor)) for tensor in tensors]
        except* TensorUnavailable as unavailable:
            self._failed(request_id, str(unavailable.exceptions[0]))
        except* Exception as bug:
            named = about(request_id=request_id)
            log.exception("fetching the embeddings of request %s failed: this is a bug", request_id, extra=named)
            self._failed(request_id, f"fetching embeddings failed: {bug.exceptions[0]!r}")
        else:
            if self._is_awaited(request_id):
                self._on_fetched(request_id, [fetch.result() for fetch in fetches])

    def _failed(self, request_id: str, why: str) -> None:
        if self._is_awaited(request_id):
            log.warning("request %s: %s", request_id, why, extra=about(request_id=request_id))
            self._on_failed(request_id, why)

    def _is_awaited(self, request_id: str) -> bool:
        """Take this fetch off the list; return whether it was there: a caller that gave it up is not called."""
        if self._tasks.get(request_id) is not asyncio.current_task():
            return False
        del self._tasks[request_id]
        return True


def _nobody(*_: object) -> None:
    raise AssertionError("a fetch began before start")
