"""The verdict on one worker: a table of rules over its evidence; the first that fits names the cause.

1. A rule needs evidence that excludes its neighbours: where blocks were announced, which prompts disagree and how, what
   stream and worker report. What no rule explains is ``REUSES_LESS``, ``REUSES_MORE`` or ``UNMATCHED``: known is
   how the numbers differ, and where to look.
2. A router, a recorded journal, a check of an engine server and a test come to the same verdict: everything is a
   function of the evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Final

import msgspec

from poolgrid.server.diagnosis.causes import Cause
from poolgrid.server.diagnosis.evidence import NEVER, Announcement, Observation, WorkerEvidence

RUN: Final = 5
"""Requests with reuse that disagree one after another, and are a fault however many agree afterwards: a cache that was
lost at once is whole again a few requests later."""

RECENT: Final = 32
"""Requests with reuse over which the share of disagreeing tokens is taken, and prompts over which that of announced
ones: a healed worker is soon acquitted."""

PARTED_ABOVE: Final = 0.2
"""Share of tokens in dispute that is a fault. Pools without faults stay below 0.02 even where caches thrash."""

LENGTHS_DIFFER_ABOVE: Final = 0.1
"""Share of requests whose prompt length the engine reports differently that is a fault: lengths are exact."""

MOST: Final = 0.8
"""Share of prompts that were announced in one way which is all, but for evictions and requests of others."""

SOME: Final = 0.1
"""Share of prompts that were announced in one way which is more than chance."""

AWAY_PER_NEEDED: Final = 3
"""Times ``needed``: prompts that must be announced by another worker. Of two engines in turn that happens once in 4,096
times."""

FOREIGN_ABOVE: Final = 0.25
"""Share of other clients' requests on a worker, and of tokens lost to eviction, from which they explain the loss."""

COLD_BELOW: Final = 0.05
"""Share of prompt tokens sent before, below which there is nothing to reuse."""

DISTINCT_REUSES: Final = 4
"""Different reported reuses that show in which steps an engine reuses, by their greatest common divisor."""

STEPS_SHOWN: Final = 4
"""Requests that show in which steps an engine resumes; twice as many show what it computes again."""

EXCEPTIONS: Final = 20
"""One request of so many may be an exception from what an engine does always: an eviction, a block in progress."""

LOST_PER_FLUSH: Final = 3
"""Requests that lost what was computed before, from which they show that a cache was dropped as a whole."""

REPEATS: Final = 2
"""Times ``needed``: prompts sent again, none of which was reused, before the prefix cache is off."""

QUIET_MS: Final = 6_000
"""How long a worker must have reused its cache before it counts that no event came: events may be late."""

UNEVEN: Final = 3
"""Different numbers of tokens by which prompts differ, from which it is no number of added tokens."""

ADDED_MAX: Final = 2
"""Special tokens that a tokenizer puts before a prompt; a template that begins differently has more."""

SOON_MS: Final = 500
"""Events of a prompt are with the router by then; they take milliseconds (benchmarks, event plane)."""

LATE_MS: Final = 2_000
"""Events that take so long are late."""


class ReuseVerdict(msgspec.Struct, frozen=True):
    """What is the matter with one worker."""

    worker: str
    cause: Cause
    evidence: tuple[str, ...]
    """What was seen, a sentence each."""
    first_request: str = ""
    """The first request of the window whose reuse parted from what was promised."""
    requests: int = 0
    promised_tokens: int = 0
    reported_tokens: int = 0


