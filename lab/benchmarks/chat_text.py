"""Text for chats, made from seeds: prose with punctuation, numbers, lists, code and words of several scripts.

Rules
    1. The same seed and length give the same text, in every process.
    2. ``ChatText.text`` has about as many tokens as were asked for, by the tokenizer that counts. Pieces are words and
       marks as tokenizers of today split them, so their counts add up; what a split sees otherwise is a few in a
       thousand.
    3. Words have frequencies: few are frequent and most are rare, as in any language.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

FREQUENT = (
    "the of and to a in is that it for was on are with as be this have from or had by but not what all were we when "
    "your can said there an each which she do how their if will up other about out many then them these so some her "
    "would make like him into time has look two more write go see number no way could people my than first been call "
    "who its now find long down day did get come made may part"
)
OTHER_SCRIPTS = (
    "größer naïve café Übersicht mañana coração smörgåsbord žluťoučký İstanbul данные модель запрос очередь λόγος "
    "δεδομένα 模型 缓存 请求 路由 データ 推論 東京 서버 요청 नमस्ते مرحبا שלום – — … → “yes” € ½ 🙂 🚀 👩‍💻"
)
SUFFIXES = ("ing", "ed", "ly", "ness", "able", "ward", "ization", "less", "ful", "ish", "ery", "dom", "ship", "ette")
ENDS = (".", ".", ".", ".", "?", "!", ".\n\n", ".\n\n", ":\n\n")
WEIGHT_SHIFT = 12.0
"""Zipf-Mandelbrot: the word of rank r has weight 1 / (r + shift)."""

SENTENCE_WORDS = (5, 24)
CODE_SHARE = 0.06
LIST_SHARE = 0.08
NUMBER_SHARE = 0.02
OTHER_SCRIPT_SHARE = 0.02
RARE_SHARE = 0.1
"""Words that no vocabulary has whole."""

COMMA_SHARE = 0.07
COUNTS_KEPT = 100_000
"""Pieces whose token counts are kept; the words are some thousands, numbers and lines of code are the rest."""


class ChatText:
    """Writes text of a length in tokens."""

    def __init__(self, words: Sequence[str], count_tokens: Callable[[str], int]) -> None:
        """Use these words (after the frequent ones of English), and a tokenizer's count of a text's tokens."""
        self._words = [*FREQUENT.split(), *words]
        self._other_scripts = OTHER_SCRIPTS.split()
        self._weights = list(accumulate(1 / (rank + WEIGHT_SHIFT) for rank in range(len(self._words))))
        self._count_tokens = count_tokens
        self._counts: dict[str, int] = {}

    def text(self, seed: str, tokens: int) -> str:
        """Return a text of about ``tokens`` tokens; it starts with a blank and ends with a word or a mark."""
        source = random.Random(seed)
        parts: list[str] = []
        left = tokens
        after_break = False
        while left > 0:
            pieces = self._unit(source, after_break)
            size = sum(map(self._count, pieces))
            if size > left:
                break
            parts += pieces
            left -= size
            after_break = pieces[-1].endswith("\n")
        while left > 0:
            word = f" {self._word(source)}"
            size = self._count(word)
            if size > left:
                word = " a"
                size = max(1, self._count(word))
            parts.append(word)
            left -= size
        return "".join(parts)

    def _count(self, piece: str) -> int:
        found = self._counts.get(piece)
        if found is None:
            if len(self._counts) >= COUNTS_KEPT:
                self._counts.clear()
            found = self._counts[piece] = self._count_tokens(piece)
        return found

    def _word(self, source: random.Random) -> str:
        return source.choices(self._words, cum_weights=self._weights)[0]

    def _unit(self, source: random.Random, after_break: bool) -> list[str]:
        """Return a sentence, an item of a list or a block of code, as pieces."""
        kind = source.random()
        if kind < CODE_SHARE:
            return self._code(source)
        if kind < CODE_SHARE + LIST_SHARE:
            return ["\n-", *self._sentence(source)[:-1], ".\n"]
        pieces = self._sentence(source)
        if after_break:
            pieces[0] = pieces[0].lstrip()
        return pieces

    def _sentence(self, source: random.Random) -> list[str]:
        length = source.randint(*SENTENCE_WORDS)
        words = source.choices(self._words, cum_weights=self._weights, k=length)
        pieces = [f" {words[0].capitalize()}"]
        for word in words[1:]:
            chance = source.random()
            if chance < NUMBER_SHARE:
                pieces += [" ", str(source.randrange(10 ** source.randint(1, 4)))]
            elif chance < NUMBER_SHARE + OTHER_SCRIPT_SHARE:
                pieces.append(f" {source.choice(self._other_scripts)}")
            elif chance < NUMBER_SHARE + OTHER_SCRIPT_SHARE + RARE_SHARE:
                pieces.append(f" {word}{source.choice(SUFFIXES)}")
            elif chance < NUMBER_SHARE + OTHER_SCRIPT_SHARE + RARE_SHARE + COMMA_SHARE:
                pieces += [",", f" {word}"]
            else:
                pieces.append(f" {word}")
        pieces.append(source.choice(ENDS))
        return pieces

    def _code(self, source: random.Random) -> list[str]:
        names = source.choices(self._words, cum_weights=self._weights, k=6)
        pieces = ["\n```python\n", f"def {names[0]}_{names[1]}({names[2]}, limit={source.randrange(1000)}):\n"]
        for name in names[3:]:
            indent = "    " * source.randint(1, 2)
            value = source.choice(
                (f"{names[2]}.{name}()", f"{{'{name}': limit}}", f"[{name} for {name} in {names[2]}]")
            )
            pieces.append(f"{indent}{name} = {value}  # {self._word(source)}\n")
        return [*pieces, f"    return {names[3]}\n", "```\n"]
