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
it holds blocks of its own that fill during other requests' steps, and decodes from the first step that begins
after that. Both end at moments that no step of this engine brings about: ``next_moment_ms`` says when to call again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from poolgrid.kernel.wire.events import (
    BlocksStored,
    LoadReported,
    PrefillCompleted,
    RequestFinished,
    RequestProgressed,
    RequestStarted,
)
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import FinishReason, Generate, KvOffered, TokenDelta, TokenLogprobs
from poolgrid.kernel.worker_protocol.kv_fetches import KvArrival
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnableError, UnsupportedError
from poolgrid.plugins.simulated.core.block_pool import BlockPool
from poolgrid.plugins.simulated.core.guided_tokens import Guides
from poolgrid.plugins.simulated.core.kv_groups import CacheRecorder, SimulatedGroup
from poolgrid.plugins.simulated.core.kv_transfer import (
    KvSource,
    TransferModel,
    check_offer,
    make_offer,
    read_ticket,
    write_ticket,
)
from poolgrid.plugins.simulated.core.media import Embeddings, marks_of
from poolgrid.plugins.simulated.core.next_token import TokenGuide, Vocabulary, prompt_logprobs
from poolgrid.plugins.simulated.core.scheduler import Calendar, Scheduler
from poolgrid.plugins.simulated.core.sequence import Sequence, SequencePhase
from poolgrid.server.workers.timing import PolynomialTiming, TimingModel

Fact = RequestStarted | PrefillCompleted | RequestProgressed | RequestFinished

CANCELLED = FinishReason.CANCELLED
PREFILLED = FinishReason.PREFILLED
"""Finish reason of a prefill leg whose request continues elsewhere; of the request here, once its KV was taken."""
EXPIRED = FinishReason.EXPIRED
"""The KV of a prefill leg was never fetched."""