@dataclass(frozen=True)
class _Figures:
    """What rules look at."""

    given: WorkerEvidence

    def due(self, each: Observation) -> int:
        """Return what was promised, and can be reused: the last token is always computed."""
        size = self.given.block_size
        return min(each.promised_tokens, max(0, each.isl - 1) // size * size)

    def is_parted(self, each: Observation) -> bool:
        """A block more or less is none: engines compute the last tokens of a prompt again."""
        return abs(each.promised_tokens - each.reported_tokens) > self.given.block_size

    def is_over(self, each: Observation) -> bool:
        return each.promised_tokens - each.reported_tokens > self.given.block_size

    # -- lengths ---------------------------------------------------------------------------------------------------

    @cached_property
    def lengths_differ(self) -> list[Observation]:
        # Media become tokens by rules of the engine, so lengths of such prompts prove nothing.
        return [
            each
            for each in self.given.observations
            if each.reported_isl not in (None, each.isl) and each.domain != "media"
        ]

    @cached_property
    def are_lengths_off(self) -> bool:
        count = len(self.lengths_differ)
        return count >= self.given.needed and count > LENGTHS_DIFFER_ABOVE * len(self.given.observations)

    @cached_property
    def are_cut(self) -> bool:
        """All that differ are cut to one length, which no prompt exceeds."""
        lengths = Counter(each.reported_isl for each in self.lengths_differ)
        longest = max(each.reported_isl or 0 for each in self.given.observations)
        return len(lengths) == 1 and longest in lengths and all(each.isl > longest for each in self.lengths_differ)

    @cached_property
    def are_lengths_uneven(self) -> bool:
        """Whether prompts differ by several numbers of tokens."""
        return len({(each.reported_isl or 0) - each.isl for each in self.lengths_differ}) >= UNEVEN

    @cached_property
    def added_tokens(self) -> int:
        """Return by what number of tokens prompts of different lengths differ; 0 = by several numbers."""
        differ = self.lengths_differ
        differences = {(each.reported_isl or 0) - each.isl for each in differ}
        is_one = len(differences) == 1 and len({each.isl for each in differ}) > 1
        # A prompt that is as long at both is no exception from a constant: it would differ too.
        return differences.pop() if is_one and len(differ) * EXCEPTIONS >= len(self.given.observations) * 19 else 0

    # -- reuse -----------------------------------------------------------------------------------------------------

    @cached_property
    def warm(self) -> list[Observation]:
        return [each for each in self.given.observations if each.promised_tokens or each.reported_tokens]

    @cached_property
    def all_parted(self) -> list[Observation]:
        return [each for each in self.warm if self.is_parted(each)]

    @cached_property
    def parted(self) -> list[Observation]:
        """Requests that disagree, where they are too many for chance; empty where they are not."""
        groups = [self.warm[-RECENT:]]
        groups += [[each for each in self.warm if each.domain == domain][-RECENT:] for domain in ("salt", "adapter")]
        for group in groups:
            parted = [each for each in group if self.is_parted(each)]
            disputed = sum(abs(each.promised_tokens - each.reported_tokens) for each in parted)
            base = sum(max(each.promised_tokens, each.reported_tokens) for each in group)
            if len(parted) >= self.given.needed and disputed > (PARTED_ABOVE * base if self.given.needed > 1 else 0):
                return parted
        run: list[Observation] = []
        for each in self.warm:
            run = [*run, each] if self.is_parted(each) else []
            if len(run) >= RUN:
                return run
        return []

    @cached_property
    def is_under(self) -> bool:
        """Whether the worker reused more than was promised; else less."""
        return sum(each.reported_tokens - each.promised_tokens for each in self.parted) > 0

    @cached_property
    def never_over(self) -> bool:
        """Whether no promise was broken, but for exceptions."""
        return sum(map(self.is_over, self.warm)) * EXCEPTIONS <= len(self.warm)

    @cached_property
    def never_reuses(self) -> bool:
        """Whether prompts that the worker was sent before are computed again, all of them."""
        least = 2 * self.given.block_size
        again = sum(each.sent_tokens >= least for each in self.given.observations)
        enough = self.given.needed if self.given.needed == 1 else REPEATS * self.given.needed
        return again >= enough and not any(each.reported_tokens for each in self.given.observations)

    def only_in(self, domain: str) -> bool:
        """Return whether only requests of a domain disagree, and others agree."""
        others = sum(each.domain != domain and not self.is_parted(each) for each in self.warm)
        return others >= self.given.needed and all(each.domain == domain for each in self.parted)

    # -- what an engine does always --------------------------------------------------------------------------------

    @cached_property
    def _promised(self) -> list[Observation]:
        return [each for each in self.warm if self.due(each)]

    def _always(self, fits: Callable[[Observation], bool]) -> bool:
        others = sum(not fits(each) for each in self._promised)
        return others * EXCEPTIONS <= len(self._promised)

    @cached_property
    def reuse_step(self) -> int:
        """Return the greatest common divisor of what was reported; 0 = that is too little."""
        reuses = {each.reported_tokens for each in self.given.observations if each.reported_tokens}
        return gcd(*reuses) if len(reuses) >= DISTINCT_REUSES else 0

    @cached_property
    def shows_block_size(self) -> bool:
        """Whether reuse, as often as it differs, is in multiples of another size than the index's blocks have."""
        reuses = {each.reported_tokens for each in self.given.observations if each.reported_tokens}
        return self.reuse_step > self.given.block_size and len(reuses) > DISTINCT_REUSES

    @cached_property
    def resume_step(self) -> int:
        """Return in what steps, larger than blocks, the engine resumes what was promised; 0 = in none."""
        reuses = {each.reported_tokens for each in self._promised if each.reported_tokens}
        step, needed = gcd(*reuses), STEPS_SHOWN
        if step <= self.given.block_size or sum(map(self.is_over, self._promised)) < needed:
            return 0
        if len(reuses) < DISTINCT_REUSES:
            # Prompts on both sides of the first step tell as much.
            below = sum(self.due(each) < step for each in self._promised if self.is_over(each))
            if min(below, len(self._promised) - below) < needed:
                return 0
        varies = len({self.due(each) - each.reported_tokens for each in self._promised}) > 1
        return (
            step if varies and self._always(lambda each: self.due(each) // step * step == each.reported_tokens) else 0
        )

    @cached_property
    def recomputed_tokens(self) -> int:
        """Return how many of the last promised tokens are computed again each time; 0 = none, or not always as many."""
        size = self.given.block_size
        losses = Counter(self.due(each) - each.reported_tokens for each in self._promised if each.reported_tokens)
        loss, count = losses.most_common(1)[0] if losses else (0, 0)
        if loss <= size or count < 2 * STEPS_SHOWN or self.reuse_step != size:
            return 0
        return loss if self._always(lambda each: each.reported_tokens == max(0, self.due(each) - loss)) else 0

    @cached_property
    def flushes(self) -> int:
        """Return how often the cache was dropped as a whole; 0 = never, or something else disagrees too.

        After it nothing is reused but what was sent again, and each promise of something older is broken.
        """
        found, begin, reused, inside = 0, NEVER, 0, 0
        lost: list[Observation] = []
        for each in self.warm:
            if self.is_parted(each) and not self.is_over(each):
                return 0
            if self.is_over(each) and NEVER < each.lost_since < each.settled:
                if begin <= each.lost_since:
                    # It was computed and lost once more.
                    if begin != NEVER and not self._is_flush(lost):
                        return 0
                    found += begin != NEVER
                    begin, lost, reused, inside = each.number, [], 0, 0
                lost.append(each)
            elif begin != NEVER and not self.is_over(each) and each.reported_tokens > self.given.block_size:
                reused += NEVER < each.reused_since < begin
            inside += begin != NEVER
            if reused > 1 + inside // 10:
                return 0
        return found + self._is_flush(lost)

    def _is_flush(self, lost: Sequence[Observation]) -> bool:
        """Return whether several prefixes were lost, and no older ones than are reused at other times: a cache that is
        too small loses the oldest."""
        young = sum(each.number - each.lost_since <= self._reused_age for each in lost)
        return len(lost) >= LOST_PER_FLUSH and len({each.prefix for each in lost}) > 1 and 2 * young >= len(lost)

    @cached_property
    def _reused_age(self) -> int:
        """Return how many requests ago what is reused was computed or reused last, but for the oldest quarter."""
        ages = sorted(each.number - each.reused_since for each in self.warm if each.reused_since != NEVER)
        return ages[len(ages) * 3 // 4] if ages else 0

    @cached_property
    def is_flushed(self) -> bool:
        """Whether that is so, often or with a lasting loss."""
        return self.flushes > 1 or (self.flushes == 1 and bool(self.parted))

    @cached_property
    def stores_nothing(self) -> bool:
        """Whether no event has stored a block in this epoch."""
        return not self.given.stored_blocks and not self.given.held_blocks

    # -- where blocks are announced --------------------------------------------------------------------------------

    @cached_property
    def judged(self) -> list[Announcement]:
        return self.given.announcements[-RECENT:]

    @cached_property
    def own(self) -> int:
        return sum(each.own for each in self.judged)

    @cached_property
    def nowhere(self) -> int:
        return sum(not each.own and not each.others for each in self.judged)

    def is_most(self, count: int) -> bool:
        return len(self.judged) >= self.given.needed and count >= MOST * len(self.judged)

    @cached_property
    def stranger(self) -> tuple[str, int]:
        """Return in whose events most prompts came that did not come in the worker's own, and how many."""
        names = Counter(name for each in self.judged if not each.own for name in each.others)
        return names.most_common(1)[0] if names else ("", 0)

    @cached_property
    def is_away(self) -> bool:
        """Whether another worker's events have the prompts: too many for the chance of a balancer."""
        enough = len(self.judged) >= AWAY_PER_NEEDED * self.given.needed
        return enough and self.is_most(self.stranger[1]) and self.own <= SOME * len(self.judged)

    @cached_property
    def twin(self) -> str:
        """Return the worker whose events have all of this one's prompts too, and the other way round; empty = none."""
        names = Counter(name for each in self.judged if each.own for name in each.others)
        name, count = names.most_common(1)[0] if names else ("", 0)
        return name if self.is_most(count) and self.given.borrowed.get(name, 0) >= self.given.needed else ""

    @cached_property
    def lender(self) -> str:
        """Return the worker whose prompts come in this one's events; empty = none."""
        name = max(self.given.borrowed, key=lambda each: self.given.borrowed[each], default="")
        return name if name and self.given.borrowed[name] >= self.given.needed else ""

    @cached_property
    def is_scattered(self) -> bool:
        """Whether some prompts are computed here and some elsewhere, in turn."""
        away, total = len(self.judged) - self.own, len(self.judged)
        if total < 2 * self.given.needed or min(self.own, away) <= max(1, SOME * total):
            return False
        # One stretch of prompts without events is a loss; several in turn are engines.
        returns = sum(now.own and not before.own for before, now in zip(self.judged, self.judged[1:], strict=False))
        return returns > 1

    @cached_property
    def disagrees_both_ways(self) -> bool:
        over = [each for each in self.all_parted if self.is_over(each)]
        # Of what a cache that is too small evicted unannounced, the oldest is lost.
        young = sum(each.lost_since != NEVER and each.number - each.lost_since <= self._reused_age for each in over)
        return min(young, len(self.all_parted) - len(over)) > 1

    @cached_property
    def has_stopped(self) -> bool:
        """Whether nothing was stored since a prompt was announced, and further prompts were not."""
        last = self.judged[-self.given.needed :]
        is_silent = 1 < len(last) == self.given.needed and not any(each.own or each.others for each in last)
        # What earlier prompts stored may come behind the first of these.
        return is_silent and 0 < self.given.stored_blocks == last[1].stored_blocks

    @cached_property
    def late(self) -> int:
        return sum(each.own and each.delay_ms >= LATE_MS for each in self.judged)

    @cached_property
    def are_late(self) -> bool:
        return self.late >= self.given.needed and 2 * self.late >= len(self.judged)

    @cached_property
    def are_announced(self) -> bool:
        """Whether all that the worker computes comes in its own events, and soon."""
        soon = sum(each.own and each.delay_ms < SOON_MS for each in self.judged)
        return self.is_most(soon) and not self.late and self.given.missing_prompts <= 1

    # -- traffic ---------------------------------------------------------------------------------------------------

    @cached_property
    def foreign_share(self) -> float:
        started = self.given.own_requests + self.given.foreign_requests
        counted = self.given.foreign_requests / started if started else 0.0
        beside = sum(each.has_strangers for each in self.given.observations)
        return max(counted, beside / max(1, len(self.given.observations)))

    @cached_property
    def evicted_share(self) -> float:
        """Return the share of tokens sent before that no promise covered."""
        seen = sum(each.seen_tokens for each in self.given.observations)
        lost = sum(max(0, each.seen_tokens - each.promised_tokens) for each in self.given.observations)
        return lost / seen if seen else 0.0

    @cached_property
    def seen_share(self) -> float:
        prompt = sum(each.isl for each in self.given.observations)
        return sum(each.seen_tokens for each in self.given.observations) / prompt if prompt else 0.0

    @cached_property
    def is_crowded(self) -> bool:
        """Whether others' requests evict what this router sends."""
        return (
            len(self.given.observations) >= self.given.needed
            and self.foreign_share > FOREIGN_ABOVE
            and max(self.evicted_share, PARTED_ABOVE * bool(self.parted)) >= PARTED_ABOVE
            and self.seen_share > COLD_BELOW
            and not (self.parted and self.is_under)
        )

    @cached_property
    def returns_silently(self) -> bool:
        """Whether the worker often reuses what it was sent before and its events had taken back at the choice."""
        last = self.warm[-RECENT:]
        returned = [
            each
            for each in last
            if each.reported_tokens - each.chosen_tokens > self.given.block_size
            and NEVER < each.reused_since < each.settled
            and self.was_sent(each)
        ]
        tokens = sum(each.reported_tokens - each.chosen_tokens for each in returned)
        return (
            len(returned) >= self.given.needed
            and tokens > PARTED_ABOVE * sum(each.reported_tokens for each in last)
            and self.are_announced
            and self.given.stream == "live"
            and self.never_over
            and self.were_announced(returned)
        )

    @cached_property
    def is_older(self) -> bool:
        """Whether all that was reused beyond the promise is what the worker was sent before."""
        return all(map(self.was_sent, self.parted)) and self.were_announced(self.parted)

    def was_sent(self, each: Observation) -> bool:
        """Return whether the worker was sent before what it reused, as far as prompts are remembered."""
        return each.sent_tokens + self.given.block_size >= each.reported_tokens // 5 * 4

    def were_announced(self, observations: Sequence[Observation]) -> bool:
        """Return whether the events of requests that brought what was reused are known to have come."""
        known = {each.number for each in self.given.announcements if each.own}
        return sum(each.reused_since in known for each in observations) >= self.given.needed


_Rule = tuple[Cause, Callable[[_Figures], bool]]

_OF_LENGTHS: Final[tuple[_Rule, ...]] = (
    (Cause.TRUNCATED, lambda f: f.are_cut),
    (Cause.ADDED_TOKENS, lambda f: 0 < abs(f.added_tokens) <= ADDED_MAX and f.is_most(f.nowhere)),
    # Where prompts begin alike, the end differs.
    (
        Cause.TEMPLATE,
        lambda f: abs(f.added_tokens) > ADDED_MAX or (f.added_tokens != 0 and f.is_most(f.own)),
    ),
    (Cause.TOKENIZER, lambda f: f.are_lengths_uneven),
    (Cause.UNKNOWN, lambda f: len(f.warm) < f.given.needed),
    (Cause.AGREES, lambda f: not f.parted),
    (Cause.REUSES_MORE, lambda f: f.is_under),
    (Cause.REUSES_LESS, lambda f: True),
)
"""Where prompt lengths differ."""

_WITHOUT_FAULT: Final[tuple[_Rule, ...]] = (
    (Cause.SAME_ENGINE, lambda f: bool(f.twin)),
    (Cause.SHARED_URL, lambda f: f.is_scattered and (f.stranger[1] > 1 or f.disagrees_both_ways)),
    (Cause.CACHING_OFF, lambda f: f.never_reuses and f.stores_nothing),
    (Cause.FOREIGN, lambda f: f.is_crowded),
    (Cause.WINDOW, lambda f: f.resume_step > 0 and f.given.has_windows),
    (Cause.GROUP, lambda f: f.resume_step > 0),
    (Cause.RECOMPUTED, lambda f: f.recomputed_tokens > 0),
    (Cause.COLD, lambda f: not f.parted and len(f.given.observations) >= f.given.needed and f.seen_share < COLD_BELOW),
    (Cause.UNKNOWN, lambda f: not f.parted and len(f.warm) < f.given.needed),
    (Cause.TIER, lambda f: not f.parted and f.returns_silently),
    (Cause.RESTART, lambda f: f.is_flushed and f.given.steps_fell),
    (Cause.ASLEEP, lambda f: f.is_flushed and f.given.agreed_requests >= f.given.needed),
    (Cause.AGREES, lambda f: not f.parted),
)
"""What shows however few tokens are in dispute, and the verdicts without any."""

_OF_REUSE: Final[tuple[_Rule, ...]] = (
    (Cause.CROSSED, lambda f: f.is_away),
    (Cause.WRONG_ENDPOINT, lambda f: not f.given.was_live or (f.is_most(f.nowhere) and bool(f.lender))),
    (Cause.GAP, lambda f: f.given.stream in ("stale", "replaying")),
    (Cause.NO_EVENTS, lambda f: f.is_under and f.stores_nothing and f.given.silent_ms >= QUIET_MS),
    # A worker takes back all that it reported when it has lost events; an engine that cleared its cache reuses nothing.
    (Cause.GAP, lambda f: f.given.was_cleared and f.is_under),
    (Cause.RESTART, lambda f: f.given.is_renewed and f.is_under and not f.is_most(f.nowhere)),
    (Cause.SALT, lambda f: f.only_in("salt")),
    (Cause.ADAPTER, lambda f: f.only_in("adapter")),
    (Cause.EVENTS_LATE, lambda f: f.is_under and f.are_late),
    (Cause.EVENTS_STOPPED, lambda f: f.is_under and f.has_stopped),
    (Cause.BLOCK_SIZE, lambda f: f.is_under and f.is_most(f.nowhere) and f.shows_block_size),
    (Cause.UNMATCHED, lambda f: f.is_under and f.is_most(f.nowhere) and not f.stores_nothing),
    (Cause.TIER, lambda f: f.is_under and f.are_announced and f.never_over and f.is_older),
    (Cause.REUSES_MORE, lambda f: f.is_under),
    (Cause.REUSES_LESS, lambda f: True),
)  # fmt: skip
"""Where reuse differs from what was promised."""


def diagnose(evidence: WorkerEvidence) -> ReuseVerdict:
    """Return the verdict on a worker."""
    figures = _Figures(evidence)
    cause = _cause(figures)
    parted = figures.lengths_differ if cause in _LENGTHS else figures.all_parted if cause.is_fault else []
    return ReuseVerdict(
        evidence.worker,
        cause,
        tuple(_words(figures, cause, parted)),
        parted[0].request_id if parted else "",
        len(evidence.observations),
        sum(each.promised_tokens for each in evidence.observations),
        sum(each.reported_tokens for each in evidence.observations),
    )


def _cause(figures: _Figures) -> Cause:
    given = figures.given
    if given.proofs:
        return given.proofs[0][0]
    if given.events_fault:
        return Cause.EVENTS_UNFIT
    if not given.observations and given.unreported_requests >= given.needed:
        return Cause.UNREPORTED
    rules = _OF_LENGTHS if figures.are_lengths_off else (*_WITHOUT_FAULT, *_OF_REUSE)
    return next(cause for cause, fits in rules if fits(figures))


_LENGTHS: Final = (Cause.TRUNCATED, Cause.ADDED_TOKENS, Cause.TEMPLATE, Cause.TOKENIZER)


def _words(figures: _Figures, cause: Cause, parted: Sequence[Observation]) -> list[str]:
    given = figures.given
    observations = given.observations
    promised = sum(each.promised_tokens for each in observations)
    reported = sum(each.reported_tokens for each in observations)
    words = [f"{len(observations)} requests: {promised:,} tokens promised, {reported:,} reported as reused"]
    if parted:
        first = parted[0]
        words.append(
            f"first difference: request {first.request_id}, {first.promised_tokens:,} tokens promised and "
            f"{first.reported_tokens:,} reported; {len(parted)} requests since"
        )
    words += _of_cause(figures, cause, parted)
    words += [each for _, each in given.proofs]
    if given.events_fault:
        words.append(given.events_fault)
    if given.stream != "live":
        words.append(
            f"its event stream is {given.stream}" + (f": {given.stream_reason}" if given.stream_reason else "")
        )
    if cause in (Cause.COLD, Cause.UNKNOWN, Cause.AGREES):
        words.append(f"{figures.seen_share:.0%} of the prompt tokens had been sent before")
    if cause.is_fault:
        words.append(f"{given.held_blocks:,} blocks in the index")
        if figures.judged:
            words.append(_announced(figures))
    return words


def _announced(figures: _Figures) -> str:
    total = len(figures.judged)
    words = f"blocks of {figures.own} of {total} new prompts came in its events"
    name, count = figures.stranger
    if count:
        words += f", of {count} in those of {name} alone"
    return f"{words}, of {figures.nowhere} in none" if figures.nowhere else words


def _of_cause(figures: _Figures, cause: Cause, parted: Sequence[Observation]) -> list[str]:
    """Return what shows this cause."""
    given = figures.given
    if figures.are_lengths_off:
        first = figures.lengths_differ[0]
        return [f"prompt of {first.isl:,} tokens at the router, {first.reported_isl:,} at the engine"]
    if cause is Cause.BLOCK_SIZE and figures.reuse_step:
        return [f"reported reuse is in multiples of {figures.reuse_step} tokens, blocks have {given.block_size}"]
    if cause in (Cause.GROUP, Cause.WINDOW) and figures.resume_step:
        return [f"reported reuse is the promise cut to a multiple of {figures.resume_step} tokens"]
    if cause is Cause.RECOMPUTED and figures.recomputed_tokens:
        return [f"reported reuse is {figures.recomputed_tokens} tokens less than promised, each time"]
    if cause is Cause.ASLEEP:
        return [f"{figures.flushes} times all that was computed before was lost, and what came after was reused"]
    if cause is Cause.WRONG_ENDPOINT and figures.lender:
        return [f"blocks of {given.borrowed[figures.lender]} prompts that {figures.lender} was sent came in its events"]
    if cause is Cause.SAME_ENGINE:
        return [f"its prompts come in the events of {figures.twin} too, and the other way round"]
    if cause is Cause.EVENTS_LATE:
        delays = [each.delay_ms for each in figures.judged if each.own]
        return [f"blocks of {len(delays)} prompts came up to {max(delays) / 1000:.0f} s after their requests"]
    if cause in (Cause.UNMATCHED, Cause.REUSES_MORE) and given.observations:
        keyed = sorted({each.domain for each in given.observations} - {""})
        if keyed and all(each.domain for each in given.observations):
            return [f"all of its requests have a {' or '.join(keyed)}, which events may leave out"]
    if cause is Cause.FOREIGN:
        words = f"{figures.evicted_share:.0%} of the tokens sent before are evicted"
        if given.foreign_requests:
            total = given.own_requests + given.foreign_requests
            return [f"{given.foreign_requests:,} of {total:,} started requests were not sent by this router; {words}"]
        return [f"its engine had requests of others during {figures.foreign_share:.0%} of its own; {words}"]
    return []
