"""The legs of one request: where each stands, what happens to it, what follows, and the message that starts it.

A request is served in legs: whole on one worker, or prefill and decode on two, with its images encoded before. What a
leg leaves behind on its worker (KV blocks, embeddings) is *kept* until the leg after it has taken it. A request that
loses a worker begins again with its prompt and the output so far, which are one prompt to the next worker.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.identifiers import Stage, WorkerKey, dispatch_id
from poolgrid.kernel.wire.multimodal import MediaKind, MultimodalInput
from poolgrid.kernel.wire.requests import Generate, Routing, Sampling, TokenDelta
from poolgrid.kernel.wire.trace_context import TraceContext

TOKENS_TOGETHER: Final = 32
"""Tokens that come together where the answer is read whole: a worker that dies takes at most so many with it, which is
a few tenths of a second's work, and a message's cost is spread so thin that more would gain nothing."""


class LegState(StrEnum):
    """Where a request stands, seen from the leg to which something happens."""

    WHOLE = "whole"
    """One worker does all of it."""
    ENCODE = "encode"
    """A worker encodes the images."""
    PREFILL = "prefill"
    """A worker computes the prompt and the first token."""
    DECODE = "decode"
    """A worker continues from a prefill leg."""
    AWAITING = "awaiting embeddings"
    """A whole or prefill leg that was given embeddings and has not shown yet that it has them."""
    KEPT = "kept"
    """The leg has had its last delta; what it left is kept for the leg after it."""
    PLACING = "placing"
    """No worker is at it: the next leg is being placed."""


class LegEvent(StrEnum):
    """What can happen to a leg, or to the request."""

    OUTPUT = "output"
    """Tokens in their place, or the report that the leg has begun."""
    PREFILLED = "prefilled"
    """The prompt is computed, and another worker is to continue."""
    ENCODED = "encoded"
    """The images are encoded."""
    FINISHED = "finished"
    """Its last token, or an error that no other worker can fix."""
    BUSY = "refused: busy"
    """Its worker has no room."""
    DRAINING = "refused: draining"
    """Its worker takes nothing new, or hands over what it has at its drain timeout."""
    STALE_LOAD = "refused: stale load"
    """Its worker has promised more to other routers than this one knew."""
    CANNOT_DO = "refused: cannot do"
    """Its worker lacks what the request asks for."""
    BROKEN = "refused: broken"
    """Its worker failed at what it should have done."""
    OUT_OF_PLACE = "output out of place"
    """Its stream has a hole or a repetition, or ends as another leg's would."""
    CANCELLED = "cancelled by the worker"
    """Its worker gave it up without being asked."""
    LOST = "worker lost"
    """Its connection broke, or it fell silent."""
    LEFT = "worker left"
    """It left the pool, or its lease ended there."""
    CLIENT_LEFT = "client left"
    """The client closed its connection or cancelled."""
    NOWHERE = "no worker for the next leg"
    """None can serve it, or none had room before the deadline."""
    SHUTDOWN = "shutdown"
    """The router ends."""


class Dispatch(msgspec.Struct, eq=False):
    """One leg of a request on one worker."""

    id: str
    number: int
    """0 for a request's first dispatch, counted over legs and migrations."""
    worker: WorkerKey
    endpoint: str
    stage: Stage
    states_load: bool = False
    """Whether it stated the worker's expected load, so that the worker may refuse because of it."""
    position: int = 0
    """Tokens received."""
    repeated: bytes = b""
    """Tokens at the beginning of the output that the client already has, still to come."""


# -- effects: what a router does after an event -----------------------------------------------------------------------


class WorkerReported(msgspec.Struct):
    """A leg's worker reported more than further tokens, and it was in its place."""

    dispatch: Dispatch
    delta: TokenDelta
    first: bool
    """Whether the client had no token before."""


class CancelLeg(msgspec.Struct):
    """Tell a leg's worker to stop and to release what it keeps."""

    dispatch: Dispatch


class ReleaseLeg(msgspec.Struct):
    """Take a leg out of the load of its worker."""

    dispatch: Dispatch


class AvoidWorker(msgspec.Struct):
    """A leg's worker comes last from now on; ``for_good``: it refused what the request asks for, and is not asked
    again."""

    dispatch: Dispatch
    why: str
    for_good: bool = False


class WorkerFull(msgspec.Struct):
    """A leg's worker has no room for anything, for ``retry_after_ms``."""

    dispatch: Dispatch
    retry_after_ms: int | None
    """``None`` = the worker did not report a time."""


class RecordFailure(msgspec.Struct):
    """A leg's worker has failed it."""

    dispatch: Dispatch
    event: LegEvent
    why: str


class WorkerOvercommitted(msgspec.Struct):
    """A leg's worker has promised ``booked_tokens``; the leg is released."""

    dispatch: Dispatch
    booked_tokens: int


