"""The simulated engine: continuous batching with chunked prefill over a paged block pool, one step at a time.

Theory of operation. ``step(now)`` decides what runs from ``now`` on, does it, and returns when it will have been done:
what the outcome says becomes visible at ``ended_ms``, and waiting until then is the caller's business. Between two
steps the caller may ``submit`` and ``cancel`` at will. In a step

1. every decoding request gets one token;
2. what is left of ``max_num_tokens`` goes to prompt chunks: those begun first, then newly admitted requests;
3. a request whose prompt is complete gets its first token, and its full blocks become reusable;
4. a request that filled a block gets the next one; when there is none, the last arrived request (lowest priority
   first) gives up all it holds and is computed again later. Its output does not change: tokens depend on tokens only.

Because tokens are known ahead of time (``next_token``), so is the step at which anything but "one more token" happens
to a decoding request. With ``horizon_ms`` one call runs over all the uneventful steps at once, and what it returns is
what single steps would have added up to, to the bit.

Disaggregation (``kv_transfer``): a request of the prefill stage ends with its first token; its blocks are *kept* until
``release``, ``cancel`` or a time-out. A request of the decode stage comes with the offer of such blocks; once admitted
it holds blocks of its own that fill while other requests' steps go on, and decodes from the first step that begins
after that. Both end at moments that no step of this engine brings about: ``next_moment_ms`` says when to call again.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from poolgrid.wire.events import (
    BlocksStored,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
)
from poolgrid.wire.identifiers import Stage, Tier
from poolgrid.wire.requests import FinishReason, Generate, KvOffered, TokenDelta, TokenLogprobs
from poolgrid.workers.core.cache_facts import chains, stored_chain
from poolgrid.workers.core.kv_arrival import KvArrival
from poolgrid.workers.core.refusal import BusyError, RefusedError, UnableError, UnsupportedError
from poolgrid.workers.core.timing import PolynomialTiming, TimingModel
from poolgrid.workers.engines.simulated.core.block_pool import BlockPool
from poolgrid.workers.engines.simulated.core.cache_recorder import CacheRecorder, SilentRecorder
from poolgrid.workers.engines.simulated.core.guided_tokens import Guides
from poolgrid.workers.engines.simulated.core.kv_transfer import (
    KvSource,
    TransferModel,
    check_offer,
    make_offer,
    read_ticket,
    write_ticket,
)
from poolgrid.workers.engines.simulated.core.media import Embeddings, MediaMark, mark_media, read_media
from poolgrid.workers.engines.simulated.core.next_token import Vocabulary, prompt_logprobs
from poolgrid.workers.engines.simulated.core.scheduler import Scheduler
from poolgrid.workers.engines.simulated.core.sequence import Phase, Sequence
from poolgrid.workers.engines.simulated.core.token_guide import TokenGuide

Fact = RequestStarted | PrefillCompleted | RequestProgressed | RequestFinished

CANCELLED = FinishReason.CANCELLED
PREFILLED = FinishReason.PREFILLED
"""Finish reason of a prefill leg whose request goes on elsewhere; of the request here, once its KV was taken."""
EXPIRED = FinishReason.EXPIRED
"""Nobody came for the KV of a prefill leg."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the simulated engine can hold at a time."""

    block_size: int = 32
    """Tokens in a KV block."""
    total_kv_blocks: int = 16_384
    host_kv_blocks: int = 0
    max_batch_size: int = 256
    """Requests that run at a time."""
    max_num_tokens: int = 8192
    """Tokens in one step: one per decoding request, the rest prompt chunks."""
    max_sequence_length: int = 131_072
    """Prompt and output tokens of one request."""
    max_waiting_requests: int = 4096
    """Requests that wait for a place; one more is refused (another worker may take it)."""

    def __post_init__(self) -> None:
        for name in ("block_size", "total_kv_blocks", "max_batch_size", "max_num_tokens", "max_waiting_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"limiting an engine: {name} is {getattr(self, name)}, allowed are integers from 1")
        if self.host_kv_blocks < 0:
            raise ValueError(f"limiting an engine: host_kv_blocks is {self.host_kv_blocks}, allowed are 0 and above")
        if self.max_sequence_length < 2:
            raise ValueError(
                f"limiting an engine: max_sequence_length is {self.max_sequence_length}, allowed are integers from 2"
            )
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"limiting an engine: max_num_tokens is {self.max_num_tokens}, allowed are integers from "
                f"max_batch_size ({self.max_batch_size}): every running request decodes one token per step"
            )


