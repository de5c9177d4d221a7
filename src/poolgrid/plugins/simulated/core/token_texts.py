"""Which of the tokens that a guide allows comes next, by what the tokens of a vocabulary say.

Separate from the rest of the engine because of NumPy: a worker without guided requests never imports it, which
is a fifth of its start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poolgrid.plugins.simulated.core.next_token import GuideBroken, TokenGuide, Vocabulary

WORDS_MIN = 64
"""Free text is where at least so many different words may come next; JSON's own words are a few beginnings of three."""

WORDS_MAX = 5
"""Words or digits in a row after which a string, a number or a repetition is ended where it may end."""

REPETITION_ENDS_MAX = 64
"""Most tokens that are tried to find one that ends a repetition: a few for each punctuation mark of ASCII."""

TokenIds = np.ndarray[tuple[int], np.dtype[np.intp]]
Kinds = np.ndarray[tuple[int], np.dtype[np.uint8]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint16]]
Chosen = np.ndarray[tuple[int], np.dtype[np.bool_]]

_PLAIN, _WORD, _DIGITS, _QUOTE, _OPEN, _CLOSE, _END = range(7)
_WORD_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_DIGIT_BYTES = frozenset(b"0123456789")
_DIGITS_MAX = 2
"""Longest run of digits in one token that is chosen gladly: numbers stay readable."""
_NO_BYTE = 256
_DIGIT = np.isin(np.arange(257), list(b"0123456789"))
_IN_NUMBER = np.isin(np.arange(257), list(b"0123456789.eE+-"))
_OPENER = np.isin(np.arange(257), list(b"{["))
_QUOTE_BYTE = ord('"')