class PlaceNext(msgspec.Struct):
    """Place the next leg by ``RequestMachine.plan``."""

    why: str
    after: Dispatch
    """The leg before, or the one that was lost."""
    moved: bool
    """Whether this is a migration; else it is the next leg, or the same one chosen again."""
    for_room: bool = False
    """Whether it moves because its worker had no room: nothing has failed."""


class EndRequest(msgspec.Struct):
    """The request is over, and the client has ``last``."""

    last: StreamDelta
    by_worker: bool
    """Whether a worker ended it, rather than something that happened to it."""


Effect = (
    WorkerReported
    | CancelLeg
    | ReleaseLeg
    | AvoidWorker
    | WorkerFull
    | RecordFailure
    | WorkerOvercommitted
    | PlaceNext
    | EndRequest
)
NOTHING: tuple[Effect, ...] = ()


class LegPlan:
    """Where a request stands between its first leg and its last."""

    # Most of it stays as it is here for a request that one worker serves.
    dispatches = 0
    """Dispatches so far: legs and migrations."""
    encode_legs = 0
    current: Dispatch | None = None
    """The leg that a worker is at; ``None`` while the next one is being placed."""
    kept: Dispatch | None = None
    """The prefill leg whose KV blocks are kept until the decode leg has them."""
    encoded: Dispatch | None = None
    """The encode leg whose embeddings are kept until the leg that computes the prompt has them."""
    prefill_params: bytes | None = None
    """What the prefill leg returned, for the decode leg."""
    prefill_emitted = True
    """Whether it gave the first token out."""
    encode_params: bytes | None = None
    """What the encode leg returned, for the leg that computes the prompt."""
    encodes_itself = False
    """Whether the worker that computes the prompt encodes the media too: no embeddings came, or none are made."""
    encode_failure = ""
    """Why that is so: the last leg that did not encode them, or whose embeddings did not arrive."""

    def __init__(self, request: InferenceRequest) -> None:
        self.request = request

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
            and current.stage not in (Stage.ENCODE, Stage.DECODE)
            and current.position == 0
        )

    @property
    def legs(self) -> tuple[Dispatch, ...]:
        if self.current is not None and self.kept is None and self.encoded is None:
            return (self.current,)
        return tuple(leg for leg in (self.current, self.kept, self.encoded) if leg is not None)

    def find(self, dispatch_id: str) -> Dispatch | None:
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
    ) -> Generate:
        """Start the next dispatch and return the message for its worker: prompt plus what was already generated.

        ``overlap_tokens`` and ``expected_prefill_tokens`` are what the choice was made on
        (``poolgrid.kernel.wire.requests.Routing``), ``trace`` is the trace context for the worker.
        """
        request = self.request
        number = self.dispatches
        self.dispatches = number + 1
        name = dispatch_id(request.request_id, number) if number else request.request_id
        states_load = expected_prefill_tokens is not None
        self.current = dispatch = Dispatch(name, number, worker, endpoint, stage, states_load)
        emitted = len(output) // 4
        token_ids, sampling = request.token_ids, request.sampling
        if stage is Stage.DECODE:
            # It continues the prompt that the prefill leg was given, whose first token is out already. Some engines
            # leave that token to the decode worker.
            if self.prefill_emitted:
                emitted -= 1
                dispatch.repeated = bytes(output[-4:])
        elif stage is Stage.ENCODE:
            self.encode_legs += 1
            emitted = 0
        if emitted:
            token_ids += bytes(output[: 4 * emitted])
            sampling = _remaining(sampling, emitted)
        return Generate(
            name,
            token_ids,
            sampling,
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
            disaggregated_params=self.prefill_params if stage is Stage.DECODE else self.encode_params,
            multimodal=None if request.multimodal is None else self._media_for(stage),
            stage=stage,
            trace=trace,
            retention=request.retention,
            turn=request.turn,
            task=request.task,
        )

    def _media_for(self, stage: Stage) -> bytes | None:
        """Return the media as a leg gets them: none for a decode leg, no image bytes where embeddings replace them."""
        media = self.request.multimodal
        if media is None or stage is Stage.DECODE:
            return None
        if self.encode_params is not None and stage is not Stage.ENCODE:
            media = MultimodalInput(
                media.prompt_text,
                tuple(
                    msgspec.structs.replace(item, data=b"") if item.kind is MediaKind.IMAGE else item
                    for item in media.items
                ),
            )
        return codec.multimodal.encode(media)


def _remaining(sampling: Sampling, emitted: int) -> Sampling:
    return msgspec.structs.replace(
        sampling, max_tokens=sampling.max_tokens - emitted, min_tokens=max(0, sampling.min_tokens - emitted)
    )
