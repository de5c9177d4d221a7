"""The words that the simulated engine writes: tokens of a model's tokenizer that survive decoding and encoding.

Clients read text and may tokenize it again: to count it, or to send it back as part of a conversation, where its blocks
are in the cache only if it becomes the same tokens. So the engine writes ordinary words with a space before them, which
tokenizers look at one by one, and of those only such as come back as they were.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

WORDS_MAX = 4096
"""Words that are used, those of the lowest ids: vocabularies list the commonest first, and no text needs more."""

WORDS_MIN = 2
"""Fewer are no text: whether a token was lost would not show."""

_SPACED_WORD = re.compile("[\u0120\u2581 ][A-Za-z]{2,}")
"""A word with a space before it, as byte-level vocabularies write that, as SentencePiece does, or as it is."""


class TokenizerWords(NamedTuple):
    """What is known of a model's tokenizer."""

    words: tuple[int, ...] = ()
    size: int = 0
    """Its tokens, added ones included; 0 = it could not be read."""
    end: int | None = None
    """The token that ends an output, where the model's directory says so."""


def surviving_words(path: Path) -> tuple[int, ...]:
    """Return token ids that come back from their text, in any order; lowest first."""
    return read_words(path).words


def read_words(path: Path) -> TokenizerWords:
    """Return the words of a tokenizer that survive, and how many tokens it has.

    ``path`` is a model directory or its ``tokenizer.json``. Without words, with a warning, where the tokenizer cannot
    be read or has no such tokens. Takes some 20 ms, and 1 s for 200,000 tokens.
    """
    # Only here: a worker that was not given the model's tokenizer does not need it in its memory.
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        # The text and not the path, which would be taken for a name to download if there were no such file.
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        log.warning("the answers will not be words: the tokenizer at %s cannot be used: %s", file, str(error)[:500])
        return TokenizerWords()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = _words(tokenizer)
    if len(words) < WORDS_MIN:
        log.warning("the answers will not be words: the tokenizer at %s has no words that survive encoding", file)
        words = ()
    return TokenizerWords(words, tokenizer.get_vocab_size(), _end(file.parent))


def _end(directory: Path) -> int | None:
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return None
    first = found[0] if isinstance(found, list) and found else found
    return first if type(first) is int and first >= 0 else None


def _words(tokenizer: Tokenizer) -> tuple[int, ...]:
    added = tokenizer.get_added_tokens_decoder()
    spaced = sorted(
        token_id
        for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items()
        if token_id not in added and _SPACED_WORD.fullmatch(token)
    )
    words = []
    for token_id in spaced:
        # Twice: the first token of a text may lose its space, and what follows a word may be cut in another way.
        if _survives(tokenizer, [token_id, token_id]):
            words.append(token_id)
            if len(words) == WORDS_MAX:
                break
    return tuple(words) if _survives(tokenizer, words + words[::-1]) else ()


def _survives(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    encoded: list[int] = tokenizer.encode(tokenizer.decode(token_ids), add_special_tokens=False).ids
    return encoded == token_ids