@dataclass(slots=True)
class StepOutcome:
    """What one call of ``step`` did; visible to others at ``ended_ms``."""

    started_ms: float
    ended_ms: float
    steps: int
    """Engine steps covered: 1, or more when the caller allowed a horizon; 0 when there were only facts to tell."""
    prefill_tokens: int
    """Prompt tokens computed."""
    decode_tokens: int
    """Tokens generated by decoding (first tokens, which prefill brings, are not among them)."""
    deltas: list[TokenDelta]
    """New tokens by request; empty when the engine does not report tokens."""
    facts: list[Fact]
    """What happened to requests, in order."""
    queue_waits_ms: list[float]
    """How long each request that started in this step had waited."""
    preemptions: int
    """Requests that gave up their blocks."""
    arrivals: list[KvArrival]
    """Transfers to this engine that are complete."""
    released: list[str]
    """Requests whose blocks were kept and no longer are: taken, cancelled or expired."""
    expired: int
    """How many of those nobody came for."""

    @property
    def duration_ms(self) -> float:
        return self.ended_ms - self.started_ms


class SimulatedEngine:
    """One engine rank. Pure: the same calls with the same arguments give the same results.

    ``recorder`` is told what happens to cached blocks; ``report_tokens=False`` leaves ``StepOutcome.deltas`` empty,
    for callers that only want the facts. ``transfer`` says how KV moves between engines, ``source`` what this one is
    called in the tickets that it writes. Without ``guides`` requests that must keep to one are refused.
    """

    def __init__(
        self,
        limits: EngineLimits,
        vocabulary: Vocabulary | None = None,
        timing: TimingModel | None = None,
        recorder: CacheRecorder | None = None,
        report_tokens: bool = True,
        transfer: TransferModel | None = None,
        source: KvSource | None = None,
        takes_media: bool = False,
        guides: Guides | None = None,
    ) -> None:
        self.limits = limits
        self._guides = guides
        self._takes_media = takes_media
        self.vocabulary = vocabulary or Vocabulary()
        self._timing = timing or PolynomialTiming()
        self._pool = BlockPool(
            limits.total_kv_blocks, limits.host_kv_blocks, limits.block_size, recorder or SilentRecorder()
        )
        self._transfer = transfer or TransferModel()
        self._source = source or KvSource()
        self._scheduler = Scheduler(self._pool, limits.max_batch_size, self._transfer.kept_max)
        self._report_tokens = report_tokens
        self._sequences: dict[str, Sequence] = {}
        self._due: list[tuple[int, int, Sequence]] = []  # a heap; entries that no longer hold are skipped
        self._plans = 0
        self._moments: list[tuple[float, int, Sequence]] = []  # a heap by time; entries that no longer hold are skipped
        self._next_order = 0
        self._decode_steps = 0
        self._steps = 0
        self._deltas: list[TokenDelta] = []
        self._facts: list[Fact] = []
        self._queue_waits_ms: list[float] = []
        self._preemptions = 0
        self._arrivals: list[KvArrival] = []
        self._released: list[str] = []
        self._expired = 0

    @property
    def active_requests(self) -> int:
        """Requests accepted and not ended, kept ones included."""
        return len(self._sequences)

    @property
    def kept_transfers(self) -> int:
        return len(self._scheduler.kept)

    @property
    def next_moment_ms(self) -> float | None:
        """When ``step`` has something to do though nobody calls: a transfer is complete, or a kept one expires."""
        moments = self._moments
        while moments:
            moment_ms, _, sequence = moments[0]
            if sequence.wake_ms == moment_ms:
                return moment_ms
            heappop(moments)
        return None

    @property
    def steps(self) -> int:
        return self._steps

    def submit(
        self,
        request: Generate,
        now_ms: float,
        sequence_hashes: list[int] | None = None,
        offer: KvOffered | None = None,
        embeddings: list[Embeddings] | None = None,
        guide: TokenGuide | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        """Accept a request, or raise ``RefusedError`` and change nothing.

        A request of the decode stage needs the ``offer`` that its source made for it. ``embeddings`` stand for the
        images of a request that an encode worker has seen.
        ``sequence_hashes``, where the caller has them, are those of every whole block of the prompt, made with the
        request's own seed; they are computed otherwise. The list is read, never changed. ``guide`` and
        ``prompt_logprobs`` are the request's, where the caller has opened or made them already.
        """
        sampling = request.sampling
        isl = len(request.token_ids) // 4
        limits = self.limits
        request_id = request.request_id
        if request_id in self._sequences:
            raise RefusedError(f"request id {request_id!r} is already active on this worker")
        if isl < 1:
            raise RefusedError("the prompt has 0 tokens, allowed are integers from 1")
        if sampling.max_tokens < 1:
            raise RefusedError("max_tokens is 0, allowed are integers from 1")
        if sampling.logits_processors:
            raise UnsupportedError(
                "logits_processors are set, and the simulated engine has no logits; a TensorRT-LLM worker takes them"
            )
        if sampling.guide and self._guides is None:
            # Another worker of the model may have it.
            raise UnableError(
                f"{sampling.guide} is set, and this simulated engine cannot keep to a guide: it was not given the "
                "model's tokenizer (tokenizer_path)"
            )
        emitted = request.routing.emitted_tokens
        if emitted > isl:
            raise RefusedError(f"emitted_tokens is {emitted}, allowed are integers up to the prompt's {isl}")
        osl = 1 if request.stage is Stage.PREFILL else sampling.max_tokens
        length = isl + osl
        if length > limits.max_sequence_length:
            raise RefusedError(
                f"prompt and output are {isl} + {osl} tokens, "
                f"allowed are at most {limits.max_sequence_length} (max_sequence_length)"
            )
        blocks = -(-(length - 1) // limits.block_size)
        if blocks > limits.total_kv_blocks:
            raise RefusedError(
                f"prompt and output are {isl} + {osl} tokens and need {blocks} KV blocks, "
                f"this worker has {limits.total_kv_blocks}"
            )
        if self._scheduler.waiting_count >= limits.max_waiting_requests:
            raise BusyError(
                f"{self._scheduler.waiting_count} requests are waiting, allowed are at most "
                f"{limits.max_waiting_requests} (max_waiting_requests)"
            )
        if request.stage is Stage.PREFILL and self.kept_transfers >= self._transfer.kept_max:
            raise BusyError(
                f"the KV of {self.kept_transfers} requests is kept for decode workers, allowed are at most "
                f"{self._transfer.kept_max} (kept_transfers_max)"
            )
        if sequence_hashes is not None and len(sequence_hashes) != isl // limits.block_size:
            raise ValueError(
                f"submitting {request_id!r}: {len(sequence_hashes)} sequence hashes were given, "
                f"the prompt has {isl // limits.block_size} whole blocks"
            )
        ticket = read_ticket(request) if request.stage is Stage.DECODE else None
        marks = self._marks(request, embeddings) if ticket is None else ticket.media
        sequence = Sequence(
            request,
            self._next_order,
            now_ms,
            limits.block_size,
            self.vocabulary,
            sequence_hashes,
            marks,
            self._guides,
            guide,
            prompt_logprobs,
        )
        if ticket is not None:
            check_offer(sequence, ticket, offer or KvOffered(ticket.transfer_id, known=False))
            sequence.transfer_id = ticket.transfer_id
        elif request.stage is Stage.PREFILL:
            # The epoch makes it unique among this worker's lives, the order among its dispatches.
            sequence.transfer_id = f"{self._source.epoch}-{self._next_order}"
        self._next_order += 1
        self._sequences[request_id] = sequence
        self._scheduler.enqueue(sequence)

    def _marks(self, request: Generate, embeddings: list[Embeddings] | None) -> tuple[MediaMark, ...]:
        """Look at a request's media; raises ``RefusedError``."""
        if request.multimodal is None:
            return ()
        if not self._takes_media:
            raise UnsupportedError("the request has media, and this worker takes text only")
        media = read_media(request)
        return () if media is None else mark_media(media, embeddings)

    def prompt_logprobs(self, request: Generate) -> tuple[TokenLogprobs, ...]:
        """Return the log probabilities of a prompt without media; takes long for a long one, and touches no state."""
        sampling = request.sampling
        assert sampling.prompt_logprobs is not None, "they were asked for"
        return prompt_logprobs(self.vocabulary, b"", request.token_ids, sampling.seed, sampling.prompt_logprobs)

    def cancel(self, request_id: str) -> bool:
        """End a request now; its last delta and fact come with the next outcome. Say whether it was active.

        A kept request has had its last delta: its blocks are let go of, and only the fact follows.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.phase is Phase.KEPT:
            self._let_go(sequence, CANCELLED)
            return True
        self._deltas.append(
            TokenDelta(request_id, sequence.emitted_at(self._decode_steps), b"", finish_reason=CANCELLED)
        )
        self._end(sequence, CANCELLED)
        return True

    def offer(self, transfer_id: str, now_ms: float) -> KvOffered:
        """Return what is kept for a transfer, and keep it for the time-out from now on."""
        sequence = self._scheduler.kept.get(transfer_id)
        if sequence is None:
            return KvOffered(transfer_id, known=False)
        self._wake_at(sequence, max(sequence.wake_ms, now_ms + self._transfer.timeout_ms))
        return make_offer(sequence)

    def release(self, transfer_id: str) -> bool:
        """Let go of what is kept for a transfer; say whether there was anything."""
        sequence = self._scheduler.kept.get(transfer_id)
        if sequence is None:
            return False
        self._let_go(sequence, PREFILLED)
        return True

    def step(self, now_ms: float, horizon_ms: float | None = None) -> StepOutcome | None:
        """Run the engine from ``now_ms``; ``None`` when there is nothing to do and nothing to tell.

        One step, or with ``horizon_ms`` as many as begin before it and hold no surprise: the last of them ends where
        something happens to a request, or at the first end of a step at or after the horizon.
        """
        scheduler = self._scheduler
        decoding = scheduler.decoding
        self._pool.now_ms = now_ms
        if self._moments:
            self._pass_moments(now_ms)
        chunks, prefill_tokens = self._schedule_prefill(now_ms)
        if not chunks and not decoding:
            if not self._deltas and not self._facts:
                # Not even a released transfer: each has its fact.
                return None
            return self._outcome(now_ms, now_ms, 0, 0, 0)

        steps = 1
        duration = self._timing.prefill_ms(prefill_tokens)
        if decoding:
            pool = self._pool
            duration += self._timing.decode_ms(pool.active_blocks / pool.total_blocks)
        ended = now_ms + duration
        if decoding:
            # What a cancellation left to tell must not wait for more than one step.
            if horizon_ms is not None and not chunks and not self._facts:
                limit = self._next_due() - self._decode_steps
                moment_ms = self.next_moment_ms
                if moment_ms is not None and moment_ms < horizon_ms:
                    horizon_ms = moment_ms
                # Added up one by one, as single steps would: the same floats.
                while steps < limit and ended < horizon_ms:
                    ended += duration
                    steps += 1
            self._decode_steps += steps
        decode_tokens = steps * len(decoding)
        self._steps += steps

        if decoding and self._report_tokens:
            self._report_decoded(steps)
        self._finish_step(chunks, ended)
        return self._outcome(now_ms, ended, steps, prefill_tokens, decode_tokens)

    def load(self) -> LoadReported:
        """Return the engine's statistics as of the last step."""
        scheduler = self._scheduler
        pool = self._pool
        return LoadReported(
            running_requests=scheduler.running_count + len(scheduler.kept),
            waiting_requests=scheduler.waiting_count,
            prefill_tokens=scheduler.unprefilled_tokens,
            active_blocks=pool.active_blocks,
            cached_blocks=pool.cached_blocks,
            total_blocks=pool.total_blocks,
            steps=self._steps,
        )

    def resident_blocks(self) -> list[BlocksStored]:
        """Restate the whole cache as wire events, parents before children."""
        events: list[BlocksStored] = []
        for tier in (Tier.DEVICE, Tier.HOST):
            for parent, hashes in chains(self._pool.resident(tier)):
                events += stored_chain(parent, hashes, tier)
        return events

    def _outcome(
        self, started_ms: float, ended_ms: float, steps: int, prefill_tokens: int, decode_tokens: int
    ) -> StepOutcome:
        outcome = StepOutcome(
            started_ms,
            ended_ms,
            steps,
            prefill_tokens,
            decode_tokens,
            self._deltas,
            self._facts,
            self._queue_waits_ms,
            self._preemptions,
            self._arrivals,
            self._released,
            self._expired,
        )
        self._deltas, self._facts, self._queue_waits_ms, self._preemptions = [], [], [], 0
        self._arrivals, self._released, self._expired = [], [], 0
        return outcome

    def _pass_moments(self, now_ms: float) -> None:
        """Do what time alone brings: transfers that are complete go on, kept ones that nobody came for end."""
        moments = self._moments
        while moments and moments[0][0] <= now_ms:
            moment_ms, _, sequence = heappop(moments)
            if sequence.wake_ms != moment_ms:
                continue
            sequence.wake_ms = -1.0
            if sequence.phase is Phase.KEPT:
                self._expired += 1
                self._let_go(sequence, EXPIRED)
            else:
                self._complete_transfer(sequence)

    def _wake_at(self, sequence: Sequence, moment_ms: float) -> None:
        """Let ``_pass_moments`` see to a transferring or kept sequence at this time, and no earlier one."""
        if sequence.wake_ms == moment_ms:
            return
        sequence.wake_ms = moment_ms
        self._plans += 1
        heappush(self._moments, (moment_ms, self._plans, sequence))
        scheduler = self._scheduler
        if len(self._moments) > 4 * (len(scheduler.kept) + len(scheduler.transferring)) + 64:
            self._moments = [entry for entry in self._moments if entry[2].wake_ms == entry[0]]
            heapify(self._moments)

    def _schedule_prefill(self, now_ms: float) -> tuple[list[Sequence], int]:
        """Give the step's spare tokens to prompts; return those that get some, and the sum."""
        scheduler = self._scheduler
        spare = budget = self.limits.max_num_tokens - len(scheduler.decoding)
        chunks: list[Sequence] = []
        for sequence in scheduler.prefilling:
            if not spare:
                break
            spare -= self._compute(sequence, spare)
            chunks.append(sequence)
        while scheduler.waiting_count:
            admitted = scheduler.admit(may_compute=spare > 0)
            if admitted is None:
                break
            self._note_admission(admitted, now_ms)
            if admitted.phase is Phase.TRANSFERRING:
                self._begin_transfer(admitted, now_ms)
                continue
            spare -= self._compute(admitted, spare)
            chunks.append(admitted)
        return chunks, budget - spare

    def _compute(self, sequence: Sequence, most: int) -> int:
        chunk = min(most, sequence.target - sequence.computed)
        sequence.computed += chunk
        self._scheduler.unprefilled_tokens -= chunk
        return chunk

    def _note_admission(self, sequence: Sequence, now_ms: float) -> None:
        if sequence.started:
            self._facts.append(RequestProgressed(sequence.request_id, sequence.held_blocks()))
            return
        sequence.started = True
        sequence.cached_tokens = sequence.computed
        # A transfer leaves nothing to compute: for readers of the stream the whole prompt is there.
        cached = sequence.isl if sequence.phase is Phase.TRANSFERRING else sequence.computed
        self._queue_waits_ms.append(now_ms - sequence.arrival_ms)
        self._facts.append(RequestStarted(sequence.request_id, sequence.isl, cached, sequence.held_blocks()))

    def _begin_transfer(self, sequence: Sequence, now_ms: float) -> None:
        block_size = sequence.block_size
        sequence.present_blocks = sequence.shared
        sequence.moved_blocks = -(-sequence.isl // block_size) - sequence.shared
        sequence.transfer_ms = self._transfer.duration_ms(self._bytes_of(sequence.moved_blocks))
        self._wake_at(sequence, now_ms + sequence.transfer_ms)

    def _bytes_of(self, blocks: int) -> int:
        return blocks * self.limits.block_size * self._transfer.bytes_per_token

    def _complete_transfer(self, sequence: Sequence) -> None:
        """Go on after the first token, which came with the KV."""
        self._arrivals.append(
            KvArrival(
                sequence.request_id,
                sequence.moved_blocks,
                sequence.present_blocks,
                self._bytes_of(sequence.moved_blocks),
                sequence.transfer_ms,
            )
        )
        # Should it ever give up its blocks, it is computed here: the source is not needed again.
        sequence.stage = Stage.WHOLE
        sequence.computed = sequence.isl
        self._bring_next_token(sequence)

    def _next_due(self) -> int:
        """Return the first decode step at whose end something happens; some sequence must be decoding."""
        due = self._due
        while True:
            step, _, sequence = due[0]
            if sequence.phase is Phase.DECODING and sequence.due == step:
                return step
            heappop(due)

    def _report_decoded(self, steps: int) -> None:
        """Report the tokens of the steps just done, before anything else changes."""
        now = self._decode_steps
        append = self._deltas.append
        for sequence in self._scheduler.decoding.values():
            end = sequence.base_emitted + now - sequence.base_step
            start = end - steps
            stream = sequence.stream
            append(
                TokenDelta(
                    sequence.request_id,
                    start,
                    bytes(stream.output[4 * start : 4 * end]),
                    stream.finish_reason if stream.final == end else None,
                    error=stream.error if stream.final == end else None,
                    refusal=stream.refusal if stream.final == end else None,
                    logprobs=None if sequence.logprobs is None else stream.logprobs(start, end, sequence.logprobs),
                )
            )

    def _finish_step(self, chunks: list[Sequence], ended_ms: float) -> None:
        """Do what the step's end brings: ends first (they free blocks), then first tokens, then full blocks."""
        now = self._decode_steps
        self._pool.now_ms = ended_ms
        due = self._due
        filled: list[Sequence] = []
        while due and due[0][0] <= now:
            step, _, sequence = heappop(due)
            if sequence.phase is not Phase.DECODING or sequence.due != step:
                continue
            emitted = sequence.base_emitted = sequence.emitted_at(now)
            sequence.base_step = now
            # Marks the entry as used: a stale double of it must not count again.
            sequence.due = 0
            if sequence.stream.final == emitted:
                self._store_full_blocks(sequence)
                self._end(sequence, sequence.stream.finish_reason or CANCELLED)
            else:
                filled.append(sequence)
        for sequence in chunks:
            if sequence.computed == sequence.target:
                if sequence.stage is Stage.PREFILL:
                    self._complete_prefill_stage(sequence, ended_ms)
                else:
                    self._bring_next_token(sequence)
        for sequence in filled:
            # One of those before it may have taken its blocks.
            if sequence.phase is Phase.DECODING:
                self._store_full_blocks(sequence)
                self._grow(sequence)

    def _complete_prefill_stage(self, sequence: Sequence, ended_ms: float) -> None:
        """Deliver the one token of a prefill stage; keep the blocks unless it ends the request."""
        stream = sequence.stream
        stream.generate_to(1)
        if stream.final == 1:
            self._bring_next_token(sequence)
            return
        sequence.base_emitted = 1
        self._store_full_blocks(sequence)
        self._scheduler.keep(sequence)
        self._wake_at(sequence, ended_ms + self._transfer.timeout_ms)
        if self._report_tokens:
            self._deltas.append(
                TokenDelta(
                    sequence.request_id,
                    0,
                    bytes(stream.output[:4]),
                    PREFILLED,
                    cached_tokens=sequence.cached_tokens,
                    logprobs=None if sequence.logprobs is None else stream.logprobs(0, 1, sequence.logprobs),
                    disaggregated_params=write_ticket(sequence, self._source, self._transfer.timeout_ms),
                    prompt_logprobs=sequence.take_prompt_logprobs(),
                )
            )
        self._facts.append(PrefillCompleted(sequence.request_id))

    def _bring_next_token(self, sequence: Sequence) -> None:
        """Begin to decode (again), with the token that follows everything computed."""
        self._scheduler.begin_decoding(sequence)
        stream = sequence.stream
        position = sequence.base_emitted
        stream.generate_to(position + 1)
        sequence.base_emitted = position + 1
        sequence.base_step = self._decode_steps
        ends = stream.final == position + 1
        if self._report_tokens:
            self._deltas.append(
                TokenDelta(
                    sequence.request_id,
                    position,
                    bytes(stream.output[4 * position : 4 * position + 4]),
                    stream.finish_reason if ends else None,
                    cached_tokens=None if position else sequence.cached_tokens,
                    error=stream.error if ends else None,
                    refusal=stream.refusal if ends else None,
                    logprobs=None
                    if sequence.logprobs is None
                    else stream.logprobs(position, position + 1, sequence.logprobs),
                    prompt_logprobs=None if position else sequence.take_prompt_logprobs(),
                )
            )
        if not position:
            self._facts.append(PrefillCompleted(sequence.request_id))
        self._store_full_blocks(sequence)
        if ends:
            self._end(sequence, stream.finish_reason or CANCELLED)
        else:
            self._plan(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Give a sequence that filled a block the next one, at another's cost when there is none."""
        while not self._pool.reserve():
            victim = self._scheduler.victim()
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.private += 1
        self._facts.append(RequestProgressed(sequence.request_id, sequence.held_blocks()))
        self._plan(sequence)

    def _preempt(self, victim: Sequence) -> None:
        self._scheduler.remove(victim)
        victim.restart(self._decode_steps)
        self._scheduler.enqueue(victim)
        self._preemptions += 1
        self._facts.append(RequestProgressed(victim.request_id, 0))

    def _plan(self, sequence: Sequence) -> None:
        sequence.plan(self._decode_steps)
        # The running number keeps the heap from ever comparing two sequences.
        self._plans += 1
        heappush(self._due, (sequence.due, self._plans, sequence))
        if len(self._due) > 4 * len(self._scheduler.decoding) + 64:
            # Cancelled and preempted sequences left entries behind: keep the heap in proportion to the batch.
            self._due = [entry for entry in self._due if entry[2].phase is Phase.DECODING and entry[2].due == entry[0]]
            heapify(self._due)

    def _store_full_blocks(self, sequence: Sequence) -> None:
        full = (sequence.isl + sequence.base_emitted - 1) // sequence.block_size
        stored = sequence.shared
        if full > stored:
            sequence.name_blocks(full)
            media = sequence.media_of if sequence.touched else None
            retention = None if sequence.retention is None else sequence.retained(stored, full)
            self._pool.store(sequence.hashes, stored, full, sequence.tokens, sequence.seed, media, retention)
            sequence.shared = full
            sequence.private -= full - stored

    def _let_go(self, sequence: Sequence, reason: str) -> None:
        self._released.append(sequence.request_id)
        self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: str) -> None:
        self._scheduler.remove(sequence)
        sequence.phase = Phase.ENDED
        sequence.wake_ms = -1.0
        del self._sequences[sequence.request_id]
        self._facts.append(RequestFinished(sequence.request_id, reason))
