"""What the simulated engine generates: each next token is a function of every token before it.

Rule: the next token is read from XXH3-64 over *all* tokens so far (prompt, then output; u32 little-endian), seeded by
the request's sampling seed (0 when absent). Where the answer ends by itself is read from the same digest at its first
token (``AnswerLengths``). Nothing else enters, so

* a prompt continued on another worker (prompt + tokens so far, and how many of them are output) continues exactly where
  it stopped, and ends at the same place;
* a lost, doubled or swapped token changes everything after it, and a test sees it.

The digest is streamed: a token costs one update of 4 bytes and one digest, however long the prompt is.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import xxhash

from poolgrid.kernel.wire.hashing import TOKEN_BYTES, unpack_tokens
from poolgrid.kernel.wire.limits import LOGPROBS_MAX
from poolgrid.kernel.wire.requests import FinishReason, RefusalKind, Sampling, TokenLogprobs

MEAN_DEFAULT = 343.0
"""Mean of ``output_length`` in the trace, in tokens."""

STDDEV_DEFAULT = 250.0
"""Standard deviation of ``output_length`` in the trace, in tokens."""

TOKENS_MAX = 2**22
"""Largest mean: as long as the longest sequence that a worker takes."""

DEVIATIONS_MAX = 2.5
"""Standard deviations of the logarithm beyond which a length is cut: 1.2 % of all lengths."""

TOKENS_MIN = 2
"""Shortest answer: one token that says something, and the end of the sequence."""

_LENGTH_KEY = 0x6A09_E667_F3BC_C908
"""Any constant: lengths are drawn from other bits than tokens are."""

_u64 = struct.Struct("<Q")
_normal = NormalDist()


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """A log-normal distribution of answer lengths, as published traces have: ``mean`` and ``stddev`` in tokens, the
    end-of-sequence token included.

    The defaults are those of ``output_length`` over the 12,031 requests of Mooncake's conversation trace (Qin et al.,
    FAST 2025; ``tests/data/README.md``). With them answers have from 54 to 1,417 tokens.
    """

    mean: float = MEAN_DEFAULT
    stddev: float = STDDEV_DEFAULT

    def __post_init__(self) -> None:
        if not 0.0 < self.mean <= TOKENS_MAX:
            raise ValueError(
                f"describing answer lengths: the mean is {self.mean:g} tokens, allowed are above 0 up to {TOKENS_MAX}"
            )
        if not 0.0 <= self.stddev <= TOKENS_MAX:
            raise ValueError(
                f"describing answer lengths: the standard deviation is {self.stddev:g} tokens, "
                f"allowed are 0 to {TOKENS_MAX}"
            )

    def tokens(self, digest: int) -> int:
        """Return the length in tokens of the answer that begins at a digest (u64); the same one for the same digest."""
        drawn = xxhash.xxh3_64_intdigest(_u64.pack(digest), _LENGTH_KEY)
        # The middle of one of 2^53 equal parts: never 0 or 1, for which there is no deviation.
        share = ((drawn >> 11) + 0.5) / 2**53
        deviations = max(-DEVIATIONS_MAX, min(DEVIATIONS_MAX, _normal.inv_cdf(share)))
        variance = math.log1p((self.stddev / self.mean) ** 2)
        length = math.exp(math.log(self.mean) - variance / 2 + math.sqrt(variance) * deviations)
        return max(TOKENS_MIN, round(length))


STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH

_u32 = struct.Struct("<I")
pack_token = _u32.pack
"""One token id as u32 little-endian bytes."""
_U64 = 2**64
_EOS_BITS = 24

RANKED_MAX = LOGPROBS_MAX + 1
"""Tokens that have a log probability of their own at each position: all that may be reported as alternatives."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which token ids the simulated model can produce.

    Ordinary tokens are drawn evenly from ``words`` or, without any, from ``[first_token_id, size)``. An answer ends
    with ``eos_token_id`` where its length, drawn from ``answers``, is reached; without ``answers`` none does. With
    ``eos_probability`` above 0 each token is ``eos_token_id`` with that chance instead (resolution 2^-24).
    """

    size: int = 32_000
    first_token_id: int = 3
    eos_token_id: int = 2
    eos_probability: float = 0.0
    answers: AnswerLengths | None = None
    words: tuple[int, ...] = ()
    """Token ids whose text is tokenized to themselves again, in any order."""

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
        if self.words and not 0 <= min(self.words) <= max(self.words) < self.size:
            raise ValueError(
                f"describing a vocabulary: words are token ids {min(self.words)} to {max(self.words)}, "
                f"allowed are 0 to {self.size - 1} (the size of the vocabulary)"
            )

    @property
    def span(self) -> int:
        return len(self.words) or self.size - self.first_token_id

    def token(self, draw: int) -> int:
        """Return the ordinary token id that a number stands for; numbers wrap around."""
        words = self.words
        return words[draw % len(words)] if words else self.first_token_id + draw % (self.size - self.first_token_id)


class GuideBroken(Exception):
    """No token can be chosen any more."""


class TokenGuide(Protocol):
    """What one output must keep to, and how far it is. Pure: the same tokens lead to the same state."""

    def allowed(self) -> bytes | None:
        """Return which tokens may come next: bit i of the whole, lowest bit of a byte first, is token id i.

        The end-of-sequence token is among them where the output may end. ``None``: the guide has become too much.
        """
        ...

    def after(self, token_id: int) -> bytes | None:
        """Return what would be allowed after an allowed token; nothing changes."""
        ...

    def accept(self, token_id: int) -> bool:
        """Continue after a token; return False, and be of no further use, when it was not allowed."""
        ...

    def why(self) -> str:
        """Return why ``allowed`` or ``accept`` failed."""
        ...


class GeneratedTokens:
    """The tokens that follow one prompt, generated on demand.

    ``output`` holds what was generated so far (u32 little-endian); ``final`` is its length in tokens once the last
    token exists, and ``finish_reason`` then says why it is the last: ``stop`` (an end-of-sequence or stop token, which
    is part of the output) or ``length``. The last ``emitted`` of ``token_ids`` are the beginning of the answer.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        token_ids: bytes,
        sampling: Sampling,
        stop_token_ids: tuple[int, ...] = (),
        emitted: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        seed = (sampling.seed or 0) % _U64
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._eos_at: int | None = None
        """Position of the end-of-sequence token in the output; ``None`` = the answer does not end by itself."""
        if vocabulary.answers is None or sampling.ignore_eos:
            self._hasher = xxhash.xxh3_64(token_ids, seed=seed)
        else:
            begin = len(token_ids) - TOKEN_BYTES * emitted
            self._hasher = xxhash.xxh3_64(token_ids[:begin] if emitted else token_ids, seed=seed)
            length = vocabulary.answers.tokens(self._hasher.intdigest())
            if emitted:
                self._hasher.update(token_ids[begin:])
            self._eos_at = max(length - 1 - emitted, self._min_tokens, 0)
        self._stops = frozenset(stop_token_ids)
        self._eos_threshold = 0 if sampling.ignore_eos else int(vocabulary.eos_probability * 2**_EOS_BITS)
        self._digests: list[int] | None = None if sampling.logprobs is None else []
        self.output = bytearray()
        self.final: int | None = None
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        """What went wrong, with finish reason ``error``; only a guide can."""

    @property
    def refusal(self) -> RefusalKind | None:
        """Return what an error is: another worker would come to the same end with the guide."""
        return None if self.error is None else RefusalKind.INVALID

    def generate_to(self, count: int) -> None:
        """Generate until ``output`` holds ``count`` tokens, or its last token."""
        if self.final is not None:
            return
        have = len(self.output) >> 2
        until = min(count, self._max_tokens)
        if self._stops or self._eos_threshold or self._digests is not None:
            self._generate_watchfully(have, until)
        else:
            self._generate_freely(have, until)
        self._end_at_length()

    def _end_at_length(self) -> None:
        if self.final is None and len(self.output) >> 2 >= self._max_tokens:
            self.final = self._max_tokens
            self.finish_reason = LENGTH

    def _generate_freely(self, have: int, until: int) -> None:
        """Generate where only the length that was drawn for the answer can end it."""
        vocabulary = self._vocabulary
        eos_at = self._eos_at
        ordinary = until if eos_at is None else min(until, eos_at)
        words = vocabulary.words
        first = vocabulary.first_token_id
        span = vocabulary.span
        update = self._hasher.update
        digest = self._hasher.intdigest
        pack = _u32.pack
        output = self.output
        if words:
            for _ in range(ordinary - have):
                token = pack(words[digest() % span])
                update(token)
                output += token
        else:
            for _ in range(ordinary - have):
                token = pack(first + digest() % span)
                update(token)
                output += token
        if eos_at is not None and until > eos_at:
            output += pack(vocabulary.eos_token_id)
            self.final = eos_at + 1
            self.finish_reason = STOP

    def _generate_watchfully(self, have: int, until: int) -> None:
        """Generate one by one, watching for a token that ends the output; keep digests when they are asked for."""
        vocabulary = self._vocabulary
        hasher = self._hasher
        for position in range(have, until):
            digest = hasher.intdigest()
            token_id = vocabulary.token(digest)
            may_stop = position >= self._min_tokens
            ends = False
            if position == self._eos_at or (may_stop and digest >> (64 - _EOS_BITS) < self._eos_threshold):
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
        chosen = unpack_tokens(bytes(self.output[4 * start : 4 * end]))
        return tuple(
            TokenLogprobs(
                token_id, math.log(_likeliest(digest)), _best(self._vocabulary, digest, token_id, alternatives)
            )
            for token_id, digest in zip(chosen, self._digests[start:end], strict=True)
        )


