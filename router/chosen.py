"""Who was chosen for a leg of a request."""

from __future__ import annotations

from typing import Final, final

from poolgrid.router.core.decision import Decision
from poolgrid.router.core.stage_plan import LegSpec
from poolgrid.wire.identifiers import STAGE_WORD, Stage

_WHOLE: Final = Stage.WHOLE


@final
class Chosen:
    """Who is to do which leg."""

    __slots__ = ("decision", "leg", "now_ms")

    def __init__(self, decision: Decision, leg: LegSpec, now_ms: float) -> None:
        self.decision = decision
        self.leg = leg
        self.now_ms = now_ms

    def reason(self) -> str:
        """Return the short reason code, with the stage where there are several."""
        reason = self.decision.reason
        stage = self.leg.stage
        return reason if stage is _WHOLE else f"{STAGE_WORD[stage]}-{reason}"

    def overlap_tokens(self) -> int:
        """Return the tokens of the request that the worker is believed to hold."""
        request = self.decision.request
        return min(request.isl, self.decision.overlap_blocks * request.block_size)
