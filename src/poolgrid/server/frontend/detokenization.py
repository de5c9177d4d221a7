"""Turn token ids into text piece by piece, so that the pieces together are the text of the whole.

Two ways, chosen per tokenizer when the model is loaded:

``ByteLevelDetokenizer``  for byte-level BPE: every token is a known run of bytes; the bytes go through an incremental
                          UTF-8 decoder, which keeps an unfinished character to itself. Exact for every sequence,
                          cut anywhere.
``WindowDetokenizer``     for everything else (SentencePiece style, WordPiece): the tokenizer decodes a window of the
                          last tokens with and without the new ones, and the difference is the new text. Beginning
                          the window with the end of the prompt keeps the space that a decoder strips from the start
                          of a text. Exact but for runs of byte tokens that make no character: a byte-fallback decoder
                          judges a run as a whole, and a stream cannot take back what it has shown.

A step costs time in proportion to the new tokens (and the window of the step before), never to the whole text.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"

UNFINISHED_TOKENS_MAX: Final = 16
"""Tokens that a window waits for an unfinished character: a UTF-8 character has 4 bytes, so 16 byte tokens that make
none are output that no further token will repair."""

CONTEXT_TOKENS: Final = 6
"""Prompt tokens that a window begins with; more than the parts of any one character."""

_incremental_utf8: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one sequence, piece by piece."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that is certain now (maybe none)."""
        ...

    def flush(self) -> str:
        """Return what an unfinished character at the end comes to; nothing is fed afterwards."""
        ...


class ByteLevelDetokenizer:
    """Exact incremental decoding for tokenizers whose tokens are runs of bytes.

    ``table`` maps a token id to its bytes; special tokens are empty, and so is an id that the table does not have.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder: codecs.BufferedIncrementalDecoder | None = None
        """Keeps an unfinished character; there is none before the first."""

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        try:
            raw = table[token_ids[0]] if len(token_ids) == 1 else b"".join(map(table.__getitem__, token_ids))
        except IndexError:
            size = len(table)
            raw = b"".join([table[token_id] for token_id in token_ids if token_id < size])
        # Whole characters after whole characters, as nearly always, need no memory; asking for them is much quicker.
        decoder = self._decoder
        if decoder is None or not decoder.buffer:
            try:
                return raw.decode()
            except UnicodeDecodeError:
                pass
        if decoder is None:
            decoder = self._decoder = _incremental_utf8("replace")
        return decoder.decode(raw)

    def flush(self) -> str:
        """Return the replacement character of an unfinished one, or nothing."""
        return "" if self._decoder is None else self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Incremental decoding through the tokenizer's own decoder. ``context`` is the end of the prompt."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(context)
        self._known = len(self._window)
        """How many tokens of the window the text so far includes."""
        self._window_text = self._text(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        window = self._window
        window.extend(token_ids)
        text = self._text(window)
        if self._is_finished(text):
            return self._advance(text)
        # Of several new tokens the first may be certain, though the last are a part of a character.
        for unfinished in range(1, min(len(token_ids), UNFINISHED_TOKENS_MAX)):
            certain = self._text(window[:-unfinished])
            if self._is_finished(certain):
                rest = window[-unfinished:]
                del window[-unfinished:]
                new = self._advance(certain)
                window.extend(rest)
                return new
        return "" if len(window) - self._known < UNFINISHED_TOKENS_MAX else self._advance(text)

    def flush(self) -> str:
        return self._advance(self._text(self._window))

    def _is_finished(self, text: str) -> bool:
        return len(text) > len(self._window_text) and not text.endswith(REPLACEMENT)

    def _advance(self, text: str) -> str:
        new = text[len(self._window_text) :]
        del self._window[: self._known]
        self._known = len(self._window)
        self._window_text = self._text(self._window)
        return new

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""


@dataclass(slots=True, eq=False)
class MarkedDetokenizer:
    """Shows some special tokens by their text, which the detokenizer inside leaves out."""

    _inside: Detokenizer
    _markers: Mapping[int, str]

    def feed(self, token_ids: Sequence[int]) -> str:
        markers = self._markers
        begin = 0
        text = ""
        for position, token_id in enumerate(token_ids):
            marker = markers.get(token_id)
            if marker is not None:
                text += self._inside.feed(token_ids[begin:position]) + self._inside.flush() + marker
                begin = position + 1
        return text + self._inside.feed(token_ids[begin:])

    def flush(self) -> str:
        return self._inside.flush()


def byte_level_alphabet() -> dict[str, int]:
    """Return the bytes behind the characters of byte-level BPE vocabularies.

    GPT-2's table: printable bytes stand for themselves, the other 68 for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    shown = set(printable)
    others = [byte for byte in range(256) if byte not in shown]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
