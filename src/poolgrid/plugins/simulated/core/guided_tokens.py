"""What the simulated engine generates when it must keep to a guide (a JSON schema, an expression, a grammar).

Rules
- A ``TokenGuide`` says which tokens may come next; which of them does is a function of the same digest over all tokens
  so far that unguided output comes from, of how many tokens the answer has, and of nothing else. So a request that
  continues elsewhere, or is prefilled here and decoded there, gets the same text: its constraint gets the tokens so
  far.
- The choice tends to an end, or random tokens would wander about in a string without end (``TokenTexts.choose``). It is
  a tendency and no promise: an answer that is not complete after ``max_tokens`` ends with ``length`` as any other.
- A complete answer ends, whatever ``ignore_eos`` and ``min_tokens`` say: nothing else may follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from poolgrid.kernel.wire.hashing import unpack_tokens
from poolgrid.kernel.wire.requests import FinishReason, Generate, Sampling
from poolgrid.kernel.worker_protocol.refusal import UnableError
from poolgrid.plugins.simulated.core.next_token import (
    STOP,
    GeneratedTokens,
    GuideBroken,
    TokenGuide,
    Vocabulary,
    pack_token,
)

if TYPE_CHECKING:
    from poolgrid.plugins.simulated.core.token_texts import TokenTexts


ERROR = FinishReason.ERROR

UNHURRIED_TOKENS = 160
"""After so many tokens of an answer, or half of ``max_tokens``, everything is ended that may end."""


class Guides(Protocol):
    """Makes guides for the tokens of one vocabulary."""

    @property
    def texts(self) -> TokenTexts: ...

    def open(self, sampling: Sampling) -> TokenGuide:
        """Return the guide that a request asks for; raises ``UnsupportedError`` for one that cannot be kept to."""
        ...


class GuidedTokens(GeneratedTokens):
    """The tokens that follow one prompt under a guide, generated on demand.

    ``request`` may be the continuation of an answer: the last ``routing.emitted_tokens`` of its prompt belong to it.
    Raises ``UnsupportedError`` for a guide that cannot be kept to, ``UnableError`` when what was emitted breaks it.
    """

    def __init__(
        self, vocabulary: Vocabulary, seen: bytes, request: Generate, guides: Guides, guide: TokenGuide | None = None
    ) -> None:
        emitted = request.routing.emitted_tokens
        super().__init__(vocabulary, seen, request.sampling, request.stop_token_ids, emitted)
        self._name = request.sampling.guide
        self._guide = guide or guides.open(request.sampling)
        self._texts = guides.texts
        self._last: int | None = None
        self._run = 0
        self._emitted = emitted
        self._budget = min(UNHURRIED_TOKENS, (emitted + request.sampling.max_tokens) // 2)
        for token_id in unpack_tokens(request.token_ids[len(request.token_ids) - 4 * emitted :]) if emitted else ():
            if not self._guide.accept(token_id):
                # Its generator may know better.
                raise UnableError(
                    f"{request.sampling.guide} is set, and the output so far does not keep to it: {self._guide.why()}"
                )
            self._note(token_id)

    def generate_to(self, count: int) -> None:
        if self.final is None:
            self._generate_watchfully(len(self.output) >> 2, min(count, self._max_tokens))
            self._end_at_length()

    def _generate_watchfully(self, have: int, until: int) -> None:
        end_id = self._vocabulary.eos_token_id
        for position in range(have, until):
            digest = self._hasher.intdigest()
            hurry = self._emitted + position >= self._budget
            may_end = position >= self._min_tokens
            try:
                token_id = self._texts.choose(self._guide, digest, self._last, self._run, may_end, hurry)
                ends = token_id == end_id or (may_end and token_id in self._stops)
                if not ends and not self._guide.accept(token_id):
                    raise GuideBroken(self._guide.why())
            except GuideBroken as broken:
                self.error = f"{self._name} cannot be kept to any further: {broken}"
                token_id, ends = end_id, True
            self._note(token_id)
            token = pack_token(token_id)
            self._hasher.update(token)
            self.output += token
            if self._digests is not None:
                self._digests.append(digest)
            if ends:
                self.final = position + 1
                self.finish_reason = STOP if self.error is None else ERROR
                return

    def _note(self, token_id: int) -> None:
        self._last = token_id
        self._run = self._run + 1 if self._texts.is_run(token_id) else 0
