"""How an engine or a worker says no to a request."""

from __future__ import annotations

from wire.errors import WireError


class RefusedError(WireError):
    """A request cannot be taken; ``retryable`` says whether another worker, or this one later, might take it."""

    unsupported = False
    """Whether it is what the client asked for that this worker cannot do."""

    def __init__(self, reason: str, retryable: bool) -> None:
        self.reason = reason
        self.retryable = retryable
        super().__init__(reason)


class UnsupportedError(RefusedError):
    """This worker cannot do what the request asks for: a feature that it lacks, or a value that it does not take."""

    unsupported = True

    def __init__(self, reason: str, retryable: bool = False) -> None:
        super().__init__(reason, retryable)


class CrowdedError(RefusedError):
    """Other routers sent the rank more than the one that chose it knew; ``booked_tokens`` is the truth."""

    def __init__(self, reason: str, booked_tokens: int) -> None:
        super().__init__(reason, retryable=True)
        self.booked_tokens = booked_tokens
