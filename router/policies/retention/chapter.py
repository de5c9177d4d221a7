"""What is known of the prompts of one seed: which kind each is, and how long its blocks should stay."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.policies.retention.ghost_cache import Kept
from poolgrid.router.policies.retention.ghosts import SPENT
from poolgrid.router.policies.retention.prefix_history import PrefixHistory, PrefixRun
from poolgrid.router.policies.retention.return_times import NOTHING, Keep, RetentionPlan, ReturnTimes
from poolgrid.wire.limits import RETAINED_RANGES_MAX
from poolgrid.wire.requests import RETENTION_DEFAULT, KvRetention, RetainedTokens

VISIT_STEPS = (1, 2, 4, 8, 16)
"""Most visits of each step but the last."""

ISL_STEPS = (3_000, 8_000, 24_000)
"""Most prompt tokens of each step but the last, of what begins a conversation."""

GAP_STEPS_MS = (16_000.0, 32_000.0, 64_000.0, 256_000.0)
"""Most time since the turn before of each step but the last."""

ADDED_STEPS = (128, 512, 1_600)
"""Most prompt tokens that a turn has more than the one before, of each step but the last."""

_FIRSTS = 2 * (len(ISL_STEPS) + 1)
_LATERS = (len(GAP_STEPS_MS) + 1) * (len(ADDED_STEPS) + 1)
KINDS_PER_STEP = _FIRSTS + _LATERS
KINDS = (len(VISIT_STEPS) + 1) * KINDS_PER_STEP

LOWEST_KEPT = 40

PRIORITY_STEPS_PER_OCTAVE = 12
"""What is worth twice as much for its room has a priority higher by 12: 100 is 32 times what just fits."""

NOT_KEPT = 30
"""Priority of what is not worth keeping: it goes before all that nobody spoke of. The lowest with which TensorRT-LLM
moves a block to the host, where there is a host tier."""

LONGEST_ANSWER_MS = 60_000.0
"""Durations count from when a request is over, which the router cannot know when it sends it: so much later at most."""

NO_TAIL = 0.5
"""A rest behind the last granule that comes again less often than this, when its prompt does, is spent."""


class ChapterState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is known of the prompts of one seed, as values."""

    model: str
    seed: int
    runs: list[PrefixRun]
    """Those that came last longest ago first."""
    visits: list[float]
    returned: dict[int, list[float]]
    weight_ms: float
    as_of_ms: float | None
    plan: RetentionPlan
    tails: int
    tails_returned: int
    noted: float = 0.0


class PromptLook(msgspec.Struct, frozen=True, gc=False):
    """A prompt beside what is known."""

    found: list[tuple[int, PrefixRun, int]]
    known: int
    """Granules that came before."""
    turn: int
    kinds: list[int]
    """Of each run, a new one included."""
    kept: list[Kept]


