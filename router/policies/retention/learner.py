"""How long the blocks of each prompt are worth keeping, learnt from the prompts that came before.

Theory of operation
    1. ``advise`` looks at a prompt and says how long its blocks should stay: which of its runs came how often, which
       turn of a conversation it is, and what became of such runs before (``return_times``). It changes nothing.
       ``begin`` takes the same prompt in when it goes to a worker, ``started`` and ``end`` hear what the worker says.
    2. Priorities never rise along a prompt, nor do durations, and a run never has less than what was said before of
       anything that hangs off it, while that holds. So no engine evicts a block before what continues it.
    3. Three ghosts of all caches together hear of the same requests: one with these priorities, one without, and one
       without that has a tenth more room. What is learnt is said only while the first finds more than the second, and
       not where the third shows that room is nearly enough. Where keeping does not pay, engines are left to themselves.
       A ghost for each worker would not do: prompts go where their blocks are, and so the ghost that is like the real
       caches finds more, whichever that is.
    4. Prompts with different seeds (model, adapter, cache salt) share nothing: what is learnt of one kind of prompt is
       not said of another. They share the room, by how much of it they ask for.
    5. Everything is a function of the calls and their times: no clock, no chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import msgspec

from poolgrid.router.core.decision import Decision
from poolgrid.router.core.observers import IsOpen, Observer
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.core.selector import PROMPT_STAGES
from poolgrid.router.policies.retention.ghost_cache import GhostCache, GhostState, Kept
from poolgrid.router.policies.retention.prefix_history import GRANULE_TOKENS, GRANULES_MAX, PrefixHistory, Run
from poolgrid.router.policies.retention.return_times import NOTHING, Keep, Plan, ReturnTimes
from poolgrid.wire.card import WorkerCard
from poolgrid.wire.identifiers import WorkerId, WorkerKey
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

PLAN_EVERY_MS = 10_000.0
"""How often it is worked out anew what is kept; it takes a few milliseconds."""

LEARNING_MS = 30_000.0
"""Nothing is kept before counts stand for so long: rates would mean nothing."""

ROOM_SHARE = 1.5
"""How much of the room is given away. More than there is: what is worth least goes first where it does not fit, and a
worker that has room for a while keeps more."""

LOWEST_KEPT = 40
PRIORITY_STEPS_PER_OCTAVE = 12
"""What is worth twice as much for its room has a priority higher by 12: 100 is 32 times what just fits."""

NOT_KEPT = 30
"""Priority of what is not worth keeping: it goes before all that nobody spoke of. The lowest with which TensorRT-LLM
moves a block to the host, where there is a host tier."""

SPENT = 10
"""Priority of what has never come again: the rest behind the last granule, and the output. No host tier gets it."""

USUAL_OUTPUT_TOKENS = 343
"""Output that a prompt's request is taken to leave in a cache where nothing is known: the mean of a published chat
trace. Room that is taken for filled with what is not there makes a cache look too small that is not."""

USUAL_OUTPUTS = 3.0
"""Requests that this counts as, beside those that were seen: a minute of a few requests a second is enough to know
better."""

LONGEST_ANSWER_MS = 60_000.0
"""Durations count from when a request is over, which the router cannot know when it sends it: so much later at most."""

GHOST_GRANULES_MAX = 32_768
"""Room of a ghost, 3 to 5 MiB: 17 million tokens. Of larger caches it has one granule of two, four, …; copied for
a checkpoint in some milliseconds."""

LRU_GHOSTS_MAX = 16
"""Workers of which it is counted what they reuse that they would have lost: enough to see whether keeping helps."""

GHOST_MEMORY_MS = 600_000.0
"""After ten minutes a ghost's find counts 1/e."""

PAYS, PAYS_NO_MORE = 1.1, 1.04
"""How much more the ghost with priorities must find before what is learnt is said, and until it is said no more."""