class TokenTexts:
    """What each token of a vocabulary says, as far as the choice among allowed ones goes.

    ``texts``: the bytes of each token id; special tokens have none. Ids from ``vocabulary.size`` on are never chosen.
    """

    def __init__(self, texts: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self._size = min(len(texts), vocabulary.size)
        self._end = vocabulary.eos_token_id
        if self._end >= self._size:
            raise ValueError(
                f"guiding the output: eos_token_id is {self._end}, allowed are ids below {self._size}, the number of "
                "tokens of the tokenizer and the vocabulary_size"
            )
        self._kinds = np.fromiter((_kind(text) for text in texts[: self._size]), np.uint8, self._size)
        self._kinds[self._end] = _END
        self._words = self._kinds == _WORD
        self._quotes = np.flatnonzero(self._kinds == _QUOTE)
        self._first = np.fromiter(
            (text[0] if text else _NO_BYTE for text in texts[: self._size]), np.uint16, self._size
        )
        self._opens = np.fromiter((text[-1:] in (b"{", b"[") for text in texts[: self._size]), np.bool_, self._size)

    def is_run(self, token_id: int) -> bool:
        """Return whether a token is words or digits, of which there should not be too many in a row."""
        return token_id < self._size and bool(self._kinds[token_id] in (_WORD, _DIGITS))

    def choose(self, guide: TokenGuide, digest: int, last: int | None, run: int, may_end: bool, hurry: bool) -> int:
        """Return the next token; raises ``GuideBroken`` when there is none.

        ``digest`` decides (u64); ``last`` is the token before, ``run`` how many words or digits there were in a row;
        ``may_end`` is whether the end is welcome already, ``hurry`` whether everything is to end that may.

        The end comes first, by the throw of a coin: of the answer, of a list or an object, of a string, of a number.
        Free text is made of words, numbers of few digits. Between other tokens their first bytes are drawn first, so
        that ten digits do not outweigh a quote. Where a repetition has no end of its own (``[a-z]+@``), what is no
        word and changes what may come next ends it; mostly, or two repetitions might call each other without end.
        """
        allowed = guide.allowed()
        if allowed is None:
            raise GuideBroken(guide.why())
        may_come = self._mask(allowed)
        count = int(np.count_nonzero(may_come))
        if count <= 1:
            if not count:
                raise GuideBroken("no token may follow")
            return int(may_come.argmax())
        coin, mostly, draw = digest & 1, (digest >> 1) & 3, digest >> 3
        long = hurry or run >= WORDS_MAX

        if may_come[self._end]:
            if may_end and (hurry or (last is not None and (coin or long))):
                return self._end
            may_come[self._end] = False
        # Large vocabularies: free text is nearly all of one, and is not looked at token by token.
        words = np.flatnonzero(may_come & self._words)
        if len(words) >= WORDS_MIN:
            quotes = self._quotes[may_come[self._quotes]]
            if quotes.size and run and (long or not mostly):
                return int(quotes[0])
            if long and mostly and not quotes.size:
                rest = np.flatnonzero(may_come & ~self._words & (self._kinds != _DIGITS))
                others = self._ends_of_run(guide, rest, allowed)
                if others:
                    return others[draw % len(others)]
            return int(words[draw % len(words)])
        ids: TokenIds = np.flatnonzero(may_come)
        kinds = self._kinds[ids]
        known = last if last is not None and last < self._size else self._end
        closers = ids[kinds == _CLOSE]
        if closers.size and (hurry or (not mostly if self._opens[known] else coin)):
            return int(closers[draw % len(closers)])
        first = self._first[ids]
        if self._kinds[known] == _DIGITS:
            leaving = ids[~_IN_NUMBER[first]]
            if long and not leaving.size:
                leaving = ids[~_DIGIT[first]]
            digits = ids[kinds == _DIGITS]
            if leaving.size and (coin or long or not digits.size):
                return self._drawn(leaving, draw)
            if digits.size:
                return int(digits[draw % len(digits)])
        if hurry and not _OPENER[first].all():
            ids, kinds, first = _kept(ids, kinds, first, ~_OPENER[first])
        # A string, a list or an object begins with its mark alone, a number with few digits.
        if _QUOTE in kinds:
            ids, kinds, first = _kept(ids, kinds, first, (first != _QUOTE_BYTE) | (kinds == _QUOTE))
        if _OPEN in kinds:
            ids, kinds, first = _kept(ids, kinds, first, ~_OPENER[first] | (kinds == _OPEN))
        if _DIGITS in kinds:
            ids, kinds, first = _kept(ids, kinds, first, ~_DIGIT[first] | (kinds == _DIGITS))
        return self._drawn(ids, draw)

    def _mask(self, allowed: bytes) -> Chosen:
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little", count=self._size)
        return bits.view(np.bool_)

    def _drawn(self, ids: TokenIds, draw: int) -> int:
        """Return one of ``ids``: a first byte is drawn, then one of the tokens that begin with it."""
        first = self._first[ids]
        beginnings = np.unique(first)
        these = ids[first == beginnings[draw % len(beginnings)]]
        return int(these[(draw // len(beginnings)) % len(these)])

    def _ends_of_run(self, guide: TokenGuide, ids: TokenIds, allowed: bytes) -> list[int]:
        """Return those of ``ids`` after which something else may come than now; one per first byte is tried."""
        first = self._first[ids]
        looked_at = (int(ids[first == byte][0]) for byte in np.unique(first)[:REPETITION_ENDS_MAX])
        return [token_id for token_id in looked_at if guide.after(token_id) != allowed]


def _kept(ids: TokenIds, kinds: Kinds, first: Bytes, which: Chosen) -> tuple[TokenIds, Kinds, Bytes]:
    return ids[which], kinds[which], first[which]


def _kind(text: bytes) -> int:
    if text == b'"':
        return _QUOTE
    if text in (b"[", b"{"):
        return _OPEN
    if text in (b"]", b"}"):
        return _CLOSE
    if text and _DIGIT_BYTES.issuperset(text):
        return _DIGITS if len(text) <= _DIGITS_MAX else _PLAIN
    word = text.removeprefix(b" ")
    return _WORD if word and _WORD_BYTES.issuperset(word) else _PLAIN
