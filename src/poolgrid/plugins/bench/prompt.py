"""Prompts made from block ids: the same id is the same tokens (or words), in every process and every run.

A block begins with its id written out in digits of the token range, lowest first, so that blocks of different ids
always differ, however few tokens a block has as long as the digits fit. The rest comes from SplitMix64 seeded with the
id (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). A shorter block of the same id
is a prefix of the longer one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np

BLOCKS_CACHED_MAX = 16_384
"""Rendered blocks kept for reuse: about 40 MB at 512 tokens. The least recently used is rendered again when needed."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_U64_MASK = 2**64 - 1

_WORDS = (
    "able acid also area army away baby back ball band bank base bath bear beat been bell best bird blow blue boat "
    "body bone book born both bowl busy call calm came camp card care case cash cell city club coal coat code cold "
    "come cook cool copy corn cost crew crop dark data date dawn days dead deal dear debt deep door down draw drop "
    "dust duty each earn ease east easy edge else even ever face fact fair fall farm fast fear feel feet fell file "
    "film find fine fire firm fish five flat flow food foot form four free from fuel full fund gain game gate gave "
    "gift girl give glad goal goes gold gone good gray grew grow hair half hall hand hard have head hear heat held "
    "help here hero high hill hold hole home hope hour huge idea inch into iron item jack jazz join jump jury just "
    "keen keep "
)
WORDS = tuple(_WORDS.split())
"""Short words that common vocabularies hold as one token each."""


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request to send: when, which blocks its prompt is made of, and how long prompt and answer are."""

    index: int
    at_ms: float | None
    """Scheduled time since the start of the run; ``None`` in a closed loop."""
    block_ids: tuple[int, ...]
    block_tokens: int
    """Tokens per block id; the last block of the prompt has what is left of ``isl``."""
    isl: int
    """Prompt tokens (words in text mode)."""
    osl: int
    """Tokens to generate."""
    system_blocks: int = 0
    """Leading blocks that are the system prompt of a conversation."""


class WordScale(msgspec.Struct, frozen=True):
    """How a length in tokens becomes a number of words, at one endpoint."""

    tokens_per_word: float = 1.0
    overhead_tokens: int = 0
    """Tokens of the chat template around a message."""


ONE_TOKEN_A_WORD = WordScale()
"""Where the endpoint was not asked."""


def block_symbols(block_id: int, count: int, base: int) -> list[int]:
    """Return the first ``count`` symbols (each 0 to ``base`` − 1) of a block."""
    digits: list[int] = []
    rest = block_id
    while rest and len(digits) < count:
        rest, digit = divmod(rest, base)
        digits.append(digit)
    if len(digits) == count:
        return digits
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA)
    state += np.uint64(block_id & _U64_MASK)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    symbols: list[int] = (state % np.uint64(base)).tolist()
    # A short id must not look like a longer one: its digits are padded with zeros to the length of any trace id.
    width = max(len(digits), min(count, digits_of(2**32 - 1, base)))
    symbols[:width] = digits + [0] * (width - len(digits))
    return symbols


def digits_of(block_id: int, base: int) -> int:
    """Return how many symbols an id takes; a block this long differs from every other block."""
    digits = 1
    while block_id >= base:
        block_id //= base
        digits += 1
    return digits


class PromptMaker:
    """Renders planned requests as token ids, as JSON, or as words.

    ``token_id_min`` and ``token_id_max`` bound the token ids (both included); ``scale`` is the size of a word.
    """

    def __init__(self, token_id_min: int, token_id_max: int, scale: WordScale = ONE_TOKEN_A_WORD) -> None:
        self._scale = scale
        self._first = token_id_min
        self._base = token_id_max - token_id_min + 1
        if token_id_min < 0 or self._base < 2:
            raise ValueError(
                f"making prompts: token ids from {token_id_min} to {token_id_max}, "
                "allowed are ranges of at least two ids from 0 on"
            )
        self._tokens_json: Callable[[int, int], bytes] = lru_cache(BLOCKS_CACHED_MAX)(self._render_tokens)
        self._words: Callable[[int, int], str] = lru_cache(BLOCKS_CACHED_MAX)(_render_words)

    def token_ids(self, request: PlannedRequest) -> list[int]:
        tokens: list[int] = []
        for block_id, count in _spans(request):
            tokens += self._block(block_id, count)
        return tokens

    def tokens_json(self, request: PlannedRequest) -> bytes:
        return b"[" + b",".join([self._tokens_json(block_id, count) for block_id, count in _spans(request)]) + b"]"

    def text(self, request: PlannedRequest, overhead: bool = False) -> str:
        """Return the prompt as words of ``request.isl`` tokens, one space between two.

        With ``overhead`` they leave room for what a chat template adds. The system prompt is not among them.
        """
        spans = _spans(request)[request.system_blocks :]
        if overhead:
            block_id, count = spans[-1]
            spans = [*spans[:-1], (block_id, max(1, count - self._scale.overhead_tokens))]
        return self._written(spans)

    def system_text(self, request: PlannedRequest) -> str:
        return self._written(_spans(request)[: request.system_blocks])

    def _written(self, spans: Sequence[tuple[int, int]]) -> str:
        tokens = self._scale.tokens_per_word
        return " ".join([self._words(block_id, max(1, round(count / tokens))) for block_id, count in spans])

    def _block(self, block_id: int, count: int) -> list[int]:
        first = self._first
        return [first + symbol for symbol in block_symbols(block_id, count, self._base)]

    def _render_tokens(self, block_id: int, count: int) -> bytes:
        return msgspec.json.encode(self._block(block_id, count))[1:-1]


def _render_words(block_id: int, count: int) -> str:
    return " ".join([WORDS[symbol] for symbol in block_symbols(block_id, count, len(WORDS))])


def _spans(request: PlannedRequest) -> Sequence[tuple[int, int]]:
    """Block ids with the tokens each contributes."""
    size = request.block_tokens
    last = request.isl - (len(request.block_ids) - 1) * size
    return [(block_id, size) for block_id in request.block_ids[:-1]] + [(request.block_ids[-1], last)]