LATELY_MS = 120_000.0
"""After two minutes a ghost's find counts 1/e where it is asked whether keeping has begun to harm: long enough for some
dozens of prompts, short against the ten minutes after which a gain of before is forgotten."""

NEARLY, OFTEN = 1.1, 0.1
"""How much more room a third ghost has, which has no priorities either, and of what share of all prompts it finds more
than the one with less room where room is nearly enough. Prompts that come in turn lose all in one cache that lacks a
little, and much less in the caches of several workers, of which some lack nothing. Where keeping finds no more than a
tenth more room would, nothing is said then. Of conversations more room finds more of a prompt in a hundred."""

AT_ONCE = 1.25
"""How many times what the third ghost finds keeping must find there before it begins to be said."""

HARMS = 0.98
"""What is learnt is said no more when the ghost with priorities has found less than this of the other's, lately."""

LOST_MS = 3_600_000.0
"""After an hour a request of whose end nobody spoke is taken to be over."""

LOST_AT_ONCE = 1_000
"""Of them are let go at one time, the oldest: most of those that a router has under way."""

SEEDS_MAX = 256
"""Seeds that are learnt of at a time; of more, that whose prompts came last longest ago is forgotten."""

NO_TAIL = 0.5
"""A rest behind the last granule that comes again less often than this, when its prompt does, is spent."""


class Chapter:
    """What is known of the prompts of one seed."""

    __slots__ = ("history", "plan", "tails", "tails_returned", "times")

    def __init__(self, granules_max: int) -> None:
        self.history = PrefixHistory(granules_max)
        self.times = ReturnTimes(KINDS, KINDS_PER_STEP)
        self.plan: Plan = NOTHING
        self.tails = 0
        """Prompts that came again, with something behind their last granule."""
        self.tails_returned = 0
        """Those of them of which that came again too."""

    @property
    def keeps_tails(self) -> bool:
        """Tell whether what is behind the last granule comes again."""
        return self.tails_returned >= NO_TAIL * self.tails


