"""One sequence on its way to the client: deltas of token ids in, text and finish reason out.

Three ways, by what the request needs, cheapest first:

- collected: nothing reads it before the end and there are no stop strings: token bytes are gathered and decoded once;
- by delta: all new tokens of a wake-up are decoded together;
- by token: stop strings or log probabilities: the token at which a stop string completes is known, so usage and text do
  not depend on how the engine's tokens were batched.

The text of a token that stopped the sequence (end of sequence or ``stop_token_ids``) is not part of the output, nor is
a character at the end of which some bytes are missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from poolgrid.kernel.requests.inference import InferenceRequest, StreamDelta, TokenStream
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, unpack_tokens
from poolgrid.kernel.wire.requests import TokenLogprobs
from poolgrid.server.frontend.answer_pieces import OutputParser
from poolgrid.server.frontend.detokenization import REPLACEMENT, Detokenizer
from poolgrid.server.frontend.prompt_model import PromptModel
from poolgrid.server.frontend.stop_strings import StoppedContent, StoppedPieces, StopStrings


class PlacedLogprobs(NamedTuple):
    """Log probabilities of one output token and where its text begins in the output."""

    token: TokenLogprobs
    """Of the first token of a prompt that is repeated, which nothing precedes, the log probability is NaN."""
    text_offset: int


_NO_FAILURE: Final = StreamDelta(b"")

ENDED_WELL: Final = ("stop", "length")
"""Finish reasons of a whole answer."""


class RequestOutput:
    """What has come of one request to the router."""

    # Most of it stays as it is here until the first output.
    stream: TokenStream | None = None
    completion_tokens = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None
    """``stop``, ``length`` or ``error`` once it has ended, ``cancelled`` when the client gave it up."""
    error: str | None = None
    failure = _NO_FAILURE
    """With the finish reason ``error``: the router's reason."""
    last_token_at_ms: float | None = None
    first_token_at_ms = 0.0
    first_tokens = 0
    """Tokens that came first, all at once."""
    index: int
    request: InferenceRequest

    @property
    def work(self) -> str:
        """What is done for the client, as errors name it."""
        return f"generating choice {self.index}"

    def _fail(self, message: str) -> None:
        self.finish_reason = "error"
        self.error = message

    def _fail_by(self, last: StreamDelta) -> None:
        """Take an end that is none of an answer's."""
        if last.finish_reason == "cancelled":
            self._fail(last.error or "the request was cancelled by the server")
        else:
            self._fail(last.error or f"the engine ended the request with {last.finish_reason}")
            self.failure = last


