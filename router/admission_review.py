"""Whether a pool gains from admission by working set; where it does not, admission rests and no turn waits for a place.

Rules
    1. At each full ``REVIEW_MS`` of the wall clock a router replays the turns of the last ``WINDOW_MS`` with admission
       and without it (``poolgrid.server.router.turn_replay``). The gain is by how much sooner first tokens come, as a
       share of the time without admission. Waits at the router count. It is of sessions with several turns, and each
       counts the same: people in chats pay for admission, and have fewer turns than agents. Others never wait for it.
    2. Admission rests after ``REST_AFTER`` reviews in a row with a gain below ``REST_BELOW``. It works again after
       ``WORK_AFTER`` with ``WORK_FROM`` or more. It works at first.
    3. With fewer than ``TURNS_MIN`` turns nothing changes.
    4. Each router decides for itself. Their logs are of one stream, so they agree, but for what is on its way.

Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from poolgrid.kernel.routing.working_set import WorkingSet
from poolgrid.kernel.wire.answers import AdmissionRow
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.identifiers import WorkerKey
from poolgrid.server.process.figures import counted, milliseconds, percent
from poolgrid.server.router.turn_replay import ReplayTotals, TurnLog, TurnReplay, engine_sizes

REVIEW_MS: Final = 60_000.0
WINDOW_MS: Final = 600_000.0
"""Caches of a replay are empty at first: of half the time, gains of agents vary between nothing and 0.8."""
TURNS_MIN: Final = 50

REST_BELOW: Final = 0.15
WORK_FROM: Final = 0.2
"""Simulated: 0.3 to 0.6 for agents that need 1.5 to 2 times the caches, where admission halves their times; around 0
for mixed traffic at 2 to 4 times, where people in chats wait five to twenty times as long with it."""

REST_AFTER, WORK_AFTER = 2, 3
"""Reviews in a row: people in chats pay while it works, and a gain may be chance."""


class ReviewFinding(NamedTuple):
    """What the last replays showed."""

    at_ms: float
    without: ReplayTotals
    admitted: ReplayTotals
    """The same with admission."""

    @property
    def gain(self) -> float:
        """Return by how much turns have their first tokens sooner, as a share; below 0 = later."""
        return 1.0 - self.admitted.ttft_ms / self.without.ttft_ms if self.without.ttft_ms else 0.0


class AdmissionReview:
    """Decides whether admission rests, at one router."""

    def __init__(self, places: WorkingSet) -> None:
        self.log = TurnLog(places)
        self.rests = False
        self.finding: ReviewFinding | None = None
        """``None`` until there were enough turns."""
        self._against = 0
        """Latest reviews in a row that speak against what is."""

    def reason(self) -> str:
        """Return in words why admission works or rests."""
        finding = self.finding
        if finding is None:
            return f"not reviewed yet: that needs {TURNS_MIN} turns in {milliseconds(WINDOW_MS)}"
        without, admitted, gain = finding.without, finding.admitted, finding.gain
        than = "sooner" if gain >= 0 else "later"
        limit = (
            f"below {percent(REST_BELOW, 0)} it rests" if not self.rests else f"from {percent(WORK_FROM, 0)} it works"
        )
        return (
            f"{counted(without.turns, 'turn')} replayed: mean TTFT {milliseconds(admitted.ttft_ms)} with admission and "
            f"{milliseconds(without.ttft_ms)} without, {percent(abs(gain), 0)} {than} ({limit}); prompt tokens "
            f"computed: {admitted.computed_tokens:,} and {without.computed_tokens:,}; turns that wait: "
            f"{admitted.waited:,}"
        )

    def row(self, now_ms: float) -> AdmissionRow:
        """Return what ``/v1/sessions`` says of it."""
        finding, state, reason = self.finding, "rests" if self.rests else "works", self.reason()
        if finding is None:
            return AdmissionRow(state=state, reason=reason)
        return AdmissionRow(
            state=state,
            reason=reason,
            gain=finding.gain,
            turns=finding.without.turns,
            ttft_ms=finding.admitted.ttft_ms,
            without_ttft_ms=finding.without.ttft_ms,
            computed_tokens=finding.admitted.computed_tokens,
            without_computed_tokens=finding.without.computed_tokens,
            waiting_turns=finding.admitted.waited,
            reviewed_ms_ago=round(now_ms - finding.at_ms),
        )

    def review(self, cards: Mapping[WorkerKey, WorkerCard], now_ms: float) -> Iterator[None]:
        """Replay the last minutes and decide; each step is short."""
        turns, places = self.log.since(now_ms - WINDOW_MS), self.log.places
        if len(turns) < TURNS_MIN:
            return
        sizes = engine_sizes(places, cards)
        empty = WorkingSet()
        empty.learn_from(places)
        played = [TurnReplay(turns, sizes, with_places) for with_places in (None, empty)]
        for each in played:
            yield from each.play()
        without, admitted = (each.totals for each in played)
        if without.turns:
            self._decide(ReviewFinding(now_ms, without, admitted))

    def _decide(self, finding: ReviewFinding) -> None:
        self.finding = finding
        is_against = finding.gain >= WORK_FROM if self.rests else finding.gain < REST_BELOW
        self._against = self._against + 1 if is_against else 0
        if self._against == (WORK_AFTER if self.rests else REST_AFTER):
            self.rests = not self.rests
            self._against = 0