class Chapter:
    """What is known of the prompts of one seed."""

    __slots__ = ("history", "plan", "tails", "tails_returned", "times")

    def __init__(self, granules_max: int) -> None:
        self.history = PrefixHistory(granules_max)
        self.times = ReturnTimes(KINDS, KINDS_PER_STEP)
        self.plan: RetentionPlan = NOTHING
        self.tails = 0
        """Prompts that came again, with something behind their last granule."""
        self.tails_returned = 0
        """Those of them of which that came again too."""

    @property
    def keeps_tails(self) -> bool:
        """Tell whether what is behind the last granule comes again."""
        return self.tails_returned >= NO_TAIL * self.tails

    def look(self, granules: list[int], isl: int, now_ms: float) -> PromptLook:
        """Compare a prompt with what is known; changes nothing."""
        found = self.history.find(granules)
        turn, gap_ms, added, known = 1, 0.0, 0, 0
        for _, _, size in found:
            known += size
        if found:
            _, run, size = found[-1]
            # Many prompts may go on from a shared beginning where one of them ended: that is no conversation.
            if run.turn and size == len(run.granules) and run.visits <= run.turn:
                turn = run.turn + 1
                gap_ms, added = now_ms - run.last_ms, isl - run.end_tokens
        aspect = aspect_of(turn, known, isl, gap_ms, added)
        keep = self.plan.of(granules[-1] / 2**64)
        kinds: list[int] = []
        kept: list[Kept] = []
        for _, run, size in found:
            kind = kind_of(run.visits + 1, turn, aspect)
            kinds.append(kind)
            priority, duration_ms = _level(keep, kind)
            # The last word of a block holds. What other prompts keep behind it must not outlast it; where all that came
            # were turns of this conversation there are none.
            if run.until_ms > now_ms and run.visits >= turn:
                priority = max(priority, run.priority)
                duration_ms = max(duration_ms, run.duration_ms)
            kept.append((size, priority, duration_ms))
        if known < len(granules):
            kind = kind_of(1, turn, aspect)
            kinds.append(kind)
            kept.append((len(granules) - known, *_level(keep, kind)))
        # Neither rises along a prompt.
        lowest, shortest = 0, 0
        for at in range(len(kept) - 1, -1, -1):
            size, priority, duration_ms = kept[at]
            lowest = max(lowest, priority)
            shortest = max(shortest, duration_ms) if lowest > RETENTION_DEFAULT else 0
            kept[at] = (size, lowest, shortest)
        return PromptLook(found, known, turn, kinds, kept)

    def note(
        self, granules: list[int], path: Sequence[int], isl: int, look: PromptLook, step: int, now_ms: float
    ) -> None:
        """Let a chapter know of a prompt."""
        history, times = self.history, self.times
        found = look.found
        if found:
            number, run, size = found[-1]
            if size < len(run.granules):
                found[-1] = (number, history.cut(number, size), size)
            elif run.turn and run.end_block > look.known * step:
                self.tails += 1
                if run.end_block <= len(path) and path[run.end_block - 1] == run.end_hash:
                    self.tails_returned += 1
        chain: list[tuple[int | None, PrefixRun]] = []
        for (number, run, size), kind, (_, priority, duration_ms) in zip(found, look.kinds, look.kept, strict=False):
            times.note_return(run.kind, now_ms - run.last_ms, size)
            times.note_visit(kind, size)
            until_ms = now_ms + duration_ms + LONGEST_ANSWER_MS
            chain.append(
                (
                    number,
                    PrefixRun(
                        run.granules,
                        run.visits + 1,
                        now_ms,
                        kind,
                        run.turn,
                        run.end_block,
                        run.end_hash,
                        run.end_tokens,
                        priority,
                        duration_ms,
                        until_ms,
                    ),
                )
            )
        if look.known < len(granules):
            kind, (size, priority, duration_ms) = look.kinds[-1], look.kept[-1]
            times.note_visit(kind, size)
            until_ms = now_ms + duration_ms + LONGEST_ANSWER_MS
            fresh = PrefixRun(
                tuple(granules[look.known :]),
                1,
                now_ms,
                kind,
                priority=priority,
                duration_ms=duration_ms,
                until_ms=until_ms,
            )
            chain.append((None, fresh))
        number_of_last, last = chain[-1]
        last = msgspec.structs.replace(last, turn=look.turn, end_block=len(path), end_hash=path[-1], end_tokens=isl)
        chain[-1] = (number_of_last, last)
        history.note(chain)

    def said(self, kept: Sequence[Kept], request: RoutingRequest, step: int) -> KvRetention:
        """Return levels as what a worker is told."""
        levels: list[Kept] = []
        for count, priority, duration_ms in kept:
            if levels and levels[-1][1:] == (priority, duration_ms):
                levels[-1] = (levels[-1][0] + count, priority, duration_ms)
            else:
                levels.append((count, priority, duration_ms))
        while len(levels) >= RETAINED_RANGES_MAX:
            # Two by two, each pair as its front part, which has no less.
            levels = [
                (first[0] + (levels[at + 1][0] if at + 1 < len(levels) else 0), first[1], first[2])
                for at, first in enumerate(levels)
                if not at % 2
            ]
        ranges: list[RetainedTokens] = []
        start = 0
        granule_tokens = step * request.block_size
        for count, priority, duration_ms in levels:
            end = start + count * granule_tokens
            ranges.append(RetainedTokens(start, end, priority, duration_ms or None))
            start = end
        if not self.keeps_tails:
            if start < request.isl:
                ranges.append(RetainedTokens(start, request.isl, SPENT))
            return KvRetention(tuple(ranges), SPENT)
        last = ranges[-1]
        ranges[-1] = RetainedTokens(last.start, request.isl, last.priority, last.duration_ms)
        return KvRetention(tuple(ranges), last.priority, last.duration_ms)

    def state(self, model: str, seed: int) -> ChapterState:
        times = self.times
        return ChapterState(
            model,
            seed,
            self.history.runs(),
            list(times.visits),
            {kind: list(counts) for kind, counts in times.returned.items()},
            times.weight_ms,
            times.as_of_ms,
            self.plan,
            self.tails,
            self.tails_returned,
            times.noted,
        )

    def restore(self, state: ChapterState) -> None:
        """Go on from another one; raises ``ValueError`` for one that knows other kinds."""
        if len(state.visits) != KINDS or any(not 0 <= kind < KINDS for kind in state.returned):
            raise ValueError(f"restoring what was learned: {len(state.visits)} kinds, this version has {KINDS}")
        times = self.times
        self.history.restore(state.runs)
        times.visits = list(state.visits)
        times.returned = {kind: list(counts) for kind, counts in state.returned.items()}
        times.weight_ms, times.as_of_ms, times.noted = state.weight_ms, state.as_of_ms, state.noted
        self.plan = NOTHING if state.plan == NOTHING else state.plan
        self.tails, self.tails_returned = state.tails, state.tails_returned


def aspect_of(turn: int, known: int, isl: int, gap_ms: float, added_tokens: int) -> int:
    """Return what sort of prompt it is.

    One that begins a conversation is told by its length and by whether its beginning is shared; a later turn by how
    soon it came and by how much it adds.
    """
    if turn > 1:
        gap, added = bisect_left(GAP_STEPS_MS, gap_ms), bisect_left(ADDED_STEPS, added_tokens)
        return _FIRSTS + gap * (len(ADDED_STEPS) + 1) + added
    return 2 * bisect_left(ISL_STEPS, isl) + (known > 1)


def kind_of(visits: int, turn: int, aspect: int) -> int:
    """Return what a run is taken for that so many prompts had, the last of them being of this turn and aspect."""
    return bisect_left(VISIT_STEPS, max(visits, turn)) * KINDS_PER_STEP + aspect


def priority_of(keep: Keep) -> int:
    """Return the priority of what is kept."""
    return min(100, LOWEST_KEPT + round(PRIORITY_STEPS_PER_OCTAVE * math.log2(max(1.0, keep.worth))))


def _level(keep: dict[int, Keep], kind: int) -> tuple[int, int]:
    own = keep.get(kind)
    return (NOT_KEPT, 0) if own is None else (priority_of(own), own.duration_ms)