class SequenceOutput(RequestOutput):
    """State of one choice: what the client has not been sent yet, and the counts for ``usage``."""

    started = False
    """Whether a chunk of this choice has been written."""
    stopped_here = False
    """Whether the sequence ended here and not at its worker, which must be told: a stop string was found, or the worker
    left out what was asked for."""

    def __init__(
        self,
        index: int,
        request: InferenceRequest,
        model: PromptModel,
        stops: Sequence[str],
        *,
        collect: bool,
        echo: str = "",
        prompt_only: bool = False,
        parser: OutputParser | None = None,
    ) -> None:
        """``echo`` is the prompt where the text repeats it; with ``prompt_only`` it has no token of the output.
        ``parser`` finds the content, in which alone the stop strings of a parsed answer are searched for."""
        self.index = index
        self.request = request
        sampling = request.sampling
        self.text = echo
        """Text that the client has not been sent."""
        self.new_logprobs: list[PlacedLogprobs] = []
        self.text_length = len(echo)
        self._model = model
        self._logprobs = sampling.logprobs is not None
        self._prompt_only = prompt_only
        self._prompt_logprobs_due = sampling.prompt_logprobs is not None
        self._stops = StopStrings(stops) if stops else None
        self._content: StoppedContent | None = None
        self.pieces: StoppedPieces | None = None
        """What encoders read in place of the text, which continues after a stop string."""
        if parser is not None and self._stops is not None:
            self._content = StoppedContent(parser, self._stops)
            self.pieces = StoppedPieces(self._content)
        self._by_token = self._logprobs or self._stops is not None
        self._detokenizer: Detokenizer = model.detokenizer(request.token_ids)
        self._collected: list[bytes] | None = [] if collect and not self._by_token else None

    @property
    def matched_stop(self) -> str | None:
        return None if self._stops is None else self._stops.matched

    def waits_for_end(self) -> bool:
        """Return whether nothing becomes of its tokens before the last of them: only the first is waited for."""
        return self._collected is not None and self.last_token_at_ms is not None

    def absorb(self, deltas: Sequence[StreamDelta]) -> int:
        """Take what arrived since the last call and return how many output tokens that was."""
        if self._prompt_only:
            deltas = [_without_output(delta) for delta in deltas]
        before = self.completion_tokens
        for delta in deltas:
            if self._prompt_logprobs_due and (delta.prompt_logprobs is not None or delta.finish_reason in ENDED_WELL):
                self._place_prompt_logprobs(delta.prompt_logprobs)
                if self.finish_reason is not None:
                    break
            if self.cached_tokens is None:
                self.cached_tokens = delta.cached_tokens
            packed = delta.token_ids
            if self._by_token:
                self._take_tokens(delta)
                if self.finish_reason is not None:
                    break
            elif packed:
                self.completion_tokens += len(packed) // TOKEN_BYTES
                if delta.finish_reason == "stop" and self._ends_with_stop_token(packed):
                    packed = packed[:-TOKEN_BYTES]
                if self._collected is not None:
                    self._collected.append(packed)
                else:
                    self.text += self._detokenizer.feed(unpack_tokens(packed))
            if delta.finish_reason is not None:
                self._finish(delta)
        if not deltas:
            self._fail("the router ended the stream without a finish reason")
        return self.completion_tokens - before

    def take_text(self) -> str:
        """Return the text for the next chunk and forget it."""
        text, self.text = self.text, ""
        return text

    def take_logprobs(self) -> Sequence[PlacedLogprobs]:
        """Return the log probabilities for the next chunk and forget them."""
        taken = self.new_logprobs
        if taken:
            self.new_logprobs = []
        return taken

    def _place_prompt_logprobs(self, given: Sequence[TokenLogprobs] | None) -> None:
        """Put the prompt's log probabilities before those of the output: the text repeats the prompt (``echo``)."""
        self._prompt_logprobs_due = False
        token_ids = unpack_tokens(self.request.token_ids)
        if given is None or len(given) != len(token_ids) - 1:
            self._fail("the worker did not report log probabilities of the prompt")
            self.stopped_here = True
            return
        detokenizer = self._model.detokenizer()
        offset = 0
        placed: list[PlacedLogprobs] = []
        for token_id, logprobs in zip(token_ids, (TokenLogprobs(token_ids[0], math.nan), *given), strict=True):
            placed.append(PlacedLogprobs(logprobs, offset))
            offset += len(detokenizer.feed((token_id,)))
        self.new_logprobs = [*placed, *self.new_logprobs]

    def _take_tokens(self, delta: StreamDelta) -> None:
        token_ids = unpack_tokens(delta.token_ids)
        logprobs = delta.logprobs or ()
        silent = (
            len(token_ids) - 1 if delta.finish_reason == "stop" and self._ends_with_stop_token(delta.token_ids) else -1
        )
        for position, token_id in enumerate(token_ids):
            self.completion_tokens += 1
            if self._logprobs and position < len(logprobs):
                self.new_logprobs.append(PlacedLogprobs(logprobs[position], self.text_length))
            if position != silent:
                self._show(self._detokenizer.feed((token_id,)))
                if self.stopped_here:
                    self.finish_reason = "stop"
                    return

    def _show(self, text: str) -> None:
        self.text_length += len(text)
        if self._content is not None:
            self._content.feed(text, self._searches)
        elif self._stops is not None and self._searches:
            text = self._stops.feed(text)
        self.text += text
        self._note_stop()

    @property
    def _searches(self) -> bool:
        return self.completion_tokens > self.request.sampling.min_tokens

    def _note_stop(self) -> None:
        if self._stops is not None and self._stops.matched is not None:
            self.stopped_here = True

    def _finish(self, delta: StreamDelta) -> None:
        reason = delta.finish_reason
        if reason in ENDED_WELL:
            if self._collected is not None:
                self.text += self._detokenizer.feed(unpack_tokens(b"".join(self._collected)))
            # Half a character is left out: clients would keep the mark in its place in their history.
            rest = self._detokenizer.flush().rstrip(REPLACEMENT)
            if rest:
                self._show(rest)
            if self._content is not None:
                self._content.end(self._searches)
            elif self._stops is not None:
                self.text += self._stops.flush()
            self._note_stop()
            self.finish_reason = "stop" if self.stopped_here else reason
        else:
            self._fail_by(delta)

    def _ends_with_stop_token(self, packed: bytes) -> bool:
        return int.from_bytes(packed[-TOKEN_BYTES:], "little") in self.request.stop_token_ids


def _without_output(delta: StreamDelta) -> StreamDelta:
    """Return a delta without its tokens, as if none had been asked for."""
    reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
    return replace(delta, token_ids=b"", logprobs=None, finish_reason=reason)
