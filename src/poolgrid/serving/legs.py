"""The legs of one request, and the message that sends each to its worker.

A request is served in legs: whole on one worker, or prefill and decode on two, with its images encoded before. What a
leg leaves behind on its worker (KV blocks, embeddings) is *kept* until the leg after it has taken it. A request that
loses a worker begins again with its prompt and the output so far, which are one prompt to the next worker.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

from poolgrid.inference.inference_request import InferenceRequest
from poolgrid.wire import codec
from poolgrid.wire.identifiers import Stage, WorkerKey
from poolgrid.wire.multimodal import MediaKind, MultimodalInput
from poolgrid.wire.request_ids import dispatch_id
from poolgrid.wire.requests import Generate, KvRetention, Routing, Sampling
from poolgrid.wire.trace_context import TraceContext

TOKENS_TOGETHER: Final = 32
"""Tokens that come together where the answer is read whole: a worker that dies takes at most so many with it, which is
a few tenths of a second's work, and a message's cost is spread so thin that more would gain nothing."""

_ENCODE: Final = Stage.ENCODE
_DECODE: Final = Stage.DECODE


@final
class Dispatch:
    """One leg of a request on one worker."""

    # Not a struct: each token asks for it, and where it is compiled that is a place in memory.
    __slots__ = ("endpoint", "id", "may_be_crowded", "number", "position", "repeated", "stage", "worker")

    def __init__(
        self, id: str, number: int, worker: WorkerKey, endpoint: str, stage: Stage, may_be_crowded: bool = False
    ) -> None:
        self.id = id
        self.number = number
        """0 for a request's first dispatch, counted over legs and migrations."""
        self.worker = worker
        self.endpoint = endpoint
        self.stage = stage
        self.may_be_crowded = may_be_crowded
        """Whether it said what its worker was believed to have promised, so that the worker may refuse for that."""
        self.position = 0
        """Tokens received."""
        self.repeated = b""
        """Tokens at the beginning of the output that the client already has, still to come."""


class LegPlan:
    """Where a request stands between its first leg and its last."""

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request
        self.dispatches = 0
        """Dispatches so far: legs and migrations."""
        self.encode_legs = 0
        self.current: Dispatch | None = None
        """The leg that a worker is at; ``None`` while the next one is being placed."""
        self.kept: Dispatch | None = None
        """The prefill leg whose KV blocks are kept until the decode leg has them."""
        self.encoded: Dispatch | None = None
        """The encode leg whose embeddings are kept until the leg that computes the prompt has them."""
        self.prefill_params: bytes | None = None
        """What the prefill leg returned, for the decode leg."""
        self.prefill_emitted = True
        """Whether it gave the first token out."""
        self.encode_params: bytes | None = None
        """What the encode leg returned, for the leg that computes the prompt."""
        self.encodes_itself = False
        """Whether who computes the prompt encodes the media too: embeddings did not arrive, or nobody makes them."""

    @property
    def wants_encode(self) -> bool:
        """Return whether an encode leg comes before anything else."""
        media = self.request.multimodal
        return (
            media is not None
            and not self.encodes_itself
            and self.encode_params is None
            and self.prefill_params is None
            and any(item.kind is MediaKind.IMAGE for item in media.items)
        )

    @property
    def wants_decode(self) -> bool:
        return self.prefill_params is not None

    @property
    def awaits_embeddings(self) -> bool:
        """Return whether the current leg was given embeddings and has not shown yet that it has them."""
        current = self.current
        return (
            self.encode_params is not None
            and current is not None
            and current.stage not in (_ENCODE, _DECODE)
            and current.position == 0
        )

    @property
    def legs(self) -> tuple[Dispatch, ...]:
        return tuple(leg for leg in (self.current, self.kept, self.encoded) if leg is not None)

    def find(self, dispatch_id: str) -> Dispatch | None:
        """Return the current or kept dispatch of this id."""
        for dispatch in (self.current, self.kept, self.encoded):
            if dispatch is not None and dispatch.id == dispatch_id:
                return dispatch
        return None

    def clear(self) -> None:
        """Forget every leg, and what they left for each other."""
        self.current = self.kept = self.encoded = None
        self.prefill_params = self.encode_params = None

    @property
    def next_dispatch_id(self) -> str:
        return dispatch_id(self.request.request_id, self.dispatches)

    def begin(
        self,
        worker: WorkerKey,
        endpoint: str,
        stage: Stage,
        output: bytearray,
        overlap_tokens: int = 0,
        expected_prefill_tokens: int | None = None,
        trace: TraceContext | None = None,
        retention: KvRetention | None = None,
    ) -> Generate:
        """Start the next dispatch and return the message for its worker: prompt plus what was already generated.

        ``overlap_tokens`` and ``expected_prefill_tokens`` are what the choice was made on
        (``poolgrid.wire.requests.Routing``), ``trace`` is what the worker is told of the request's trace.
        ``retention`` is what the router has learned; what the client itself says goes before it.
        """
        request = self.request
        may_be_crowded = expected_prefill_tokens is not None
        dispatch = Dispatch(
            dispatch_id(request.request_id, self.dispatches), self.dispatches, worker, endpoint, stage, may_be_crowded
        )
        self.dispatches += 1
        self.current = dispatch
        emitted = len(output) // 4
        if stage is _DECODE:
            # It continues the prompt that the prefill leg was given, whose first token is out already. Some engines
            # leave that token to whoever decodes.
            if self.prefill_emitted:
                emitted -= 1
                dispatch.repeated = bytes(output[-4:])
        elif stage is _ENCODE:
            self.encode_legs += 1
            emitted = 0
        return Generate(
            dispatch.id,
            request.token_ids + bytes(output[: 4 * emitted]) if emitted else request.token_ids,
            _remaining(request.sampling, emitted) if emitted else request.sampling,
            request.stop_token_ids,
            Routing(
                worker.dp_rank,
                request.priority,
                request.lora_name,
                request.cache_salt,
                emitted,
                overlap_tokens,
                expected_prefill_tokens,
                TOKENS_TOGETHER if request.read_whole else 1,
            ),
            disaggregated_params=self._params_for(stage),
            multimodal=None if request.multimodal is None else self._media_for(stage),
            stage=stage,
            trace=trace,
            retention=retention if request.retention is None else request.retention,
        )

    def _params_for(self, stage: Stage) -> bytes | None:
        """Return what the leg before returned."""
        if stage is _DECODE:
            return self.prefill_params
        return None if stage is _ENCODE else self.encode_params

    def _media_for(self, stage: Stage) -> bytes | None:
        """Return the media as a leg gets them: none for a decode leg, no image bytes where embeddings replace them."""
        media = self.request.multimodal
        if media is None or stage is _DECODE:
            return None
        if self.encode_params is not None and stage is not _ENCODE:
            media = MultimodalInput(
                media.prompt_text,
                tuple(
                    msgspec.structs.replace(item, data=b"") if item.kind is MediaKind.IMAGE else item
                    for item in media.items
                ),
            )
        return codec.multimodal.encode(media)


def _remaining(sampling: Sampling, emitted: int) -> Sampling:
    """Return the sampling of a continuation after ``emitted`` tokens."""
    return msgspec.structs.replace(
        sampling, max_tokens=sampling.max_tokens - emitted, min_tokens=max(0, sampling.min_tokens - emitted)
    )
