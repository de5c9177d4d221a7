"""Derives every recorded decision again, from the pool's journal and the recorded inputs, with the router's own code.

Rules
    1. The state is the real ``RouterState``. It is given the recorded inputs, as the router's was, and nothing else
       touches it. Time is what was recorded; nothing reads a clock.
    2. A decision is compared in everything that was recorded of it: the offset, the candidates in their order, every
       number about them as bits, the row, the reason, the workers filtered out and why.
    3. The first difference ends the replay of a router: what follows would be built on a state that is in doubt.
    4. Where inputs are missing (recorded in the journal) or the pool's journal no longer reaches back, decisions are
       counted as not derivable, until the next checkpoint or snapshot from which state can be had.
    5. A checkpoint may lack the oldest predictions from the router's own choices. Until these have expired, a
       decision that depends on it and comes out otherwise counts as not derivable, and the recorded one is booked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import Policy
from poolgrid.kernel.journal.ports import ReadableDisk
from poolgrid.kernel.routing.inputs import TurnOffered
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire.identifiers import WorkerKey
from poolgrid.server.consolidator.journal.inspection import NotKept
from poolgrid.server.router.decision_journal.checkpoints import restore
from poolgrid.server.router.decision_journal.entries import (
    INPUTS_VERSION,
    OLDEST_INPUTS_VERSION,
    Checkpoint,
    Decided,
    DecisionMade,
    InputReader,
    InputsLost,
    NoDecision,
    OverlapRealised,
    PoolJournalTooShort,
    RouterSettingsNoted,
    SnapshotLoaded,
    StreamDiffers,
    TurnJudged,
    decision_of,
    judged_of,
    made_of,
    wanted_of,
)
from poolgrid.server.router.decision_journal.opening import settings_of
from poolgrid.server.router.decision_journal.reader import ReadRemarks, StoredEntry, stored_entries
from poolgrid.server.router.policy_loading import make_state

PROGRESS_EVERY_ENTRIES = 200

MakePolicy = Callable[[RouterSettingsNoted], Policy]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay came to something else than what was recorded."""

    file: str
    number: int
    request_id: str
    attempt: int
    what: str
    recorded: Any
    derived: Any


@dataclass(slots=True)
class ReplayOutcome:
    """What came of the decisions of one router."""

    identical: int = 0
    identical_admissions: int = 0
    """Turns of sessions that were admitted, or had to wait, as recorded."""
    not_derivable: int = 0
    lost_decisions: int = 0
    """Decisions that the journal records as missing."""
    causes: dict[str, int] = field(default_factory=dict)
    """Why decisions were not derivable, and how many for each reason."""
    difference: Difference | None = None
    remarks: ReadRemarks = field(default_factory=ReadRemarks)


class ReplayWatcher(Protocol):
    """Looks on while a router's decisions are derived."""

    def begin(self, state: RouterState) -> None: ...

    def decided(self, decision: Decision, path: Sequence[int]) -> None: ...

    def realised(self, entry: OverlapRealised) -> None: ...


