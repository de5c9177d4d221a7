"""What is to be done after something happened to a request on its workers: the effects of ``request_machine``."""

from __future__ import annotations

from typing import Any, final

from poolgrid.inference.stream_delta import StreamDelta
from poolgrid.serving.happened import Happened
from poolgrid.serving.legs import Dispatch
from poolgrid.wire.requests import TokenDelta
from poolgrid.wire.value import Value


@final
class Heard(Value):
    """A leg's worker said more than further tokens, and it was in its place."""

    __slots__ = ("delta", "dispatch", "first")

    def __init__(self, dispatch: Dispatch, delta: TokenDelta, first: bool) -> None:
        self.dispatch = dispatch
        self.delta = delta
        self.first = first
        """Whether the client had no token before."""

    def parts(self) -> tuple[Any, ...]:
        return (self.dispatch, self.delta, self.first)


@final
class Cancel(Value):
    """Tell a leg's worker to stop and to let go of what it keeps."""

    __slots__ = ("dispatch",)

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch

    def parts(self) -> tuple[Any, ...]:
        return (self.dispatch,)


@final
class Release(Value):
    """Take a leg off its worker's books."""

    __slots__ = ("dispatch",)

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch

    def parts(self) -> tuple[Any, ...]:
        return (self.dispatch,)


@final
class Avoid(Value):
    """A leg's worker comes last from now on; ``for_good``: it refused what the request asks for, and is not asked
    again."""

    __slots__ = ("dispatch", "for_good", "why")

    def __init__(self, dispatch: Dispatch, why: str, for_good: bool = False) -> None:
        self.dispatch = dispatch
        self.why = why
        self.for_good = for_good

    def parts(self) -> tuple[Any, ...]:
        return (self.dispatch, self.why, self.for_good)


@final
class Full(Value):
    """A leg's worker has no room for anything, for ``retry_after_ms``."""

    __slots__ = ("dispatch", "retry_after_ms")

    def __init__(self, dispatch: Dispatch, retry_after_ms: int | None) -> None:
        self.dispatch = dispatch
        self.retry_after_ms = retry_after_ms
        """``None`` = the worker did not report a time."""

    def parts(self) -> tuple[Any, ...]:
        return (self.dispatch, self.retry_after_ms)


@final
class Blame(Value):
    """A leg's worker has failed it."""

    __slots__ = ("dispatch", "happened", "why")

    def __init__(self, dispatch: Dispatch, happened: Happened, why: str) -> None:
        self.dispatch = dispatch
        self.happened = happened
        self.why = why

    def parts(self) -> tuple[Any, ...]:
        return (self.dispatch, self.happened, self.why)


@final
class Crowded(Value):
    """A leg's worker has promised ``booked_tokens``; the leg is off its books."""

    __slots__ = ("booked_tokens", "dispatch")

    def __init__(self, dispatch: Dispatch, booked_tokens: int) -> None:
        self.dispatch = dispatch
        self.booked_tokens = booked_tokens

    def parts(self) -> tuple[Any, ...]:
        return (self.dispatch, self.booked_tokens)


@final
class PlaceNext(Value):
    """Place what ``RequestMachine.plan`` says comes next."""

    __slots__ = ("after", "for_room", "moved", "why")

    def __init__(self, why: str, after: Dispatch, moved: bool, for_room: bool = False) -> None:
        self.why = why
        self.after = after
        """The leg before, or the one that was lost."""
        self.moved = moved
        """Whether this is a migration; else it is the next leg, or the same one chosen again."""
        self.for_room = for_room
        """Whether it moves because its worker had no room: nothing has failed."""

    def parts(self) -> tuple[Any, ...]:
        return (self.why, self.after, self.moved, self.for_room)


@final
class End(Value):
    """The request is over; the client has ``last``, and the books are to be closed."""

    __slots__ = ("by_worker", "last")

    def __init__(self, last: StreamDelta, by_worker: bool) -> None:
        self.last = last
        self.by_worker = by_worker
        """Whether a worker ended it, rather than something that happened to it."""

    def parts(self) -> tuple[Any, ...]:
        return (self.last, self.by_worker)


Effect = Heard | Cancel | Release | Avoid | Full | Blame | Crowded | PlaceNext | End
NOTHING: tuple[Effect, ...] = ()
