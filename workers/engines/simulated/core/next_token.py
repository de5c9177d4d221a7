"""What the simulated engine generates: each next token is a function of every token before it.

Rule: the next token is read from XXH3-64 over *all* tokens so far (prompt, then output; u32 little-endian), seeded by
the request's sampling seed (0 when absent). Nothing else enters, so

* a prompt continued on another worker (prompt + tokens so far) goes on exactly where it stopped;
* a lost, doubled or swapped token changes everything after it, and a test sees it.

The digest is streamed: a token costs one update of 4 bytes and one digest, however long the prompt is.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import xxhash

from poolgrid.wire.hashing import unpack_tokens
from poolgrid.wire.requests import FinishReason, Sampling, TokenLogprobs

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH

_u32 = struct.Struct("<I")
pack_token = _u32.pack
"""One token id as u32 little-endian bytes."""
_U64 = 2**64
_EOS_BITS = 24


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which token ids the simulated model can produce.

    Ordinary tokens are drawn evenly from ``[first_token_id, size)``. With ``eos_probability`` above 0 each token is
    ``eos_token_id`` with that chance instead (resolution 2^-24); the request then stops.
    """

    size: int = 32_000
    first_token_id: int = 3
    eos_token_id: int = 2
    eos_probability: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.first_token_id < self.size <= 2**32:
            raise ValueError(
                f"describing a vocabulary: first_token_id is {self.first_token_id} and size {self.size}, "
                f"allowed are 0 <= first_token_id < size <= {2**32}"
            )
        if not 0.0 <= self.eos_probability <= 1.0:
            raise ValueError(
                f"describing a vocabulary: eos_probability is {self.eos_probability}, allowed are 0.0 to 1.0"
            )
        if not 0 <= self.eos_token_id < 2**32:
            raise ValueError(
                f"describing a vocabulary: eos_token_id is {self.eos_token_id}, allowed are 0 to {2**32 - 1}"
            )


class TokenStream:
    """The tokens that follow one prompt, generated on demand.

    ``output`` holds what was generated so far (u32 little-endian); ``final`` is its length in tokens once the last
    token exists, and ``finish_reason`` then says why it is the last: ``stop`` (an end-of-sequence or stop token, which
    is part of the output) or ``length``.
    """

    __slots__ = (
        "_digests",
        "_eos_threshold",
        "_hasher",
        "_max_tokens",
        "_min_tokens",
        "_stops",
        "_vocabulary",
        "error",
        "final",
        "finish_reason",
        "output",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        token_ids: bytes,
        sampling: Sampling,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._hasher = xxhash.xxh3_64(token_ids, seed=(sampling.seed or 0) % _U64)
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._stops = frozenset(stop_token_ids)
        self._eos_threshold = 0 if sampling.ignore_eos else int(vocabulary.eos_probability * 2**_EOS_BITS)
        self._digests: list[int] | None = None if sampling.logprobs is None else []
        self.output = bytearray()
        self.final: int | None = None
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        """What went wrong, with finish reason ``error``; only a guide can."""

    def generate_to(self, count: int) -> None:
        """Generate until ``output`` holds ``count`` tokens, or its last token."""
        if self.final is not None:
            return
        have = len(self.output) >> 2
        until = min(count, self._max_tokens)
        if self._stops or self._eos_threshold or self._digests is not None:
            self._generate_watchfully(have, until)
        else:
            first = self._vocabulary.first_token_id
            span = self._vocabulary.size - first
            update = self._hasher.update
            digest = self._hasher.intdigest
            pack = _u32.pack
            output = self.output
            for _ in range(until - have):
                token = pack(first + digest() % span)
                update(token)
                output += token
        self._end_at_length()

    def _end_at_length(self) -> None:
        if self.final is None and len(self.output) >> 2 >= self._max_tokens:
            self.final = self._max_tokens
            self.finish_reason = LENGTH

    def _generate_watchfully(self, have: int, until: int) -> None:
        """Generate one by one, watching for a token that ends the output; keep digests when they are asked for."""
        vocabulary = self._vocabulary
        first = vocabulary.first_token_id
        span = vocabulary.size - first
        hasher = self._hasher
        for position in range(have, until):
            digest = hasher.intdigest()
            token_id = first + digest % span
            may_stop = position >= self._min_tokens
            ends = False
            if may_stop and digest >> (64 - _EOS_BITS) < self._eos_threshold:
                token_id = vocabulary.eos_token_id
                ends = True
            elif may_stop and token_id in self._stops:
                ends = True
            token = _u32.pack(token_id)
            hasher.update(token)
            self.output += token
            if self._digests is not None:
                self._digests.append(digest)
            if ends:
                self.final = position + 1
                self.finish_reason = STOP
                return

    def logprobs(self, start: int, end: int, alternatives: int) -> tuple[TokenLogprobs, ...]:
        """Return invented but reproducible log probabilities of output tokens ``start`` to ``end``.

        The chosen token is always the likeliest (probability 0.5 to 1, from the digest) and opens the alternatives;
        each further one takes half of what is left, so the probabilities never sum to more than 1.
        """
        assert self._digests is not None, "log probabilities were not asked for when the stream began"
        first = self._vocabulary.first_token_id
        span = self._vocabulary.size - first
        report = []
        chosen = unpack_tokens(bytes(self.output[4 * start : 4 * end]))
        for token_id, digest in zip(chosen, self._digests[start:end], strict=True):
            probability = 0.5 + (digest >> 32) / 2**33
            listed = [(token_id, math.log(probability))][:alternatives]
            rest = 1.0 - probability
            for place in range(1, min(alternatives, span)):
                rest /= 2.0
                other = first + (digest + place) % span
                # A guide may have chosen one of these; then the token of the digest takes its place.
                listed.append((first + digest % span if other == token_id else other, math.log(rest)))
            report.append(TokenLogprobs(token_id, math.log(probability), tuple(listed)))
        return tuple(report)


def expected_reply(
    token_ids: bytes,
    sampling: Sampling,
    vocabulary: Vocabulary,
    stop_token_ids: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], str]:
    """Return the output token ids that are right for a prompt (u32 little-endian bytes), and the finish reason."""
    stream = TokenStream(vocabulary, token_ids, sampling, stop_token_ids)
    stream.generate_to(sampling.max_tokens)
    return unpack_tokens(bytes(stream.output)), stream.finish_reason or LENGTH


def expected_output(
    token_ids: bytes,
    sampling: Sampling,
    vocabulary: Vocabulary,
    stop_token_ids: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Return the output token ids that are right for a prompt (u32 little-endian bytes)."""
    return expected_reply(token_ids, sampling, vocabulary, stop_token_ids)[0]
