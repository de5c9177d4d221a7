"""One request inside the simulated engine: its tokens, its blocks and how far it is.

A request of the prefill stage ends in ``KEPT``: it runs no more, its blocks stay for the decode worker. One of the
decode stage begins in ``TRANSFERRING``: it holds blocks that fill from elsewhere, and has nothing to compute.

Positions: of ``isl`` prompt tokens and the output, the KV of a token is computed by the step *after* the one that
generated it. With ``emitted`` output tokens a decoding sequence therefore has ``isl + emitted - 1`` tokens of KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as TypingSequence
from enum import Enum

from poolgrid.kernel.wire.hashing import TOKEN_BYTES, block_hashes, hash_seed, sequence_hashes
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import Generate, TokenDelta, TokenLogprobs
from poolgrid.kernel.worker_protocol.cache_facts import retention_of
from poolgrid.plugins.simulated.core.guided_tokens import GuidedTokens, Guides
from poolgrid.plugins.simulated.core.media import MediaMark, key_of, touched_blocks
from poolgrid.plugins.simulated.core.next_token import GeneratedTokens, TokenGuide, Vocabulary, prompt_logprobs


class SequencePhase(Enum):
    """What a sequence is doing."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    KEPT = "kept"
    ENDED = "ended"


class Sequence:
    """State of one request; the scheduler and the engine change it."""

    def __init__(
        self,
        request: Generate,
        order: int,
        arrival_ms: float,
        block_size: int,
        vocabulary: Vocabulary,
        prompt_hashes: list[int] | None,
        marks: tuple[MediaMark, ...] = (),
        guides: Guides | None = None,
        guide: TokenGuide | None = None,
        made_prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.prompt = request.token_ids
        self.isl = len(request.token_ids) // TOKEN_BYTES
        self.max_tokens = request.sampling.max_tokens
        self.logprobs = request.sampling.logprobs
        self.stage = request.stage
        """``DECODE`` only until the transfer: a request that gives up its blocks after it is computed here."""
        self.order = order
        self.key = (-request.routing.priority, order)
        """Scheduling order: higher priority first, then first come."""
        self.arrival_ms = arrival_ms
        self.block_size = block_size
        self.retention = retention_of(request)
        self.seed = hash_seed(request.routing.lora_name, request.routing.cache_salt)
        self.marks = marks
        """Its media; what is generated depends on them as on the prompt."""
        self.touched = touched_blocks(marks, block_size) if marks else {}
        """The media that touch each block, by the block's position."""
        # Before the prompt: a request that moves here has output behind its prompt, and continues in the same way.
        self._emitted_before = request.routing.emitted_tokens
        self._before = key_of(marks) if marks else b""
        seen = self._before + self.prompt if marks else self.prompt
        self._vocabulary = vocabulary
        self._sampling = request.sampling
        self._made_prompt_logprobs = made_prompt_logprobs
        # A receiver of tokens of the answer has received the prompt before.
        self.owes_prompt_logprobs = (
            request.sampling.prompt_logprobs is not None
            and request.stage is not Stage.DECODE
            and not request.routing.emitted_tokens
        )
        self.stream: GeneratedTokens
        if request.sampling.guide:
            assert guides is not None, "the engine has refused a guide that it cannot keep to"
            self.stream = GuidedTokens(vocabulary, seen, request, guides, guide)
        else:
            emitted = request.routing.emitted_tokens
            self.stream = GeneratedTokens(vocabulary, seen, request.sampling, request.stop_token_ids, emitted)
        if prompt_hashes is None:
            prompt_hashes = sequence_hashes(block_hashes(self.prompt, block_size, self.seed, self.touched))
        elif len(prompt_hashes) != self.isl // block_size:
            raise ValueError(
                f"submitting {self.request_id!r}: {len(prompt_hashes)} sequence hashes were given, the prompt has "
                f"{self.isl // block_size} whole blocks"
            )
        self.hashes = prompt_hashes
        """Sequence hashes of whole blocks, prompt first; extended as the output fills blocks."""
        self.phase = SequencePhase.WAITING
        self.started = False
        self.cached_tokens = 0
        """Prompt tokens that were reused when it first started."""
        self.target = self.isl
        """Tokens to compute before the next token can be generated."""
        self.computed = 0
        self.shared = 0
        """Blocks held by name, from the front."""
        self.private = 0
        """Blocks held without a name."""
        self.base_emitted = 0
        """Output tokens emitted up to decode step ``base_step``; one more with each step since, while decoding."""
        self.base_step = 0
        self.due = 0
        """Decode step at whose end something happens to this sequence: a block is full, or it ends."""

        self.transfer_id = ""
        """Name of the hand-over of its KV, to or from this engine."""
        self.wake_ms = -1.0
        """While transferring: when the blocks are here. While kept: when they are freed."""
        self.transfer_ms = 0.0
        self.moved_blocks = 0
        self.present_blocks = 0

    def delta(self, start: int, end: int) -> TokenDelta:
        """Return output tokens ``start`` to ``end`` as they are reported; the first goes with what is said once."""
        stream = self.stream
        ends = stream.final == end
        return TokenDelta(
            self.request_id,
            start,
            bytes(stream.output[4 * start : 4 * end]),
            stream.finish_reason if ends else None,
            cached_tokens=None if start else self.cached_tokens,
            error=stream.error if ends else None,
            refusal=stream.refusal if ends else None,
            logprobs=None if self.logprobs is None else stream.logprobs(start, end, self.logprobs),
            prompt_logprobs=None if start else self.take_prompt_logprobs(),
        )

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Return the log probabilities of the prompt, once, where the request asks for them."""
        alternatives = self._sampling.prompt_logprobs
        if alternatives is None or not self.owes_prompt_logprobs:
            return None
        self.owes_prompt_logprobs = False
        if self._made_prompt_logprobs is not None:
            made, self._made_prompt_logprobs = self._made_prompt_logprobs, None
            return made
        return prompt_logprobs(self._vocabulary, self._before, self.prompt, self._sampling.seed, alternatives)

    @property
    def queued_tokens(self) -> int:
        return 0 if self.stage is Stage.DECODE else self.target

    def emitted_at(self, decode_steps: int) -> int:
        """Return how many output tokens exist after that many decode steps of the engine."""
        if self.phase is SequencePhase.DECODING:
            return self.base_emitted + decode_steps - self.base_step
        return self.base_emitted

    def held_blocks(self) -> int:
        return self.shared + self.private

    def blocks_to_prefill(self) -> int:
        """Return the blocks needed to compute ``target`` tokens and take the step after, where there is one."""
        goes_on = self.base_emitted + 1 < self.max_tokens and self.stage is not Stage.PREFILL
        return -(-(self.target + goes_on) // self.block_size)

    def restart(self, decode_steps: int) -> None:
        """Go back to waiting, with nothing computed; what was emitted becomes part of what must be prefilled."""
        self.base_emitted = self.emitted_at(decode_steps)
        self.phase = SequencePhase.WAITING
        self.target = self.isl + self.base_emitted
        self.computed = self.shared = self.private = 0
        self.name_blocks(self.target // self.block_size)

    def plan(self, decode_steps: int) -> None:
        """Generate up to the end of the block being filled, or of the output, and note when that is due."""
        emitted = self.base_emitted
        filled = (self.isl + emitted - 1) % self.block_size
        until = emitted + self.block_size - filled
        stream = self.stream
        stream.generate_to(until)
        final = stream.final
        self.base_step = decode_steps
        self.due = decode_steps + (until if final is None or final > until else final) - emitted

    def name_blocks(self, count: int) -> None:
        """Extend ``hashes`` to the first ``count`` blocks, whose tokens must all exist."""
        have = len(self.hashes)
        if have >= count:
            return
        # A new list: the caller of ``submit`` may share the prompt's between requests.
        parent = self.hashes[-1] if have else None
        fresh = block_hashes(self.tokens(have, count), self.block_size, self.seed, self.media_of(have, count))
        self.hashes = self.hashes + sequence_hashes(fresh, parent)

    def retained(self, start: int, end: int) -> list[tuple[int | None, int | None]] | None:
        """Return what its request says of how long its blocks ``start`` to ``end`` stay cached; ``None`` = nothing."""
        if self.retention is None:
            return None
        return self.retention.of_blocks(self.block_size, start, end, self.isl - self._emitted_before)

    def media_of(self, first_block: int, end_block: int) -> Mapping[int, TypingSequence[int]]:
        return {at - first_block: hashes for at, hashes in self.touched.items() if first_block <= at < end_block}

    def tokens(self, first_block: int, end_block: int) -> bytes:
        """Return the token ids of a range of blocks, over prompt and output."""
        stride = TOKEN_BYTES * self.block_size
        start, end = first_block * stride, end_block * stride
        edge = len(self.prompt)
        if end <= edge:
            return self.prompt[start:end]
        if start >= edge:
            return bytes(self.stream.output[start - edge : end - edge])
        return self.prompt[start:] + bytes(self.stream.output[: end - edge])