class Held(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A prompt that a worker has."""

    granules: list[int]
    kept: list[Kept]
    rest: float
    """Granules that its last tokens and its output fill."""
    granule_tokens: int
    found: int
    """Granules that the worker would have had without priorities; -1 where that is not counted."""
    generation: int
    """Of the ghosts that have it."""
    begun_ms: float
    block_size: int = 0
    blocks: int = 0
    """Of the prompt alone; 0 where that was not noted."""


class ChapterState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is known of the prompts of one seed, as values."""

    model: str
    seed: int
    runs: list[Run]
    """Those that came last longest ago first."""
    visits: list[float]
    returned: dict[int, list[float]]
    weight_ms: float
    as_of_ms: float | None
    plan: Plan
    tails: int
    tails_returned: int
    noted: float = 0.0


class LearnerState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All that a learner's advice depends on, as values; what it only counts is not in it."""

    chapters: list[ChapterState]
    room: list[tuple[str, int, int]]
    """Name and rank of workers, and the granules that each has room for."""
    kept: GhostState
    plain: GhostState
    every: int
    generation: int
    rest: float
    held: list[tuple[str, int, str, Held]]
    """Name and rank of a worker, the id of a dispatch, and the prompt."""
    held_granules: float
    usually_held: float
    spent: int
    plan_at_ms: float
    now_ms: float
    own: float
    all: float
    kept_hits: float
    plain_hits: float
    pays: bool
    spoke: bool = False
    kept_lately: float = 0.0
    plain_lately: float = 0.0
    roomier: GhostState | None = None
    roomier_hits: float = 0.0
    prompts: float = 0.0
    roomier_prompts: float = 0.0
    outputs: float = USUAL_OUTPUTS
    output_tokens: float = USUAL_OUTPUTS * USUAL_OUTPUT_TOKENS


class _Look(msgspec.Struct, frozen=True, gc=False):
    """A prompt beside what is known."""

    found: list[tuple[int, Run, int]]
    known: int
    """Granules that came before."""
    turn: int
    kinds: list[int]
    """Of each run, a new one included."""
    kept: list[Kept]


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


class RetentionLearner(Observer):
    """Learns from one router's requests; ``granules_max`` bounds what is known of each seed, and of all together."""

    name = "retention"
    needs_seeds = True

    def __init__(self, granules_max: int = GRANULES_MAX) -> None:
        self._granules_max = granules_max
        self._chapters: OrderedDict[tuple[str, int], Chapter] = OrderedDict()
        """By model and seed, that which was used last at the end."""
        self._room: dict[WorkerKey, int] = {}
        self._kept, self._plain, self._roomier = GhostCache(1), GhostCache(1), GhostCache(1)
        """All caches together: with priorities, without, and without but with more room."""
        self._every = 1
        """Of which they have one granule of so many, a power of two."""
        self._generation = 0
        self._lru: dict[WorkerKey, GhostCache] = {}
        """Caches of workers as they would be without priorities, for requests that go where they go with them."""
        self._rest = 0.0
        self._rests: dict[WorkerKey, float] = {}
        """Parts of granules that are still to be added to ghosts."""
        self._held: dict[tuple[WorkerKey, str], Held] = {}
        self._held_granules = 0.0
        self._usually_held = 0.0
        self._spent = self._lru_spent = 0
        """Names of what nobody will ask for: apart, as what only counts is in no checkpoint."""
        self._plan_at_ms = 0.0
        self._now_ms = 0.0
        self._own = self._all = 0.0
        """Requests that this router sent, and that the workers said of any router's that they began."""
        self.kept_hits = self.plain_hits = 0.0
        self._roomier_hits = 0.0
        self._prompts = self._roomier_prompts = 0.0
        """How many there were, and of how many more room found more; both fade."""
        self._kept_lately = self._plain_lately = 0.0
        self._outputs, self._output_tokens = USUAL_OUTPUTS, USUAL_OUTPUTS * USUAL_OUTPUT_TOKENS
        """Requests that ended, and the tokens that each left beside its prompt; both fade."""
        self.pays = False
        """Whether what is learnt is said."""
        self._spoke = False
        """Whether it ever was."""
        self.gained_tokens = self.lost_tokens = 0
        """Tokens that workers reused and a cache without priorities would not have had, and the other way round."""

    def advise(self, request: RoutingRequest, path: Sequence[int], now_ms: float) -> KvRetention | None:
        """Return how long a prompt's blocks should stay; ``None`` = as long as others. Changes nothing."""
        if not self._spoke:
            return None
        step = max(1, GRANULE_TOKENS // request.block_size)
        granules = list(path[step - 1 :: step])
        if not self.pays:
            # Where nothing is said, blocks that are reused have for ever what was said of them before.
            return KvRetention((RetainedTokens(0, request.isl, RETENTION_DEFAULT),)) if granules else None
        chapter = self._chapters.get((request.model, request.seed))
        if chapter is None or not granules or chapter.plan is NOTHING:
            return None
        return _said(self._look(chapter, granules, request.isl, now_ms).kept, chapter, request, step)

    def on_decided(self, decision: Decision, card: WorkerCard, path: Sequence[int], now_ms: float) -> None:
        """Let a decision say how long the prompt's blocks should stay, where the worker takes it."""
        if card.takes_retention and decision.request.stage in PROMPT_STAGES:
            decision.retention = self.advise(decision.request, path, now_ms)

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        if card.takes_retention and decision.request.stage in PROMPT_STAGES:
            # What is on workers that cannot be told is no part of what is shared out.
            self.begin(decision.worker, card.limits.total_kv_blocks, dispatch_id, decision.request, path, now_ms)

    def begin(
        self,
        worker: WorkerKey,
        total_blocks: int,
        dispatch_id: str,
        request: RoutingRequest,
        path: Sequence[int],
        now_ms: float,
    ) -> None:
        """Take in a prompt that goes to a worker whose cache has ``total_blocks``."""
        self._own += 1
        self._now_ms = now_ms
        if now_ms >= self._plan_at_ms:
            self._plan_at_ms = now_ms + PLAN_EVERY_MS
            self._make_plans(now_ms)
        step = max(1, GRANULE_TOKENS // request.block_size)
        granules = list(path[step - 1 :: step])
        if not granules:
            return
        self._room[worker] = max(1, total_blocks // step)
        chapter = self._chapter((request.model, request.seed))
        look = self._look(chapter, granules, request.isl, now_ms)
        _note(chapter, granules, path, request.isl, look, step, now_ms)
        self._bound(chapter)
        granule_tokens = step * request.block_size
        rest = (request.isl + self._output_tokens / self._outputs) / granule_tokens - len(granules)
        found = self._begin_ghosts(worker, granules, now_ms)
        held = Held(
            granules,
            look.kept,
            rest,
            granule_tokens,
            found,
            self._generation,
            now_ms,
            request.block_size,
            request.blocks,
        )
        self._held[(worker, dispatch_id)] = held
        self._held_granules += len(granules) + rest

    def on_started(self, worker: WorkerKey, request_id: str, cached_tokens: int) -> None:
        """Count what a worker reused of a prompt; also of prompts that other routers sent."""
        self._all += 1
        held = self._held.get((worker, request_id))
        if held is not None and held.found >= 0:
            more = cached_tokens // held.granule_tokens - held.found
            if more > 0:
                self.gained_tokens += more * held.granule_tokens
            else:
                self.lost_tokens -= more * held.granule_tokens

    def on_finished(self, worker: WorkerKey, request_id: str, blocks: int | None, now_ms: float) -> None:
        """Let the ghosts have what a request left, which had so many blocks in the end, where that is known."""
        held = self._held.pop((worker, request_id), None)
        if held is None:
            return
        if blocks is not None and held.blocks:
            self._outputs += 1.0
            self._output_tokens += max(0, blocks - held.blocks) * held.block_size
        self._held_granules -= len(held.granules) + held.rest
        if held.generation == self._generation:
            granules, kept = self._sample(held.granules, held.kept)
            self._kept.end(granules, kept, now_ms)
            for plain in (self._plain, self._roomier):
                plain.end(granules, ((len(granules), RETENTION_DEFAULT, 0),), now_ms)
            self._rest += held.rest / self._every
            while self._rest >= 1.0:
                self._rest -= 1.0
                self._spent -= 1
                self._kept.add_spent(self._spent, SPENT, now_ms)
                self._plain.add_spent(self._spent, RETENTION_DEFAULT, now_ms)
                self._roomier.add_spent(self._spent, RETENTION_DEFAULT, now_ms)
        lru = self._lru.get(worker)
        if lru is not None and held.found >= 0:
            lru.end(held.granules, ((len(held.granules), RETENTION_DEFAULT, 0),), now_ms)
            rest = self._rests[worker] + held.rest
            while rest >= 1.0:
                rest -= 1.0
                self._lru_spent -= 1
                lru.add_spent(self._lru_spent, RETENTION_DEFAULT, now_ms)
            self._rests[worker] = rest

    def on_released(self, worker: WorkerKey, request_id: str, blocks: int | None) -> None:
        self.on_finished(worker, request_id, blocks, self._now_ms)

    def on_cleared(self, worker: WorkerKey) -> None:
        """Forget a worker that has lost its cache."""
        self._room.pop(worker, None)
        self._lru.pop(worker, None)
        self._rests.pop(worker, None)
        for key in [key for key in self._held if key[0] == worker]:
            # The ghosts of all caches have no way to lose what one worker had; it is idle there from now on.
            self.on_finished(worker, key[1], None, self._now_ms)

    def on_left(self, worker: WorkerKey) -> None:
        self.on_cleared(worker)

    def on_snapshot(self, workers: Collection[WorkerKey], is_open: IsOpen) -> None:
        for worker in [worker for worker in self._room if worker not in workers]:
            self.on_left(worker)
        self.on_expired(is_open)

    def on_expired(self, is_open: IsOpen) -> None:
        for worker, request_id in [key for key in self._held if not is_open(*key)]:
            self.on_finished(worker, request_id, None, self._now_ms)

    def checkpoint(self) -> LearnerState:
        """Return all that advice depends on: references to what never changes, and copies of the rest."""
        return LearnerState(
            [
                ChapterState(
                    model,
                    seed,
                    chapter.history.runs(),
                    list(chapter.times.visits),
                    {kind: list(counts) for kind, counts in chapter.times.returned.items()},
                    chapter.times.weight_ms,
                    chapter.times.as_of_ms,
                    chapter.plan,
                    chapter.tails,
                    chapter.tails_returned,
                    chapter.times.noted,
                )
                for (model, seed), chapter in self._chapters.items()
            ],
            [(worker.worker_id, worker.dp_rank, granules) for worker, granules in self._room.items()],
            self._kept.state(),
            self._plain.state(),
            self._every,
            self._generation,
            self._rest,
            [(worker.worker_id, worker.dp_rank, name, held) for (worker, name), held in self._held.items()],
            self._held_granules,
            self._usually_held,
            self._spent,
            self._plan_at_ms,
            self._now_ms,
            self._own,
            self._all,
            self.kept_hits,
            self.plain_hits,
            self.pays,
            self._spoke,
            self._kept_lately,
            self._plain_lately,
            self._roomier.state(),
            self._roomier_hits,
            self._prompts,
            self._roomier_prompts,
            self._outputs,
            self._output_tokens,
        )

    def restore(self, state: Any) -> None:
        """Go on from what another learner knew; what would be there without priorities is not counted of its prompts.

        Raises ``ValueError`` for one that knows other kinds.
        """
        state = msgspec.convert(state, LearnerState)
        self._chapters.clear()
        for each in state.chapters:
            if len(each.visits) != KINDS or any(not 0 <= kind < KINDS for kind in each.returned):
                raise ValueError(f"restoring what was learned: {len(each.visits)} kinds, this version has {KINDS}")
            chapter = self._chapters[each.model, each.seed] = Chapter(self._granules_max)
            chapter.history.restore(each.runs)
            chapter.times.visits = list(each.visits)
            chapter.times.returned = {kind: list(counts) for kind, counts in each.returned.items()}
            chapter.times.weight_ms, chapter.times.as_of_ms = each.weight_ms, each.as_of_ms
            chapter.plan = NOTHING if each.plan == NOTHING else each.plan
            chapter.times.noted = each.noted
            chapter.tails, chapter.tails_returned = each.tails, each.tails_returned
        self._room = {WorkerKey(WorkerId(name), rank): granules for name, rank, granules in state.room}
        self._kept, self._plain = GhostCache.of_state(state.kept), GhostCache.of_state(state.plain)
        self._roomier = GhostCache.of_state(state.roomier or state.plain)
        self._roomier_hits = state.roomier_hits
        self._prompts, self._roomier_prompts = state.prompts, state.roomier_prompts
        self._every, self._generation = state.every, state.generation
        self._lru, self._rests = {}, {}
        self._rest = state.rest
        self._held = {
            (WorkerKey(WorkerId(name), rank), dispatch_id): msgspec.structs.replace(held, found=-1)
            for name, rank, dispatch_id, held in state.held
        }
        self._held_granules, self._usually_held = state.held_granules, state.usually_held
        self._spent = state.spent
        self._plan_at_ms, self._now_ms = state.plan_at_ms, state.now_ms
        self._own, self._all = state.own, state.all
        self.kept_hits, self.plain_hits, self.pays = state.kept_hits, state.plain_hits, state.pays
        self._spoke = state.spoke or state.pays
        self._kept_lately, self._plain_lately = state.kept_lately, state.plain_lately
        self._outputs, self._output_tokens = state.outputs, state.output_tokens

    def __len__(self) -> int:
        return sum(len(chapter.history) for chapter in self._chapters.values())

    # -- within ----------------------------------------------------------------------------------------------------

    def _chapter(self, key: tuple[str, int]) -> Chapter:
        chapter = self._chapters.get(key)
        if chapter is None:
            chapter = self._chapters[key] = Chapter(self._granules_max)
            if len(self._chapters) > SEEDS_MAX:
                self._chapters.popitem(last=False)
        else:
            self._chapters.move_to_end(key)
        return chapter

    def _bound(self, current: Chapter) -> None:
        """Forget what was used last longest ago while all seeds together know too much."""
        if len(self._chapters) == 1:
            return
        known = len(self)
        while known > self._granules_max:
            key, oldest = next(iter(self._chapters.items()))
            if oldest is current:
                return
            known -= len(oldest.history)
            del self._chapters[key]

    @staticmethod
    def _look(chapter: Chapter, granules: list[int], isl: int, now_ms: float) -> _Look:
        found = chapter.history.find(granules)
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
        keep = chapter.plan.of(granules[-1] / 2**64)
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
        return _Look(found, known, turn, kinds, kept)

    def _begin_ghosts(self, worker: WorkerKey, granules: list[int], now_ms: float) -> int:
        """Let ghosts have a prompt; return what the worker would have had of it without priorities."""
        sampled, _ = self._sample(granules, ())
        kept, plain = self._kept.begin(sampled, now_ms), self._plain.begin(sampled, now_ms)
        self.kept_hits += kept
        self.plain_hits += plain
        self._kept_lately += kept
        self._plain_lately += plain
        roomier = self._roomier.begin(sampled, now_ms)
        self._roomier_hits += roomier
        self._prompts += 1.0
        self._roomier_prompts += roomier > plain
        lru = self._lru.get(worker)
        if lru is None:
            if len(self._lru) >= LRU_GHOSTS_MAX:
                return -1
            lru = self._lru[worker] = GhostCache(self._room[worker])
            self._rests[worker] = 0.0
        return lru.begin(granules, now_ms)

    def _sample(self, granules: list[int], kept: Sequence[Kept]) -> tuple[list[int], Sequence[Kept]]:
        """Return those granules that the ghosts of all caches have."""
        if self._every == 1:
            return granules, kept
        others = self._every - 1
        sampled = [granule for granule in granules if not granule & others]
        levels: list[Kept] = []
        at = 0
        for count, priority, duration_ms in kept:
            there = sum(not granule & others for granule in granules[at : at + count])
            levels.append((there, priority, duration_ms))
            at += count
        return sampled, levels

    def _resize_ghosts(self, granules: int) -> None:
        every = 1
        while granules > every * GHOST_GRANULES_MAX:
            every *= 2
        if every != self._every:
            self._every = every
            self._generation += 1
            self._kept, self._plain, self._roomier = GhostCache(1), GhostCache(1), GhostCache(1)
        self._kept.capacity = self._plain.capacity = max(1, granules // every)
        self._roomier.capacity = max(1, int(NEARLY * granules) // every)

    def _make_plans(self, now_ms: float) -> None:
        # Of whom nothing was heard for so long nothing will be.
        lost = [key for key, held in islice(self._held.items(), LOST_AT_ONCE) if held.begun_ms < now_ms - LOST_MS]
        for worker, dispatch_id in lost:
            self.on_finished(worker, dispatch_id, None, now_ms)
        if self._kept_lately < self._plain_lately * HARMS:
            # What it gained before says nothing of now.
            self.kept_hits = min(self.kept_hits, self.plain_hits)
        enough = self._roomier_hits * (1.0 if self.pays else AT_ONCE)
        is_nearly_enough = self.kept_hits <= enough and self._roomier_prompts > self._prompts * OFTEN
        if self.kept_hits <= self.plain_hits * PAYS_NO_MORE or is_nearly_enough:
            self.pays = False
        elif self.kept_hits > self.plain_hits * PAYS:
            self.pays = self._spoke = True
        factor = math.exp(-PLAN_EVERY_MS / GHOST_MEMORY_MS)
        self.kept_hits *= factor
        self.plain_hits *= factor
        self._roomier_hits *= factor
        self._prompts *= factor
        self._roomier_prompts *= factor
        # What is not known of outputs never fades, so that there is always something to divide by.
        self._outputs = USUAL_OUTPUTS + (self._outputs - USUAL_OUTPUTS) * factor
        unseen = USUAL_OUTPUTS * USUAL_OUTPUT_TOKENS
        self._output_tokens = unseen + (self._output_tokens - unseen) * factor
        lately = math.exp(-PLAN_EVERY_MS / LATELY_MS)
        self._kept_lately *= lately
        self._plain_lately *= lately
        # Of several routers each knows its own requests, and plans for as much of the room as these ask for.
        share = min(1.0, self._own / self._all) if self._all else 1.0
        self._own *= factor
        self._all *= factor
        self._resize_ghosts(int(share * sum(self._room.values())))
        for worker, lru in self._lru.items():
            lru.capacity = max(1, int(self._room[worker] * share))
        held = self._held_granules
        self._usually_held = 0.9 * self._usually_held + 0.1 * held if self._usually_held else held
        room = ROOM_SHARE * max(1.0, share * sum(self._room.values()) - self._usually_held)
        rates: list[float] = []
        for chapter in self._chapters.values():
            chapter.times.age(now_ms)
            rates.append(chapter.times.per_s if chapter.times.weight_ms > LEARNING_MS else 0.0)
        total = sum(rates)
        for chapter, rate in zip(self._chapters.values(), rates, strict=True):
            chapter.plan = chapter.times.plan(room * rate / total) if rate else NOTHING


def _level(keep: dict[int, Keep], kind: int) -> tuple[int, int]:
    own = keep.get(kind)
    return (NOT_KEPT, 0) if own is None else (priority_of(own), own.duration_ms)


def _note(
    chapter: Chapter, granules: list[int], path: Sequence[int], isl: int, look: _Look, step: int, now_ms: float
) -> None:
    """Let a chapter know of a prompt."""
    history, times = chapter.history, chapter.times
    found = look.found
    if found:
        number, run, size = found[-1]
        if size < len(run.granules):
            found[-1] = (number, history.cut(number, size), size)
        elif run.turn and run.end_block > look.known * step:
            chapter.tails += 1
            if run.end_block <= len(path) and path[run.end_block - 1] == run.end_hash:
                chapter.tails_returned += 1
    chain: list[tuple[int | None, Run]] = []
    for (number, run, size), kind, (_, priority, duration_ms) in zip(found, look.kinds, look.kept, strict=False):
        times.note_return(run.kind, now_ms - run.last_ms, size)
        times.note_visit(kind, size)
        until_ms = now_ms + duration_ms + LONGEST_ANSWER_MS
        chain.append(
            (
                number,
                Run(
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
        fresh = Run(
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


def _said(kept: Sequence[Kept], chapter: Chapter, request: RoutingRequest, step: int) -> KvRetention:
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
    if not chapter.keeps_tails:
        if start < request.isl:
            ranges.append(RetainedTokens(start, request.isl, SPENT))
        return KvRetention(tuple(ranges), SPENT)
    last = ranges[-1]
    ranges[-1] = RetainedTokens(last.start, request.isl, last.priority, last.duration_ms)
    return KvRetention(tuple(ranges), last.priority, last.duration_ms)
