"""How many bytes of media this process holds for requests in flight, and no more.

A request takes a ``MediaLease``, adds to it what arrives, and closes it when its answer has ended. An addition that
would exceed the budget is refused (429): nothing waits, because what would make room is the end of other answers.
"""

from __future__ import annotations

from poolgrid.frontend.media.refusals import MediaRefused


class MediaBudget:
    """The bytes of all leases together."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def lease(self, request_bytes_max: int) -> MediaLease:
        """Return an empty lease of at most ``request_bytes_max`` bytes."""
        return MediaLease(self, request_bytes_max)


class MediaLease:
    """What one request holds; closing it twice is harmless."""

    def __init__(self, budget: MediaBudget, bytes_max: int) -> None:
        self._budget = budget
        self._bytes_max = bytes_max
        self._held = 0
        self._closed = False

    def add(self, size: int) -> None:
        """Take ``size`` bytes more, or raise ``MediaRefused`` and take none."""
        if self._held + size > self._bytes_max:
            raise MediaRefused(
                "media_too_large",
                f"the media of the request have more than {self._bytes_max} bytes together, the limit",
            )
        if self._budget.held + size > self._budget.bytes_max:
            raise MediaRefused(
                "media_busy",
                f"media of other requests hold {self._budget.held} bytes of {self._budget.bytes_max} "
                "(media-memory-mb); try again",
            )
        if not self._closed:
            self._held += size
            self._budget.held += size

    def close(self) -> None:
        """Give everything back."""
        self._budget.held -= self._held
        self._held = 0
        self._closed = True
