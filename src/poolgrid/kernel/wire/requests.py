"""The request plane: a router's DEALER socket talks to a worker's ROUTER socket in these messages.

Workers take token ids and return token ids. A worker answers with **one ``TokenBatch`` per engine step and peer**,
holding the new tokens of all that peer's requests. Token ids are u32 little-endian bytes throughout.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from poolgrid.kernel.wire.identifiers import (
    U32,
    U64,
    Identifier,
    Media,
    Opaque,
    PackedHashes,
    PackedTokens,
    Stage,
    Text,
)
from poolgrid.kernel.wire.limits import (
    ANSWERS_TOGETHER_MAX,
    BAD_TOKENS_MAX,
    DRAIN_TIMEOUT_MS_MAX,
    ENGINE_FIELDS_MAX,
    FORWARDS_TOGETHER_MAX,
    GUIDE_BYTES_MAX,
    GUIDE_CHOICES_MAX,
    LOGITS_ARGUMENT_BYTES_MAX,
    LOGITS_PROCESSORS_MAX,
    LOGPROBS_MAX,
    RETAINED_RANGES_MAX,
    STOP_TOKENS_MAX,
    TOKEN_DELTAS_PER_BATCH_MAX,
    TOKENS_TOGETHER_MAX,
)
from poolgrid.kernel.wire.sessions import SessionTurn, TurnAnswer
from poolgrid.kernel.wire.tasks import Task, TaskResult
from poolgrid.kernel.wire.trace_context import TraceContext

Guide = Annotated[str, Meta(max_length=GUIDE_BYTES_MAX)]
"""What an output must keep to, in a language of the engine's guided decoding."""


