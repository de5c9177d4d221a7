"""Echoes: places of an answer that a later prompt shows to repeat it, wherever they stand there.

An agent that compacts its context sends the summary that it was given, behind the beginning of its old prompts: nothing
of it is where it was. So some places of an answer are chosen by their own tokens, which chooses the same ones in the
prompt. Only prompts with the same beginning find them, and what the answer quotes of its own prompt is none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.limits import SESSION_ECHOES_MAX

WINDOW_TOKENS: Final = 16
"""Of one place: a sentence, which two texts hardly have in common by accident."""

ONE_IN: Final = 64
"""Tokens for one place, on average: an answer of 500 tokens has eight, and a prompt costs so many look-ups."""

BEGINNING_BLOCKS: Final = 4
"""Which two prompts must share: the beginning of a system prompt."""

ANSWER_TOKENS_MAX: Final = 1024
"""Last ones of an answer that are looked at: clients leave out what stands before, reasoning above all."""

PROMPT_TOKENS_MAX: Final = 65_536
"""First ones of a prompt that are looked at, half a millisecond; compacted prompts are shorter."""

_FIRST, _SECOND = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
"""Odd numbers of xxHash, whose products spread over the upper bits."""
_BITS: Final = np.uint32(32 - ONE_IN.bit_length() + 1)


def echoes_of(answer: bytes, prompt: bytes, path: Sequence[int]) -> tuple[int, ...]:
    """Return the echoes of an answer to a prompt with a path; none of a short one."""
    if len(answer) < TOKEN_BYTES * ONE_IN:
        return ()
    tokens = answer[-TOKEN_BYTES * ANSWER_TOKENS_MAX :]
    found = dict.fromkeys(_hashed(each, path) for each in _windows(tokens) if each not in prompt)
    return tuple(found)[-SESSION_ECHOES_MAX:]


def heard_in(prompt: bytes, path: Sequence[int]) -> list[int]:
    """Return the hashes of all places in a prompt that may be echoes."""
    return [_hashed(each, path) for each in _windows(prompt[: TOKEN_BYTES * PROMPT_TOKENS_MAX])]


def _windows(tokens: bytes) -> Iterator[bytes]:
    ids = np.frombuffer(tokens, np.dtype("<u4"))
    size = TOKEN_BYTES * WINDOW_TOKENS
    chosen = np.flatnonzero(((ids[:-1] * _FIRST) ^ (ids[1:] * _SECOND)) >> _BITS == 0)
    for at in chosen.tolist():
        window = tokens[TOKEN_BYTES * at : TOKEN_BYTES * at + size]
        if len(window) == size:
            yield window


def _hashed(window: bytes, path: Sequence[int]) -> int:
    return xxh3_64_intdigest(window, path[min(BEGINNING_BLOCKS, len(path)) - 1])
