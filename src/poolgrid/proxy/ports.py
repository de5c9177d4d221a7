"""What the data path needs of its router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from poolgrid.inference import InferenceBackend
from poolgrid.wire.identifiers import WorkerKey
from poolgrid.wire.requests import TokenDelta


class ServerPlace(NamedTuple):
    """An engine server, as its worker's card describes it, or the router of a pool of them."""

    worker: WorkerKey
    url: str
    kind: str
    """``vllm``, ``sglang``, ``trtllm-serve``, ``openai``, or ``poolgrid`` for the router of a pool of own workers."""
    version: str
    ranks: int
    """Data-parallel ranks behind the URL; a request names the one that was chosen where there are several."""
    is_router: bool = False
    """Whether it is the router of a pool, which chooses the server: ``worker`` is then named after the pool."""


class ForwardBackend(InferenceBackend, Protocol):
    """A router whose workers may follow engine servers. ``submit`` takes a request with a carrier."""

    def forwards(self, model: str) -> bool:
        """Return whether requests for a model go to engine servers as their clients wrote them; with an empty name,
        whether those of any model do."""
        ...

    def place_of(self, worker: WorkerKey) -> ServerPlace | None:
        """Return a worker's server; ``None`` once it has left the pool."""
        ...

    def places(self, model: str) -> Sequence[ServerPlace]:
        """Return the servers of a model, of all models for an empty name, the least busy first; each server once."""
        ...

    def on_carried(self, request_id: str, delta: TokenDelta) -> None:
        """Take what a carrier reports of a dispatch."""
        ...

    def on_answered(self, request_id: str, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Take the head of an answer from the router of a pool, whose own lines say what it chose for a request."""
        ...
