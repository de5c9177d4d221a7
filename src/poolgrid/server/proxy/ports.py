"""What the data path needs of its router."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from poolgrid.kernel.requests.inference import InferenceBackend
from poolgrid.kernel.wire.identifiers import Role, WorkerKey
from poolgrid.kernel.wire.requests import TokenDelta


class ServerPlace(NamedTuple):
    """An engine server, as its worker's card describes it, or the router of a pool of them."""

    worker: WorkerKey
    url: str
    kind: str
    """``vllm``, ``sglang``, ``trtllm-serve``, ``openai``, or ``poolgrid`` for the router of a pool of own workers."""
    version: str
    rank: int | None
    """The data-parallel rank that was chosen, as requests to the server name it; ``None`` = it has one."""
    role: Role = Role.AGGREGATED
    kv_bootstrap_port: int = 0
    """Where a prefill server of SGLang hands KV over; 0 = another server."""
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

    def places(self, model: str, lora: str = "") -> Sequence[ServerPlace]:
        """Return the servers of a model that have an adapter, of all models for an empty name, the least busy first;
        each server once."""
        ...

    def server_urls(self) -> Collection[str]:
        """Return the URLs of all servers."""
        ...

    def follows(self, worker: WorkerKey) -> bool:
        """Return whether what is promised of a worker's cache comes from the events of its own engine."""
        ...

    def on_carried(self, request_id: str, delta: TokenDelta) -> None:
        """Take what a carrier reports of a dispatch."""
        ...

    def on_carried_broken(self, request_id: str, dispatch_id: str, why: str) -> None:
        """Take note that a prefill leg has failed whose decode leg has begun."""
        ...

    def on_answered(self, request_id: str, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Take the head of an answer from the router of a pool, whose own lines say what it chose for a request."""
        ...