@dataclass(frozen=True, slots=True)
class SimulatedLimits:
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
    kv_groups: tuple[SimulatedGroup, ...] = ()
    """KV groups of the model besides full attention."""

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

    started_ms: float = 0.0
    ended_ms: float = 0.0
    steps: int = 0
    """Engine steps covered: 1, or more when the caller allowed a horizon; 0 when there were only facts to tell."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    decode_tokens: int = 0
    """Tokens generated by decoding (first tokens, which prefill brings, are not among them)."""
    deltas: list[TokenDelta] = field(default_factory=list)
    """New tokens by request; empty when the engine does not report tokens."""
    facts: list[Fact] = field(default_factory=list)
    """What happened to requests, in order."""
    queue_waits_ms: list[float] = field(default_factory=list)
    """How long each request that started in this step had waited."""
    preemptions: int = 0
    """Requests that gave up their blocks."""
    arrivals: list[KvArrival] = field(default_factory=list)
    """Transfers to this engine that are complete."""
    released: list[str] = field(default_factory=list)
    """Requests whose blocks were kept and no longer are: taken, cancelled or expired."""
    expired: int = 0
    """How many of those were never fetched."""

    @property
    def duration_ms(self) -> float:
        return self.ended_ms - self.started_ms


def check_request(request: Generate, limits: SimulatedLimits, has_guides: bool) -> None:
    """Raise ``RefusedError`` for a request that an engine with these limits can never serve."""
    sampling = request.sampling
    isl = len(request.token_ids) // 4
    if isl < 1:
        raise RefusedError("the prompt has 0 tokens, allowed are integers from 1")
    if sampling.max_tokens < 1:
        raise RefusedError("max_tokens is 0, allowed are integers from 1")
    if sampling.logits_processors:
        raise UnsupportedError(
            "logits_processors are set, and the simulated engine has no logits; a TensorRT-LLM worker takes them"
        )
    if sampling.guide and not has_guides:
        # Another worker of the model may have it.
        raise UnableError(
            f"{sampling.guide} is set, and this simulated engine cannot keep to a guide: it was not given the "
            "model's tokenizer (model_path)"
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


class SimulatedEngine:
    """One engine rank. Pure: the same calls with the same arguments give the same results.

    ``recorder`` gets what happens to cached blocks; ``report_tokens=False`` leaves ``StepOutcome.deltas`` empty,
    for callers that only want the facts. ``transfer`` says how KV moves between engines, ``source`` what this one is
    called in the tickets that it writes. Without ``guides`` requests that must keep to one are refused.
    """

    def __init__(
        self,
        limits: SimulatedLimits,
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
            limits.total_kv_blocks,
            limits.host_kv_blocks,
            limits.block_size,
            recorder or CacheRecorder(),
            limits.kv_groups,
        )
        self._transfer = transfer or TransferModel()
        self._source = source or KvSource()
        self._scheduler = Scheduler(self._pool, limits.max_batch_size, self._transfer.kept_max)
        self._report_tokens = report_tokens
        self._sequences: dict[str, Sequence] = {}
        self._due = Calendar(lambda step, sequence: sequence.phase is SequencePhase.DECODING and sequence.due == step)
        """By decode step: when a block is full, or the output ends."""
        self._moments = Calendar(lambda moment_ms, sequence: sequence.wake_ms == moment_ms)
        """By time: when a transfer is complete, or a kept one expires."""
        self._next_order = 0
        self._decode_steps = 0
        self.steps = 0
        self._next = StepOutcome()
        """What is to be told with the next outcome."""

    @property
    def active_requests(self) -> int:
        return len(self._sequences)

    @property
    def kept_transfers(self) -> int:
        return len(self._scheduler.kept)

    @property
    def next_moment_ms(self) -> float | None:
        """When ``step`` has work without a call: a transfer is complete, or a kept one expires."""
        return self._moments.first()

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
        request_id = request.request_id
        if request_id in self._sequences:
            raise RefusedError(f"request id {request_id!r} is already active on this worker")
        check_request(request, self.limits, self._guides is not None)
        self._scheduler.check_room(request.stage, self.limits.max_waiting_requests)
        ticket = read_ticket(request) if request.stage is Stage.DECODE else None
        marks = marks_of(request, embeddings, self._takes_media) if ticket is None else ticket.media
        sequence = Sequence(
            request,
            self._next_order,
            now_ms,
            self.limits.block_size,
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

    def prompt_logprobs(self, request: Generate) -> tuple[TokenLogprobs, ...]:
        """Return the log probabilities of a prompt without media; takes long for a long one, and touches no state."""
        sampling = request.sampling
        assert sampling.prompt_logprobs is not None, "they were asked for"
        return prompt_logprobs(self.vocabulary, b"", request.token_ids, sampling.seed, sampling.prompt_logprobs)

    def cancel(self, request_id: str) -> bool:
        """End a request now; its last delta and fact come with the next outcome. Say whether it was active.

        A kept request has had its last delta: its blocks are freed, and only the fact follows.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.phase is SequencePhase.KEPT:
            self._let_go(sequence, CANCELLED)
            return True
        self._next.deltas.append(
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
        self._pass_moments(now_ms)
        chunks, prefill_tokens = self._schedule_prefill(now_ms)
        if not chunks and not decoding:
            if not self._next.deltas and not self._next.facts:
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
            if horizon_ms is not None and not chunks and not self._next.facts:
                due = self._due.first()
                assert due is not None, "some sequence is decoding"
                limit = due - self._decode_steps
                moment_ms = self.next_moment_ms
                if moment_ms is not None and moment_ms < horizon_ms:
                    horizon_ms = moment_ms
                # Added up one by one, as single steps would: the same floats.
                while steps < limit and ended < horizon_ms:
                    ended += duration
                    steps += 1
            self._decode_steps += steps
        decode_tokens = steps * len(decoding)
        self.steps += steps
        if decoding and self._report_tokens:
            self._report_decoded(steps)
        self._finish_step(chunks, ended)
        return self._outcome(now_ms, ended, steps, prefill_tokens, decode_tokens)

    def load(self) -> LoadReported:
        scheduler = self._scheduler
        pool = self._pool
        return LoadReported(
            running_requests=scheduler.running_count + len(scheduler.kept),
            waiting_requests=scheduler.waiting_count,
            prefill_tokens=scheduler.unprefilled_tokens,
            active_blocks=pool.active_blocks,
            cached_blocks=pool.cached_blocks,
            total_blocks=pool.total_blocks,
            steps=self.steps,
        )

    def resident_blocks(self) -> list[BlocksStored]:
        return self._pool.restate()

    def _outcome(
        self, started_ms: float, ended_ms: float, steps: int, prefill_tokens: int, decode_tokens: int
    ) -> StepOutcome:
        outcome, self._next = self._next, StepOutcome()
        outcome.started_ms, outcome.ended_ms, outcome.steps = started_ms, ended_ms, steps
        outcome.prefill_tokens, outcome.decode_tokens = prefill_tokens, decode_tokens
        return outcome

    def _pass_moments(self, now_ms: float) -> None:
        """Do what time alone brings: complete transfers continue, kept ones that were never fetched end."""
        while (sequence := self._moments.pop(now_ms)) is not None:
            sequence.wake_ms = -1.0
            if sequence.phase is SequencePhase.KEPT:
                self._next.expired += 1
                self._let_go(sequence, EXPIRED)
            else:
                self._complete_transfer(sequence)

    def _wake_at(self, sequence: Sequence, moment_ms: float) -> None:
        """Let ``_pass_moments`` see to a transferring or kept sequence at this time, and no earlier one."""
        if sequence.wake_ms == moment_ms:
            return
        sequence.wake_ms = moment_ms
        scheduler = self._scheduler
        self._moments.push(moment_ms, sequence, len(scheduler.kept) + len(scheduler.transferring))

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
            if admitted.phase is SequencePhase.TRANSFERRING:
                admitted.present_blocks = admitted.shared
                admitted.moved_blocks = -(-admitted.isl // admitted.block_size) - admitted.shared
                admitted.transfer_ms = self._transfer.duration_ms(self._transfer.bytes_of(admitted))
                self._wake_at(admitted, now_ms + admitted.transfer_ms)
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
            self._next.facts.append(RequestProgressed(sequence.request_id, sequence.held_blocks()))
            return
        sequence.started = True
        sequence.cached_tokens = sequence.computed
        # A transfer leaves nothing to compute: for readers of the stream the whole prompt is there.
        cached = sequence.isl if sequence.phase is SequencePhase.TRANSFERRING else sequence.computed
        self._next.queue_waits_ms.append(now_ms - sequence.arrival_ms)
        self._next.facts.append(RequestStarted(sequence.request_id, sequence.isl, cached, sequence.held_blocks()))

    def _complete_transfer(self, sequence: Sequence) -> None:
        """Continue after the first token, which came with the KV."""
        self._next.arrivals.append(
            KvArrival(
                sequence.request_id,
                sequence.moved_blocks,
                sequence.present_blocks,
                self._transfer.bytes_of(sequence),
                sequence.transfer_ms,
            )
        )
        # Should it ever give up its blocks, it is computed here: the source is not needed again.
        sequence.stage = Stage.WHOLE
        sequence.computed = sequence.isl
        self._bring_next_token(sequence)

    def _report_decoded(self, steps: int) -> None:
        """Report the tokens of the steps just done, before anything else changes."""
        now = self._decode_steps
        append = self._next.deltas.append
        for sequence in self._scheduler.decoding.values():
            end = sequence.base_emitted + now - sequence.base_step
            append(sequence.delta(end - steps, end))

    def _finish_step(self, chunks: list[Sequence], ended_ms: float) -> None:
        """Do what the step's end brings: ends first (they free blocks), then first tokens, then full blocks."""
        now = self._decode_steps
        self._pool.now_ms = ended_ms
        filled: list[Sequence] = []
        while (sequence := self._due.pop(now)) is not None:
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
            if sequence.phase is SequencePhase.DECODING:
                self._store_full_blocks(sequence)
                self._grow(sequence)

    def _complete_prefill_stage(self, sequence: Sequence, ended_ms: float) -> None:
        """Deliver the one token of a prefill stage; keep the blocks unless it ends the request."""
        sequence.stream.generate_to(1)
        if sequence.stream.final == 1:
            self._bring_next_token(sequence)
            return
        sequence.base_emitted = 1
        self._store_full_blocks(sequence)
        self._scheduler.keep(sequence)
        self._wake_at(sequence, ended_ms + self._transfer.timeout_ms)
        if self._report_tokens:
            ticket = write_ticket(sequence, self._source, self._transfer.timeout_ms)
            delta = structs.replace(sequence.delta(0, 1), finish_reason=PREFILLED, disaggregated_params=ticket)
            self._next.deltas.append(delta)
        self._next.facts.append(PrefillCompleted(sequence.request_id))

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
            self._next.deltas.append(sequence.delta(position, position + 1))
        if not position:
            self._next.facts.append(PrefillCompleted(sequence.request_id))
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
        self._next.facts.append(RequestProgressed(sequence.request_id, sequence.held_blocks()))
        self._plan(sequence)

    def _preempt(self, victim: Sequence) -> None:
        self._scheduler.remove(victim)
        victim.restart(self._decode_steps)
        self._scheduler.enqueue(victim)
        self._next.preemptions += 1
        self._next.facts.append(RequestProgressed(victim.request_id, 0))

    def _plan(self, sequence: Sequence) -> None:
        sequence.plan(self._decode_steps)
        self._due.push(sequence.due, sequence, len(self._scheduler.decoding))

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
        self._next.released.append(sequence.request_id)
        self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: str) -> None:
        self._scheduler.remove(sequence)
        sequence.phase = SequencePhase.ENDED
        sequence.wake_ms = -1.0
        del self._sequences[sequence.request_id]
        self._next.facts.append(RequestFinished(sequence.request_id, reason))
