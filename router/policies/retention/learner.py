"""How long the blocks of each prompt are worth keeping, learnt from the prompts that came before.

Theory of operation
    1. ``advise`` looks at a prompt and says how long its blocks should stay: which of its runs came how often, which
       turn of a conversation it is, and what became of such runs before (``return_times``). It changes nothing.
       ``begin`` takes the same prompt in when it goes to a worker; the rest is what the worker reports of it.
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

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import msgspec

from poolgrid.router.core.decision import Decision
from poolgrid.router.core.observers import IsOpen, Observer
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.core.selector import PROMPT_STAGES
from poolgrid.router.policies.retention.chapter import Chapter, ChapterState
from poolgrid.router.policies.retention.ghost_cache import GhostCache, GhostState
from poolgrid.router.policies.retention.ghosts import HeldPrompt, PoolGhosts
from poolgrid.router.policies.retention.prefix_history import GRANULE_TOKENS, GRANULES_MAX
from poolgrid.router.policies.retention.return_times import NOTHING
from poolgrid.wire.card import WorkerCard
from poolgrid.wire.identifiers import WorkerId, WorkerKey
from poolgrid.wire.requests import RETENTION_DEFAULT, KvRetention, RetainedTokens

PLAN_EVERY_MS = 10_000.0
"""How often it is worked out anew what is kept; it takes a few milliseconds."""

LEARNING_MS = 30_000.0
"""Nothing is kept before counts stand for so long: rates would mean nothing."""

ROOM_SHARE = 1.5
"""How much of the room is given away. More than there is: what is worth least goes first where it does not fit, and a
worker that has room for a while keeps more."""

USUAL_OUTPUT_TOKENS = 343
"""Output that a prompt's request is taken to leave in a cache where nothing is known: the mean of a published chat
trace. Room that is taken for filled with what is not there makes a cache look too small that is not."""

USUAL_OUTPUTS = 3.0
"""Requests that this counts as, beside those that were seen: a minute of a few requests a second is enough to know
better."""

LOST_MS = 3_600_000.0
"""After an hour a request of whose end nobody spoke is taken to be over."""

LOST_AT_ONCE = 1_000
"""Of them are let go at one time, the oldest: most of those that a router has under way."""

SEEDS_MAX = 256
"""Seeds that are learnt of at a time; of more, that whose prompts came last longest ago is forgotten."""


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
    held: list[tuple[str, int, str, HeldPrompt]]
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


_FIGURES_OF_GHOSTS = (
    "every", "generation", "rest", "spent", "kept_hits", "plain_hits", "pays", "spoke", "kept_lately", "plain_lately",
    "roomier_hits", "prompts", "roomier_prompts",
)  # fmt: skip
_FIGURES = (
    "held_granules", "usually_held", "plan_at_ms", "now_ms", "own", "all", "outputs", "output_tokens",
)  # fmt: skip
"""Figures that a checkpoint has by the names of their attributes."""


class RetentionLearner(Observer):
    """Learns from one router's requests; ``granules_max`` bounds what is known of each seed, and of all together."""

    name = "retention"
    needs_seeds = True

    def __init__(self, granules_max: int = GRANULES_MAX) -> None:
        self._granules_max = granules_max
        self._chapters: OrderedDict[tuple[str, int], Chapter] = OrderedDict()
        """By model and seed, that which was used last at the end."""
        self._room: dict[WorkerKey, int] = {}
        self.ghosts = PoolGhosts()
        self._held: dict[tuple[WorkerKey, str], HeldPrompt] = {}
        self._held_granules = 0.0
        self._usually_held = 0.0
        self._plan_at_ms = 0.0
        self._now_ms = 0.0
        self._own = self._all = 0.0
        """Requests that this router sent, and that the workers said of any router's that they began."""
        self._outputs, self._output_tokens = USUAL_OUTPUTS, USUAL_OUTPUTS * USUAL_OUTPUT_TOKENS
        """Requests that ended, and the tokens that each left beside its prompt; both fade."""
        self.gained_tokens = self.lost_tokens = 0
        """Tokens that workers reused and a cache without priorities would not have had, and the other way round."""

    @property
    def pays(self) -> bool:
        """Tell whether keeping pays, so that what is learnt is said."""
        return self.ghosts.pays

    def advise(self, request: RoutingRequest, path: Sequence[int], now_ms: float) -> KvRetention | None:
        """Return how long a prompt's blocks should stay; ``None`` = as long as others. Changes nothing."""
        if not self.ghosts.spoke:
            return None
        step = max(1, GRANULE_TOKENS // request.block_size)
        granules = list(path[step - 1 :: step])
        if not self.pays:
            # Where nothing is said, blocks that are reused have for ever what was said of them before.
            return KvRetention((RetainedTokens(0, request.isl, RETENTION_DEFAULT),)) if granules else None
        chapter = self._chapters.get((request.model, request.seed))
        if chapter is None or not granules or chapter.plan is NOTHING:
            return None
        return chapter.said(chapter.look(granules, request.isl, now_ms).kept, request, step)

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
        look = chapter.look(granules, request.isl, now_ms)
        chapter.note(granules, path, request.isl, look, step, now_ms)
        self._bound(chapter)
        granule_tokens = step * request.block_size
        rest = (request.isl + self._output_tokens / self._outputs) / granule_tokens - len(granules)
        found = self.ghosts.begin(worker, self._room[worker], granules, now_ms)
        held = HeldPrompt(
            granules,
            look.kept,
            rest,
            granule_tokens,
            found,
            self.ghosts.generation,
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
        self.ghosts.end(worker, held, now_ms)

    def on_released(self, worker: WorkerKey, request_id: str, blocks: int | None) -> None:
        self.on_finished(worker, request_id, blocks, self._now_ms)

    def on_cleared(self, worker: WorkerKey) -> None:
        """Forget a worker that has lost its cache."""
        self._room.pop(worker, None)
        self.ghosts.forget(worker)
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
        ghosts = self.ghosts
        return LearnerState(
            chapters=[chapter.state(model, seed) for (model, seed), chapter in self._chapters.items()],
            room=[(worker.worker_id, worker.dp_rank, granules) for worker, granules in self._room.items()],
            kept=ghosts.kept.state(),
            plain=ghosts.plain.state(),
            roomier=ghosts.roomier.state(),
            held=[(worker.worker_id, worker.dp_rank, name, held) for (worker, name), held in self._held.items()],
            **{name: getattr(ghosts, name) for name in _FIGURES_OF_GHOSTS},
            **{name: getattr(self, f"_{name}") for name in _FIGURES},
        )

    def restore(self, state: Any) -> None:
        """Go on from what another learner knew; what would be there without priorities is not counted of its prompts.

        Raises ``ValueError`` for one that knows other kinds.
        """
        state = msgspec.convert(state, LearnerState)
        self._chapters.clear()
        for each in state.chapters:
            chapter = self._chapters[each.model, each.seed] = Chapter(self._granules_max)
            chapter.restore(each)
        self._room = {WorkerKey(WorkerId(name), rank): granules for name, rank, granules in state.room}
        self._held = {
            (WorkerKey(WorkerId(name), rank), dispatch_id): msgspec.structs.replace(held, found=-1)
            for name, rank, dispatch_id, held in state.held
        }
        for name in _FIGURES:
            setattr(self, f"_{name}", getattr(state, name))
        ghosts = self.ghosts
        for name in _FIGURES_OF_GHOSTS:
            setattr(ghosts, name, getattr(state, name))
        ghosts.spoke = state.spoke or state.pays
        ghosts.kept, ghosts.plain = GhostCache.of_state(state.kept), GhostCache.of_state(state.plain)
        ghosts.roomier = GhostCache.of_state(state.roomier or state.plain)
        ghosts.forget_workers()

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

    def _make_plans(self, now_ms: float) -> None:
        # Of whom nothing was heard for so long nothing will be.
        lost = [key for key, held in islice(self._held.items(), LOST_AT_ONCE) if held.begun_ms < now_ms - LOST_MS]
        for worker, dispatch_id in lost:
            self.on_finished(worker, dispatch_id, None, now_ms)
        self.ghosts.judge()
        factor = self.ghosts.fade(PLAN_EVERY_MS)
        # What is not known of outputs never fades, so that there is always something to divide by.
        self._outputs = USUAL_OUTPUTS + (self._outputs - USUAL_OUTPUTS) * factor
        unseen = USUAL_OUTPUTS * USUAL_OUTPUT_TOKENS
        self._output_tokens = unseen + (self._output_tokens - unseen) * factor
        # Of several routers each knows its own requests, and plans for as much of the room as these ask for.
        share = min(1.0, self._own / self._all) if self._all else 1.0
        self._own *= factor
        self._all *= factor
        self.ghosts.resize(int(share * sum(self._room.values())))
        self.ghosts.resize_workers(self._room, share)
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
