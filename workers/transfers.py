"""What passes between this worker and others: KV and embeddings of legs that run here, and KV that others come for.

Rules:

1. A decode leg first has its KV asked for (``KvFetcher``), a leg behind an encode worker its embeddings
   (``EmbeddingFetcher``); until the answer is here the engine knows nothing of the leg.
2. Such a leg ends here when it is cancelled, when its fetch fails, or when the engine refuses it with what arrived.
   Its maker is told of each end once, and never of a leg that the engine has.
3. The source of KV is released when the KV has arrived or the leg ends, for any reason.
4. An engine that hands no KV over answers that it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poolgrid.wire.identifiers import Stage
from poolgrid.wire.requests import FinishReason, Generate, KvOffered, RefusalKind, TokenDelta
from poolgrid.workers.core.refusal import RefusedError
from poolgrid.workers.embedding_fetcher import EmbeddingFetcher
from poolgrid.workers.endings import refused_delta
from poolgrid.workers.engines.protocol import EmbeddingTaker, KvHandover
from poolgrid.workers.kv_fetcher import KvFetcher
from poolgrid.workers.metrics import WorkerMetrics
from poolgrid.workers.tensor_transfer.port import Tensor


@dataclass(frozen=True, slots=True)
class KvExchange:
    """The service's part in handing KV over, for an engine that needs one."""

    handover: KvHandover
    fetcher: KvFetcher


@dataclass(frozen=True, slots=True)
class EmbeddingExchange:
    """The service's part in taking embeddings, for an engine that works behind encode workers."""

    taker: EmbeddingTaker
    fetcher: EmbeddingFetcher


class Transfers:
    """The transfers of one worker, on its event loop."""

    def __init__(
        self,
        kv: KvExchange | None,
        embeddings: EmbeddingExchange | None,
        metrics: WorkerMetrics,
        on_ended: Callable[[Generate, TokenDelta, FinishReason], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        """Begin to take the fetchers' answers.

        ``on_ended`` is called for each leg that ended here: its request, its only delta, and why for the pool.
        ``on_failed`` is called for a request whose fetch failed, and why; the leg may be here still, or in the engine,
        or gone.
        """
        self.fetching: dict[str, Generate] = {}
        """Legs whose KV or embeddings were asked for and are not here yet."""
        self._kv = kv
        self._embeddings = embeddings
        self._metrics = metrics
        self._on_ended = on_ended
        if kv is not None:
            kv.fetcher.start(self._on_offered, on_failed)
        if embeddings is not None:
            embeddings.fetcher.start(self._on_embeddings, on_failed)

    # -- for legs that run here ----------------------------------------------------------------------------------------

    def begin(self, request: Generate) -> bool:
        """Ask for what a leg needs before the engine may have it; return ``False`` when it needs nothing.

        Raises ``RefusedError`` when it cannot be asked for.
        """
        kv = self._kv
        if kv is not None and request.stage is Stage.DECODE:
            kv.fetcher.begin(request.request_id, kv.handover.wanted(request))
        elif (
            self._embeddings is not None
            and request.disaggregated_params is not None
            and request.stage is not Stage.DECODE
        ):
            self._embeddings.fetcher.begin(request)
        else:
            return False
        self.fetching[request.request_id] = request
        return True

    def end(self, request_id: str, delta: TokenDelta, event_reason: FinishReason) -> None:
        """End a leg that the engine does not know."""
        request = self.fetching.pop(request_id)
        self.release_source(request_id)
        if self._embeddings is not None:
            self._embeddings.fetcher.end(request_id)
        self._on_ended(request, delta, event_reason)

    def release_source(self, request_id: str) -> None:
        if self._kv is not None:
            self._kv.fetcher.end(request_id)

    def _on_offered(self, request_id: str, offer: KvOffered) -> None:
        assert self._kv is not None
        handover = self._kv.handover
        self._submit(request_id, lambda request: handover.submit_offered(request, offer))

    def _on_embeddings(self, request_id: str, tensors: Sequence[Tensor]) -> None:
        assert self._embeddings is not None
        taker = self._embeddings.taker
        self._submit(request_id, lambda request: taker.submit_embedded(request, tensors))

    def _submit(self, request_id: str, submit: Callable[[Generate], None]) -> None:
        request = self.fetching.pop(request_id)
        try:
            submit(request)
        except RefusedError as refusal:
            self.fetching[request_id] = request
            if refusal.kind is None or refusal.kind is RefusalKind.INVALID:
                self._metrics.kv_fetch_failures.labels("wrong").inc()
            delta = refused_delta(request_id, refusal.reason, refusal.kind)
            self.end(request_id, delta, FinishReason.ERROR)

    # -- for legs that run elsewhere -----------------------------------------------------------------------------------

    def offer(self, transfer_id: str) -> KvOffered:
        """Return what is kept here under a transfer id, or that nothing is."""
        return KvOffered(transfer_id, False) if self._kv is None else self._kv.handover.offer(transfer_id)

    def release(self, transfer_id: str) -> None:
        if self._kv is not None:
            self._kv.handover.release(transfer_id)