class LogitsProcessorCall(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A logits processor that the worker's operator registered, with this request's arguments."""

    name: Identifier
    arguments: Annotated[bytes, Meta(max_length=LOGITS_ARGUMENT_BYTES_MAX)] = b""
    """A JSON object; empty = no arguments."""


class Sampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How the next token is chosen; ``None`` leaves a choice to the engine's default."""

    max_tokens: U32
    temperature: float | None = None
    top_p: float | None = None
    top_k: U32 | None = None
    seed: int | None = None
    min_tokens: U32 = 0
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    """Alternatives to report per generated token: ``None`` = no log probabilities, 0 = the chosen token's only."""
    logit_bias: dict[int, float] | None = None
    guided_json: Annotated[bytes, Meta(max_length=GUIDE_BYTES_MAX)] | None = None
    """A JSON schema. At most one of the guides is set."""
    guided_regex: Guide | None = None
    guided_grammar: Guide | None = None
    """A grammar in EBNF."""
    guided_choice: Annotated[tuple[Guide, ...], Meta(max_length=GUIDE_CHOICES_MAX)] | None = None
    """The output is one of these texts."""
    structural_tag: Guide | None = None
    """JSON: texts that begin a guided part, and the schema of each."""
    bad_token_ids: Annotated[tuple[U32, ...], Meta(max_length=BAD_TOKENS_MAX)] = ()
    """Tokens that are never generated."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    """Alternatives to report per prompt token, as ``logprobs`` for generated ones."""
    logits_processors: Annotated[tuple[LogitsProcessorCall, ...], Meta(max_length=LOGITS_PROCESSORS_MAX)] = ()
    """Run one after the other on the logits of each token."""
    engine_fields: (
        Annotated[dict[Identifier, bool | int | float | Identifier], Meta(max_length=ENGINE_FIELDS_MAX)] | None
    ) = None
    """What nothing but the engine reads, by the names that clients and engines give it."""

    def value_of(self, name: str) -> Any:
        """Return what a field says, which may be one of ``engine_fields``; ``None`` = nothing."""
        return getattr(self, name, (self.engine_fields or {}).get(name))

    @property
    def guide(self) -> str:
        """Return the name of the field with the constraint of the output; empty = none does."""
        for name in ("guided_json", "guided_regex", "guided_grammar", "guided_choice", "structural_tag"):
            if getattr(self, name) is not None:
                return name
        return ""


def unit_priority(priority: int) -> float:
    """Return a priority in TensorRT-LLM's range: 0 to 1 (both excluded), 0.5 = usual, higher first."""
    return 0.5 + 0.5 * priority / (1 + abs(priority))


class Routing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Decisions and settings of the router for the worker to honour."""

    dp_rank: U32 = 0
    priority: int = 0
    lora_name: Identifier = ""
    cache_salt: Identifier = ""
    emitted_tokens: U32 = 0
    """Tokens at the end of ``token_ids`` that the client already has (a migrated request). A guide continues after
    them; a worker that would begin it again refuses."""
    overlap_tokens: U32 = 0
    """Prompt tokens that the router expects to be reused."""
    expected_prefill_tokens: U32 | None = None
    """What the rank, by the router's count, has still to compute for others. A worker that has promised far more
    refuses, and reports how much (``TokenDelta.booked_prefill_tokens``); ``None`` = it must not refuse for that."""
    tokens_together: Annotated[int, Meta(ge=1, le=TOKENS_TOGETHER_MAX)] = 1
    """Up to how many tokens of several engine steps may come in one delta: more than 1 where the answer is not read
    before its end. The first token, and the end, are never kept back."""


Retention = Annotated[int, Meta(ge=0, le=100)]
"""How long a block stays in a cache, against others: of two that no request holds the lower one goes first."""

RETENTION_DEFAULT = 35
"""What blocks have that no request named; TensorRT-LLM's own."""


class RetainedTokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A range of a prompt's tokens and how long the blocks that begin in it stay."""

    start: U32
    end: U32 | None = None
    """Exclusive; ``None`` = to the end of the prompt."""
    priority: Retention = RETENTION_DEFAULT
    duration_ms: U32 | None = None
    """From when no request holds the block any more; ``None`` = for as long as it is there."""


class KvRetention(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How long the blocks of one request stay in its worker's cache."""

    ranges: Annotated[tuple[RetainedTokens, ...], Meta(max_length=RETAINED_RANGES_MAX)] = ()
    """In order, and disjoint; prompt blocks in none of them keep the priority that they have."""
    decode_priority: Retention = RETENTION_DEFAULT
    """Of blocks that begin in the output."""
    decode_duration_ms: U32 | None = None

    def of_blocks(
        self, block_size: int, start: int, end: int, prompt_tokens: int
    ) -> list[tuple[int | None, int | None]]:
        """Return priority and duration of the blocks ``start`` to ``end`` of a request, by where each begins.

        Of a prompt block in no range nothing is asked (``None``): a new one stays as long as usual, one that is there
        keeps its priority.
        """
        of_prompt = min(end, -(-prompt_tokens // block_size))
        found: list[tuple[int | None, int | None]] = [(None, None)] * max(0, of_prompt - start)
        for each in self.ranges:
            first = max(start, min(of_prompt, -(-each.start // block_size)))
            after = of_prompt if each.end is None else min(of_prompt, -(-each.end // block_size))
            if after > first:
                found[first - start : after - start] = [(each.priority, each.duration_ms)] * (after - first)
        return found + [(self.decode_priority, self.decode_duration_ms)] * (end - max(start, of_prompt))

    def capped(self, highest: int) -> KvRetention:
        ranges = tuple(msgspec.structs.replace(each, priority=min(each.priority, highest)) for each in self.ranges)
        return KvRetention(ranges, min(self.decode_priority, highest), self.decode_duration_ms)

    @property
    def fault(self) -> str:
        """Say which range is wrong, as ``ranges[1]: …``; empty = none is."""
        reached: int | None = 0
        for index, each in enumerate(self.ranges):
            if each.end is not None and each.end <= each.start:
                return f"ranges[{index}] ends at {each.end}, allowed is more than where it starts ({each.start})"
            if reached is None or each.start < reached:
                until = "the end of the prompt" if reached is None else reached
                return f"ranges[{index}] starts at {each.start}, and the one before it reaches to {until}"
            reached = each.end
        return ""


class Generate(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Run one request. A second ``Generate`` with a request id that is still active is refused."""

    request_id: Identifier
    token_ids: PackedTokens
    sampling: Sampling
    stop_token_ids: Annotated[tuple[U32, ...], Meta(max_length=STOP_TOKENS_MAX)] = ()
    routing: Routing = Routing()
    disaggregated_params: Opaque | None = None
    """What the leg before returned (encode → prefill or whole, prefill → decode); given on unread."""
    multimodal: Media | None = None
    """An encoded ``poolgrid.kernel.wire.multimodal.MultimodalInput``; never with a decode leg."""
    stage: Stage = Stage.WHOLE
    trace: TraceContext | None = None
    """The router's span of this leg, for a request that is traced; ``None`` without tracing."""
    retention: KvRetention | None = None
    """How long its blocks stay cached; ``None`` = as long as others."""
    turn: SessionTurn | None = None
    """The session that it is a turn of, for the worker's events and its engine; ``None`` = of none."""
    task: Task | None = None
    """What is asked for in place of tokens, with the stage of its kind; then there are no ``token_ids``."""


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Stop a request and free its blocks; answered by a final delta with finish reason ``cancelled``."""

    request_id: Identifier
    answered: Annotated[tuple[TurnAnswer, ...], Meta(max_length=ANSWERS_TOGETHER_MAX)] | None = None
    """Whole answers that the router saw, for the pool's journal; these requests are over, and nothing stops."""


class Ping(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Keep the peer's lease: a worker cancels the requests of a peer that has been silent for its lease."""

    nonce: U64


class FetchKv(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """From a decode worker to the prefill worker: what do you hold for this transfer? Keeps the offer alive."""

    transfer_id: Identifier


class ReleaseKv(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """The transfer is over (done, or given up): the prefill worker may free the blocks. Needs no answer."""

    transfer_id: Identifier


class Drain(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Take no new requests, hand over what does not finish in time, and wait to be ended.

    Needs no answer: the worker's events report the drain. If it is sent again, the earlier deadline holds.
    """

    timeout_ms: Annotated[int, Meta(ge=0, le=DRAIN_TIMEOUT_MS_MAX)] | None = None
    """How long running requests may take to finish; ``None`` = the worker's own setting."""


class ForwardBegan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A router has sent a request straight to the worker's engine server."""

    request_id: Identifier
    dp_rank: U32
    isl: U32
    """Prompt tokens, as far as the router knows them."""
    overlap_tokens: U32
    """Prompt tokens that the router expects to be reused."""
    turn: SessionTurn | None = None
    computes: bool = True
    """Whether the server computes the prompt: one that answers after a prefill leg fetches its KV."""
    cache_salt: Identifier = ""
    """The part of the caches that it uses; empty = the common one."""


class ForwardEnded(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Such a request is over."""

    request_id: Identifier
    dp_rank: U32
    reason: Text
    """As in ``poolgrid.kernel.wire.events.RequestFinished``."""
    cached_tokens: U32 | None = None
    """Prompt tokens that the server reported as reused; ``None`` = it reported nothing."""


class Forwarded(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """What a router sent straight to the worker's engine server, and what came of it, for the pool's journal.

    Needs no answer. Requests of a router that goes silent for its lease are taken to be over.
    """

    began: Annotated[tuple[ForwardBegan, ...], Meta(max_length=FORWARDS_TOGETHER_MAX)] = ()
    computed: Annotated[tuple[Identifier, ...], Meta(max_length=FORWARDS_TOGETHER_MAX)] = ()
    """Those whose first token passed the router."""
    ended: Annotated[tuple[ForwardEnded, ...], Meta(max_length=FORWARDS_TOGETHER_MAX)] = ()


ToWorker = Generate | Cancel | Ping | FetchKv | ReleaseKv | Drain | Forwarded


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Log probability of one generated token and of its best alternatives."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


class FinishReason(StrEnum):
    """How a leg of a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    """It failed, or was refused: ``RefusalKind`` decides what the router may do next."""
    PREFILLED = "prefilled"
    """The prompt is computed; another worker continues with ``disaggregated_params``."""
    ENCODED = "encoded"
    """The images are encoded; the worker that computes the prompt continues with ``disaggregated_params``."""
    EXPIRED = "expired"
    """What a leg kept for another worker was not taken in time; in events only."""
    MIGRATED = "migrated"
    """The worker handed it over at its drain timeout; in events only."""


class RefusalKind(StrEnum):
    """Why a worker does not continue a leg; the kinds differ in what the router does next."""

    BUSY = "busy"
    """It has no room now. Another worker may have; it is no fault."""
    DRAINING = "draining"
    """It takes nothing new before it leaves. Another worker may; it is no fault."""
    CROWDED = "crowded"
    """It has promised more than the router knew: the router chooses again, knowing ``booked_prefill_tokens``."""
    CANNOT_DO = "cannot-do"
    """It lacks what the request asks for. Another worker may have it; when none has, the client must change it."""
    INVALID = "invalid"
    """No worker takes such a request: it ends here, and the client must change it."""
    BROKEN = "broken"
    """It failed at what it should have done. Another worker may succeed; this one, and its pool, are to blame."""


class TokenDelta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one engine step added to one request."""

    request_id: Identifier
    position: U32
    """Index of the first new token among this dispatch's output: a hole or an overlap shows loss or duplication."""
    token_ids: PackedTokens
    finish_reason: FinishReason | None = None
    """``None`` while the request runs here."""
    cached_tokens: U32 | None = None
    """Prompt tokens that were reused; set on the first delta."""
    error: Text | None = None
    """What went wrong, with finish reason ``error``."""
    refusal: RefusalKind | None = None
    """With an error: what kind it is. ``None`` = the leg failed for good; no other worker is tried."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    disaggregated_params: Opaque | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's tokens from the second on; with the first delta, when asked for."""
    booked_prefill_tokens: U32 | None = None
    """With the refusal ``crowded``: what the rank has really promised to compute."""
    retry_after_ms: U32 | None = None
    """With the refusal ``busy``: the worker will refuse further requests for this long."""
    unknown_model: bool = False
    """With the refusal ``cannot-do``: the worker does not serve the model or adapter that the request names."""
    progress: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Of a task that runs: how much of it is done, in percent."""
    result: TaskResult | None = None
    """Of a task, with finish reason ``stop``."""


class TokenBatch(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """All that one engine step produced for one peer."""

    step: U64
    deltas: Annotated[list[TokenDelta], Meta(max_length=TOKEN_DELTAS_PER_BATCH_MAX)]


class Pong(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Answer to a ``Ping``; ``epoch`` tells a restarted worker from the one before."""

    nonce: U64
    epoch: U64
    draining: bool = False


class KvOffered(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Answer to ``FetchKv``: the blocks that are kept for the transfer, or none when it is unknown (any more)."""

    transfer_id: Identifier
    known: bool
    sequence_hashes: PackedHashes = b""
    """Whole blocks of the prompt, in order."""
    tail_tokens: U32 = 0
    """Prompt tokens beyond the last whole block, whose KV is kept too."""


FromWorker = TokenBatch | Pong | KvOffered