class DecisionReplay:
    """One router's decision journal against the journal of its pool."""

    def __init__(
        self,
        pool: ReadableDisk,
        decisions: ReadableDisk,
        make_policy: MakePolicy,
        blocks_per_worker_max: int,
        watcher: ReplayWatcher | None = None,
    ) -> None:
        self._watcher = watcher
        self._decisions = decisions
        self._make_policy = make_policy
        self._inputs = InputReader(pool, blocks_per_worker_max)
        self._noted: RouterSettingsNoted | None = None
        self._state: RouterState | None = None
        self._refused = ""
        """Why what the router noted cannot be replayed here at all; empty while it can."""
        self._blind = "the journal begins here"
        """Why the state is not known; empty while it is."""
        self._too_old = False
        """It is not known because the pool's journal does not reach back to it: the next snapshot may have it."""
        self._begun_midway = False
        """The state is that of a checkpoint, and not of all that ever happened to the router."""
        self._expected = 0

    def run(self, on_progress: Callable[[int], None] = lambda _: None) -> ReplayOutcome:
        """Derive everything; ``on_progress`` gets the bytes of entries done, now and then.

        Raises ``JournalCorrupt``, and what ``make_policy`` raises.
        """
        outcome = ReplayOutcome()
        done = 0
        for count, stored in enumerate(stored_entries(self._decisions, outcome.remarks)):
            done += stored.size
            if count % PROGRESS_EVERY_ENTRIES == 0:
                on_progress(done)
            outcome.difference = self._take(stored, outcome)
            if outcome.difference is not None:
                break
        return outcome

    def _take(self, stored: StoredEntry, outcome: ReplayOutcome) -> Difference | None:
        entry = stored.entry
        if stored.number != self._expected and not self._blind:
            self._blind = f"entries {self._expected} to {stored.number - 1} are missing"
        self._expected = stored.number + 1
        if isinstance(entry, RouterSettingsNoted):
            self._note(entry)
        elif isinstance(entry, InputsLost):
            outcome.lost_decisions += entry.decisions
            self._blind = f"inputs are missing: {entry.reason}"
            self._too_old = False
        elif isinstance(entry, Checkpoint):
            self._restore(entry)
        elif isinstance(entry, DecisionMade):
            return self._decide(stored, entry, outcome)
        elif isinstance(entry, TurnJudged):
            return None if self._blind or self._state is None else self._judge(stored, entry, self._state, outcome)
        elif not self._blind or (self._too_old and isinstance(entry, SnapshotLoaded)):
            if self._watcher is not None and isinstance(entry, OverlapRealised):
                self._watcher.realised(entry)
            return self._apply(stored)
        return None

    def _note(self, noted: RouterSettingsNoted) -> None:
        self._noted = noted
        self._refused = ""
        if not OLDEST_INPUTS_VERSION <= noted.inputs_version <= INPUTS_VERSION:
            self._refused = self._blind = (
                f"its inputs are of version {noted.inputs_version}, written by poolgrid {noted.poolgrid}; this is "
                f"poolgrid {metadata.version('poolgrid')}, which knows versions {OLDEST_INPUTS_VERSION} to "
                f"{INPUTS_VERSION}: replay it with the one that wrote it"
            )

    # -- state -----------------------------------------------------------------------------------------------------

    def _make(self) -> RouterState:
        """Return an empty state, by the rules in force."""
        noted = self._noted
        assert noted is not None, "a checkpoint without settings before it"
        state = make_state(settings_of(noted), self._make_policy(noted))
        if self._watcher is not None:
            self._watcher.begin(state)
        return state

    def _restore(self, checkpoint: Checkpoint) -> None:
        if self._refused:
            return
        if checkpoint.fresh:
            self._state = self._make()
            self._begun_midway = False
            self._blind = ""
            return
        if not self._blind:
            return  # the state is known; the checkpoint is for those who begin here
        state = self._state = self._make()
        self._begun_midway = True
        try:
            state.apply(self._inputs.snapshot(checkpoint.offset, checkpoint.now_ms, state.projection))
        except NotKept as error:
            self._blind_by(error)
            return
        restore(state, checkpoint)
        self._blind = ""

    def _blind_by(self, error: NotKept) -> None:
        self._blind = str(error)
        self._too_old = isinstance(error, PoolJournalTooShort)

    def _lacks_beliefs(self, made: DecisionMade, state: RouterState) -> bool:
        """Return whether a decision depends on choices that may be missing here: older ones than a checkpoint has."""
        if not self._begun_midway:
            return False
        projection = state.projection
        depends = bool(made.untrusted) or not projection.follows_blocks
        return depends and made.now_ms < projection.predictions.exact_from_ms

    def _apply(self, stored: StoredEntry) -> Difference | None:
        state = self._state
        if state is None:
            return None
        try:
            given = self._inputs.input_of(stored.entry, stored.workers, state.projection)
        except StreamDiffers as error:
            return Difference(stored.file, stored.number, "", 0, f"the stream: {error}", stored.entry, None)
        except NoDecision as error:
            return Difference(stored.file, stored.number, error.request_id, 0, str(error), stored.entry, None)
        except NotKept as error:
            self._blind_by(error)
            return None
        if given is not None:
            state.apply(given)
            self._blind = ""
        return None

    def _judge(
        self, stored: StoredEntry, judged: TurnJudged, state: RouterState, outcome: ReplayOutcome
    ) -> Difference | None:
        """Compare whether a turn was admitted with what the state derives."""
        given = self._inputs.input_of(judged, stored.workers, state.projection)
        assert isinstance(given, TurnOffered), "the entry stands for an offer"
        numbers = {worker: number for number, worker in enumerate(stored.workers)}
        admission = state.offer(given)
        for worker in admission.crowded:
            numbers.setdefault(worker, len(numbers))  # not of those that were recorded: a difference
        again = judged_of(given, admission, numbers)
        if again != judged:
            return Difference(stored.file, stored.number, judged.request.request_id, 0, "the admission", judged, again)
        outcome.identical_admissions += 1
        return None

    # -- decisions -------------------------------------------------------------------------------------------------

    def _decide(self, stored: StoredEntry, made: DecisionMade, outcome: ReplayOutcome) -> Difference | None:
        state = self._state
        if self._blind or state is None:
            outcome.not_derivable += 1
            outcome.causes[self._blind] = outcome.causes.get(self._blind, 0) + 1
            return None
        difference = self._derive(stored, made, state)
        if difference is not None and self._lacks_beliefs(made, state):
            outcome.not_derivable += 1
            outcome.causes[_BELIEFS_CUT] = outcome.causes.get(_BELIEFS_CUT, 0) + 1
            self._inputs.decided = Decided(wanted_of(made, stored.workers), decision_of(made, stored.workers))
            return None
        outcome.identical += difference is None
        return difference

    def _derive(self, stored: StoredEntry, made: DecisionMade, state: RouterState) -> Difference | None:
        def difference(what: str, recorded: Any, derived: Any) -> Difference:
            return Difference(
                stored.file, stored.number, made.request.request_id, made.attempt, what, recorded, derived
            )

        wanted = wanted_of(made, stored.workers)
        derived = state.apply(wanted)
        if not isinstance(derived, Decision):
            return difference("the decision", made.reason, f"no worker: {derived}")
        self._inputs.decided = Decided(wanted, derived)
        if self._watcher is not None:
            self._watcher.decided(derived, wanted.path)
        numbers = {worker: number for number, worker in enumerate(stored.workers)}
        recorded = decision_of(made, stored.workers)
        if derived.candidates.workers != recorded.candidates.workers:
            return difference(
                "candidates", list(map(str, recorded.candidates.workers)), list(map(str, derived.candidates.workers))
            )
        if derived.filtered != recorded.filtered:
            return difference("filtered", _by_name(recorded.filtered), _by_name(derived.filtered))
        again = made_of(wanted, derived, numbers)
        if zlib.decompress(again.columns) != zlib.decompress(made.columns) or again.terms != made.terms:
            return difference("candidates", recorded.explanation().rows, derived.explanation().rows)
        for name in DecisionMade.__struct_fields__:
            if name != "columns" and getattr(again, name) != getattr(made, name):
                return difference(name, getattr(made, name), getattr(again, name))
        return None


_BELIEFS_CUT = "a checkpoint lacks the oldest predictions of the router from its own choices"


def _by_name(filtered: Mapping[WorkerKey, str]) -> dict[str, str]:
    return {str(worker): why for worker, why in filtered.items()}


def shown(value: Any) -> str:
    """Return one side of a difference as JSON."""
    return msgspec.json.encode(value, enc_hook=str).decode()
