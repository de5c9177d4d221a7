"""What an engine needs to hand tensors to another worker, however they travel. Buffers are NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from poolgrid.wire.tensors import TensorDescriptor

if TYPE_CHECKING:
    import numpy as np

Tensor: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class TensorUnavailable(Exception):
    """A tensor could not be fetched: its source is gone, keeps it no longer, or is too slow."""


class TensorTransfer(Protocol):
    """One worker's end of tensor transfers: a source of what it offers, a taker of what others offer."""

    @property
    def kind(self) -> str:
        """Return ``zmq`` or ``nixl``, as metrics and health show it."""
        ...

    def offer(self, name: str, tensor: Tensor) -> TensorDescriptor:
        """Keep a tensor for whoever gets the descriptor, for one lease from the last question on.

        Raises ``poolgrid.workers.core.refusal.BusyError`` when no more can be kept.
        """
        ...

    def withdraw(self, tensor_id: str) -> bool:
        """Let go of an offered tensor; say whether it was kept."""
        ...

    def on_gone(self, told: Callable[[str, bool], None]) -> None:
        """Have ``told(tensor_id, expired)`` called when an offered tensor was released by its taker, or expired."""
        ...

    async def fetch(self, descriptor: TensorDescriptor) -> Tensor:
        """Return a tensor of another worker and let its source go; raises ``TensorUnavailable``."""
        ...

    async def close(self) -> None:
        """End; what is offered is gone, fetches under way fail."""
        ...