def prompt_logprobs(
    vocabulary: Vocabulary, before: bytes, token_ids: bytes, seed: int | None, alternatives: int
) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of a prompt's tokens from the second on, as ``GeneratedTokens`` would have them.

    ``before`` is what the engine saw before the prompt; ``seed`` is the request's. A token that would have been
    generated has the same log probability that it would have had then; of the others each takes half of what is left,
    in the order of ``Vocabulary.token``, up to ``RANKED_MAX`` of them, and all further ones share the rest.
    """
    hasher = xxhash.xxh3_64(before, seed=(seed or 0) % _U64)
    span = vocabulary.span
    places = {token_id: place for place, token_id in enumerate(vocabulary.words)}
    first = vocabulary.first_token_id
    tokens = unpack_tokens(token_ids)
    report = []
    for position, token_id in enumerate(tokens):
        if position:
            digest = hasher.intdigest()
            probability = _likeliest(digest)
            if places:
                place = places.get(token_id)
            else:
                place = token_id - first if first <= token_id < vocabulary.size else None
            rank = RANKED_MAX if place is None else min((place - digest) % span, RANKED_MAX)
            own = math.log(probability)
            if rank:
                own = math.log((1.0 - probability) / 2**rank)
                if rank == RANKED_MAX:
                    own -= math.log(vocabulary.size)
            listed = _best(vocabulary, digest, vocabulary.token(digest), alternatives)
            report.append(TokenLogprobs(token_id, own, listed))
        hasher.update(token_ids[TOKEN_BYTES * position : TOKEN_BYTES * (position + 1)])
    return tuple(report)


def _likeliest(digest: int) -> float:
    """Return the invented probability of the token that is chosen at a digest: 0.5 to 1, and never 1."""
    return 0.5 + (digest >> 32) / 2**33


def _best(vocabulary: Vocabulary, digest: int, chosen: int, count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` likeliest tokens at a digest with their log probabilities, ``chosen`` first."""
    probability = _likeliest(digest)
    listed = [(chosen, math.log(probability))][:count]
    rest = 1.0 - probability
    for place in range(1, min(count, vocabulary.span)):
        rest /= 2.0
        other = vocabulary.token(digest + place)
        # A guide may have chosen one of these; then the token of the digest takes its place.
        listed.append((vocabulary.token(digest) if other == chosen else other, math.log(rest)))
    return tuple(listed)


def expected_reply(
    token_ids: bytes,
    sampling: Sampling,
    vocabulary: Vocabulary,
    stop_token_ids: tuple[int, ...] = (),
    emitted: int = 0,
) -> tuple[tuple[int, ...], str]:
    """Return the output token ids that are right for a prompt (u32 little-endian bytes), and the finish reason.

    The last ``emitted`` of ``token_ids`` are the beginning of the answer.
    """
    stream = GeneratedTokens(vocabulary, token_ids, sampling, stop_token_ids, emitted)
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
