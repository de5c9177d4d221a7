"""What is to be done after something happened to a request on its workers: the effects of ``request_machine``."""

from __future__ import annotations

from typing import final

import msgspec

from poolgrid.dispatch.happened import Happened
from poolgrid.dispatch.legs import Dispatch
from poolgrid.frontend.stream_delta import StreamDelta
from poolgrid.wire.requests import TokenDelta


@final
class Heard(msgspec.Struct, frozen=True):
    """A leg's worker said more than further tokens, and it was in its place."""

    dispatch: Dispatch
    delta: TokenDelta
    first: bool
    """Whether the client had no token before."""


@final
class Cancel(msgspec.Struct, frozen=True):
    """Tell a leg's worker to stop and to let go of what it keeps."""

    dispatch: Dispatch


@final
class Release(msgspec.Struct, frozen=True):
    """Take a leg off its worker's books."""

    dispatch: Dispatch


@final
class Avoid(msgspec.Struct, frozen=True):
    """A leg's worker comes last from now on."""

    dispatch: Dispatch
    why: str


@final
class Blame(msgspec.Struct, frozen=True):
    """A leg's worker has failed it."""

    dispatch: Dispatch
    happened: Happened
    why: str


@final
class Crowded(msgspec.Struct, frozen=True):
    """A leg's worker has promised ``booked_tokens``; the leg is off its books."""

    dispatch: Dispatch
    booked_tokens: int


@final
class PlaceNext(msgspec.Struct, frozen=True):
    """Place what ``RequestMachine.plan`` says comes next."""

    why: str
    after: Dispatch
    """The leg before, or the one that was lost."""
    moved: bool
    """Whether this is a migration; else it is the next leg, or the same one chosen again."""


@final
class End(msgspec.Struct, frozen=True):
    """The request is over; the client has ``last``, and the books are to be closed."""

    last: StreamDelta
    by_worker: bool
    """Whether a worker ended it, rather than something that happened to it."""


Effect = Heard | Cancel | Release | Avoid | Blame | Crowded | PlaceNext | End
NOTHING: tuple[Effect, ...] = ()
