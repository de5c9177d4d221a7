"""What came of choosing a worker for a request: one that was chosen, or why there is none."""

from __future__ import annotations

from enum import Enum, StrEnum, auto

import msgspec

from poolgrid.router.core.decision import Decision
from poolgrid.router.core.selector import NoWorker, PolicyFailed
from poolgrid.router.core.stage_plan import Leg
from poolgrid.wire.identifiers import STAGE_WORD, Stage

_WHOLE = Stage.WHOLE


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

    @property
    def wait_cause(self) -> WaitCause:
        """Return for what a request waits that may wait."""
        full = isinstance(self.none, NoWorker) and self.none.busy
        return WaitCause.WORKERS_FULL if full else WaitCause.UNREACHABLE

    def __str__(self) -> str:
        return str(self.none)


class Chosen(msgspec.Struct, frozen=True):
    """Who is to do which leg."""

    decision: Decision
    leg: Leg
    now_ms: float

    def reason(self) -> str:
        """Return the short reason code, with the stage where there are several."""
        reason = self.decision.reason
        stage = self.leg.stage
        return reason if stage is _WHOLE else f"{STAGE_WORD[stage]}-{reason}"

    def overlap_tokens(self) -> int:
        """Return the tokens of the request that the worker is believed to hold."""
        request = self.decision.request
        return min(request.isl, self.decision.overlap_blocks * request.block_size)
