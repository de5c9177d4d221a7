"""Guides for the simulated engine, by ``llguidance`` over the tokens of a model's tokenizer.

Nothing is loaded before the first request that must keep to a guide: others cost nothing. Reading a schema takes about
a millisecond, a huge one up to some 200, and is bounded by the limits of ``llguidance``, beyond which the request is
refused; a token takes 0.05 to 0.1 ms for a vocabulary of thousands, 0.6 for 200,000. What ``llguidance``
cannot promise to keep to (``uniqueItems``, ``not``, look-around in expressions) is refused with its reason, never
passed over.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poolgrid.kernel.wire.requests import Sampling
from poolgrid.kernel.worker_protocol.refusal import UnableError, UnsupportedError
from poolgrid.plugins.simulated.core.next_token import TokenGuide, Vocabulary
from poolgrid.server.structured_output.guide_limits import objection
from poolgrid.server.structured_output.structural_tags import error_of, matcher

if TYPE_CHECKING:
    from poolgrid.plugins.simulated.core.token_texts import TokenTexts

log = logging.getLogger(__name__)

ERROR_CHARS_MAX = 500
"""Of an error of ``llguidance``, which may print a whole grammar."""


class LazyGuides:
    """``Guides`` of the simulated engine, loaded when they are asked for first.

    ``path`` is a model directory or its ``tokenizer.json``. A tokenizer that cannot be loaded refuses guided requests
    and says why; it is tried once.
    """

    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._loaded: _Loaded | str | None = None

    @property
    def texts(self) -> TokenTexts:
        """What the tokens say; raises ``UnsupportedError`` when the tokenizer cannot be loaded."""
        return self._load("a guide").texts

    def open(self, sampling: Sampling) -> TokenGuide:
        return self._load(sampling.guide).open(sampling)

    def _load(self, guide: str) -> _Loaded:
        if self._loaded is None:
            try:
                self._loaded = _Loaded(self._path, self._vocabulary)
            except (OSError, ValueError) as error:
                self._loaded = f"the tokenizer at {self._path} cannot be used: {str(error)[:ERROR_CHARS_MAX]}"
                log.error("guided requests are refused: %s", self._loaded)
        if isinstance(self._loaded, str):
            # Another worker of the model may have one that can be used.
            raise UnableError(f"{guide} is set, and {self._loaded}")
        return self._loaded


class _Loaded:
    def __init__(self, path: Path, vocabulary: Vocabulary) -> None:
        """Load; raises ``OSError`` or ``ValueError``."""
        # Only here: a worker without guided requests does not need it in its memory.
        from llguidance import LLTokenizer

        from poolgrid.plugins.simulated.core.token_texts import TokenTexts

        file = path / "tokenizer.json" if path.is_dir() else path
        # The text and not the path, which would be taken for a name to download if there were no such file.
        text = file.read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text, eos_token=vocabulary.eos_token_id)
        self._tokenizer = tokenizer
        self.texts = TokenTexts(
            [
                b"" if tokenizer.is_special_token(token_id) else tokenizer.decode_bytes([token_id])
                for token_id in range(tokenizer.vocab_size)
            ],
            vocabulary,
        )

    def open(self, sampling: Sampling) -> TokenGuide:
        """Return the guide that a request asks for; raises ``UnsupportedError``."""
        # Front ends have looked already; a client that bypasses them must not end the process either.
        wrong = objection(sampling)
        if wrong is None:
            try:
                guide = _Guide(matcher(self._tokenizer, sampling))
                if guide.allowed() is not None:
                    return guide
                wrong = guide.why()
            except ValueError as error:
                wrong = str(error)
        raise UnsupportedError(
            f"{sampling.guide} is set, and the simulated engine cannot keep to this one: {wrong[:ERROR_CHARS_MAX]}"
        )


class _Guide:
    """``TokenGuide`` over a matcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes | None:
        """Return the bit mask of what may come next."""
        mask: bytes = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() else mask

    def after(self, token_id: int) -> bytes | None:
        """Return what would be allowed after an allowed token."""
        matcher = self._matcher
        if not matcher.consume_token(token_id):
            return None
        mask: bytes = matcher.compute_bitmask()
        matcher.rollback(1)
        return mask

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def why(self) -> str:
        return error_of(self._matcher)[:ERROR_CHARS_MAX]
