"""The embeddings that an encode worker keeps for the workers that compute prompts; on the worker's event loop.

The tensors of a request are offered together. They stay until the taker has them all, the request is cancelled, or one
lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from poolgrid.kernel.wire.multimodal import TensorDescriptor
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor

if TYPE_CHECKING:
    from poolgrid.server.workers.tensor_transfer.zmq_transfer import TensorTransfer


class EmbeddingOffers:
    """What one worker offers, by request."""

    def __init__(self, transfer: TensorTransfer, gone: Callable[[str, bool], None]) -> None:
        """``gone(request_id, expired)`` is told when nothing of a request is kept any more, but not by ``withdraw``."""
        self._transfer = transfer
        self._gone = gone
        self._kept: dict[str, set[str]] = {}
        """Tensors by request."""
        self._request_of: dict[str, str] = {}
        transfer.on_gone(self._on_gone)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def offer(self, request_id: str, tensors: Iterable[tuple[str, Tensor]]) -> list[TensorDescriptor]:
        """Keep a request's tensors, each with its name; raises ``RefusedError`` and keeps none of them."""
        offered: list[TensorDescriptor] = []
        try:
            for name, tensor in tensors:
                offered.append(self._transfer.offer(name, tensor))
        except RefusedError:
            for each in offered:
                self._transfer.withdraw(each.tensor_id)
            raise
        self._kept[request_id] = {each.tensor_id for each in offered}
        self._request_of |= {each.tensor_id: request_id for each in offered}
        return offered

    def withdraw(self, request_id: str) -> bool:
        kept = self._kept.pop(request_id, None)
        for tensor_id in kept or ():
            del self._request_of[tensor_id]
            self._transfer.withdraw(tensor_id)
        return kept is not None

    def _on_gone(self, tensor_id: str, expired: bool) -> None:
        request_id = self._request_of.pop(tensor_id, None)
        if request_id is None:
            return
        left = self._kept[request_id]
        left.discard(tensor_id)
        if left and not expired:
            return
        self.withdraw(request_id)
        self._gone(request_id, expired)
