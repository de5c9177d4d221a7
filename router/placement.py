"""Why no worker was chosen for a request, and what a request waits for."""

from __future__ import annotations

from enum import Enum, StrEnum, auto

import msgspec

from poolgrid.router.core.selector import NoWorker, PolicyFailed


class WaitCause(StrEnum):
    """Why a request waits, as metrics say it."""

    WORKERS_FULL = "workers_full"
    UNREACHABLE = "unreachable"
    BEHIND_OTHERS = "behind_others"
    HELD = "held"
    WORKER_LOST = "worker_lost"
    NEXT_LEG = "next_leg"


class Lack(Enum):
    """Why a request was not placed."""

    BUSY = auto()
    """Some worker could serve it, once it has room or can be reached again: it may wait."""
    NO_WORKER = auto()
    """No worker can serve it."""
    POLICY_FAILED = auto()
    """The policy raised; only this request is lost."""


class NotPlaced(msgspec.Struct, frozen=True):
    """Nobody was chosen."""

    lack: Lack
    none: NoWorker | PolicyFailed
    full: bool = False
    """Whether some worker that could serve it has refused others for lack of room."""

    @property
    def wait_cause(self) -> WaitCause:
        """Return for what a request waits that may wait."""
        full = self.full or (isinstance(self.none, NoWorker) and self.none.busy)
        return WaitCause.WORKERS_FULL if full else WaitCause.UNREACHABLE

    def __str__(self) -> str:
        return str(self.none)
