"""How an engine or a worker refuses a request: a class for each ``poolgrid.kernel.wire.requests.RefusalKind``."""

from __future__ import annotations

from poolgrid.kernel.wire.errors import WireError
from poolgrid.kernel.wire.requests import RefusalKind


class RefusedError(WireError):
    """A request cannot be taken, here or elsewhere: it is wrong in a way that its client cannot change."""

    kind: RefusalKind | None = None
    """What the router may do next; ``None`` = nothing, the request has failed."""
    retry_after_ms: int | None = None
    booked_tokens: int | None = None
    unknown_model = False

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class BusyError(RefusedError):
    """There is no room now; another worker may have some. ``retry_after_ms``: for how long, where that is known."""

    kind = RefusalKind.BUSY

    def __init__(self, reason: str, retry_after_ms: int | None = None) -> None:
        super().__init__(reason)
        self.retry_after_ms = retry_after_ms


class DrainingError(RefusedError):
    """This worker takes nothing new before it leaves."""

    kind = RefusalKind.DRAINING


class CrowdedError(RefusedError):
    """Other routers sent the rank more than the one that chose it knew; ``booked_tokens`` is the truth."""

    kind = RefusalKind.CROWDED

    def __init__(self, reason: str, booked_tokens: int) -> None:
        super().__init__(reason)
        self.booked_tokens = booked_tokens


class UnableError(RefusedError):
    """This worker lacks what the request asks for; another one may have it."""

    kind = RefusalKind.CANNOT_DO


class UnknownModelError(UnableError):
    """This worker does not serve the model or adapter that the request names."""

    unknown_model = True


class UnsupportedError(RefusedError):
    """No worker of this kind does what the request asks for, or takes the value: its client must change it."""

    kind = RefusalKind.INVALID


class BrokenError(RefusedError):
    """Something that should have worked has failed here; another worker may succeed."""

    kind = RefusalKind.BROKEN
