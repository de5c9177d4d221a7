"""What a stream's client has, kept as it was written, and how the answer of another server continues it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from msgspec import Raw

from poolgrid.server.forwarding.continuation import ContinuationError, ContinuedStream, has_end, is_repeatable
from poolgrid.server.forwarding.event_filter import AnswerNotes, ApiForm
from poolgrid.server.forwarding.text_continuation import TextContinuation, continue_text

KEPT_BYTES_MAX: Final = 4 << 20
"""Bytes of a stream that are kept: 16,000 tokens as vLLM writes them. Reading them takes 0.1 s, once its server has
died. A longer stream is not continued."""


KEPT_TOGETHER_BYTES_MAX: Final = 256 << 20
"""Bytes that are kept of all streams together to continue them: 1,000 streams of 1,000 tokens. Beyond it the longest
streams are forgotten, which are the most work to compute again."""


class KeptStream:
    """One stream of events."""

    def __init__(
        self, form: ApiForm, path: str, values: Mapping[str, Raw], count_tokens: Callable[[str], int | None]
    ) -> None:
        """``values`` are the members of the request of ``POST path``; ``count_tokens`` returns how many tokens a text
        has, ``None`` where that is not known."""
        self._form = form
        self._path = path
        self._values = values
        self._count_tokens = count_tokens
        self._events: list[bytes] | None = []
        self._last = b""
        self.kept_bytes = 0
        self.is_continued = False
        """Whether another server's answer is to continue it."""
        self._continuation: ContinuedStream | TextContinuation | None = None

    @property
    def has_end(self) -> bool:
        """Whether the client has the end of the answer: nothing is left to continue."""
        return has_end(self._form, self._last)

    @property
    def is_forgotten(self) -> bool:
        """Whether it was too long to be kept."""
        return self._events is None

    def keep(self, events: bytes) -> None:
        """Take whole events that the client gets."""
        if not events:
            return
        self._last = events
        if self._events is not None:
            self._events.append(events)
            self.kept_bytes += len(events)
            if self.kept_bytes > KEPT_BYTES_MAX:
                self.forget()

    def forget(self) -> None:
        """Keep nothing: the stream cannot be continued."""
        self._events = None
        self.kept_bytes = 0

    def begin(self) -> None:
        """Take note that the next events are those of another server's answer to the same request."""
        self.is_continued, self._continuation = True, None

    def rest(self, events: bytes, is_end: bool = False) -> bytes:
        """Return what of another server's events the client has not.

        Raises:
            ContinuationError: They do not continue the stream.
        """
        if self._continuation is None:
            # Here, not when the server dies: many streams of a server do so at once.
            self._continuation = ContinuedStream(self._form, self._had())
        passed = self._continuation.feed(events)
        if is_end:
            self._continuation.finish()
        return passed

    def correct(self, notes: AnswerNotes) -> None:
        """Correct what another server's answer reports of itself to what the client's stream has."""
        if self._continuation is not None:
            self._continuation.correct(notes)

    def continue_text(self, differs: ContinuationError, kind: str, body: bytes) -> bytes:
        """Return the request that has a server continue the text, whose own answer differs from it.

        ``body`` is what that server got for its answer.

        Raises:
            ContinuationError: The stream cannot be continued.
        """
        if is_repeatable(self._values) or isinstance(self._continuation, TextContinuation):
            raise differs
        try:
            found = continue_text(self._path, kind, body, self._values, self._had(), self._count_tokens)
        except ContinuationError as error:
            raise ContinuationError(f"{differs}; its text is sampled, and cannot be continued: {error}") from None
        self._continuation = found
        return found.body

    def _had(self) -> bytes:
        if self._events is None:
            raise ContinuationError("too much of it was sent")
        return b"".join(self._events)


def forget_longest(streams: Collection[KeptStream], bytes_max: int) -> None:
    """Forget the longest streams until what is kept of all is within a bound."""
    kept_bytes = sum(each.kept_bytes for each in streams)
    if kept_bytes <= bytes_max:
        return
    for each in sorted(streams, key=lambda each: each.kept_bytes, reverse=True):
        kept_bytes -= each.kept_bytes
        each.forget()
        if kept_bytes <= bytes_max:
            return
