"""Routers that know what none can know, and a bound that none can pass: what TTFTs of a simulated pool compare with.

The *clairvoyant* router knows how fast every worker is, now and later, when each step under way ends, and what is left
of each prompt. It tries a request on every worker and takes the one where all TTFTs together grow least. With
``together`` it also knows all requests that come at one moment, and moves and swaps them until nothing gets better;
only the first of a kind is looked for, so a better choice may exist. ``least_ttfts`` says what no choice can pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import Candidates, Choice, RoutingRequest
from poolgrid.kernel.wire.events import RequestStarted
from poolgrid.plugins.simulated.core.engine import SimulatedLimits, StepOutcome
from poolgrid.plugins.simulation.pool import RouterFleet, SimulatedPool
from poolgrid.plugins.simulation.workload import SimulatedRequest, WorkerSpeeds, Workload
from poolgrid.server.workers.timing import TimingModel

ROUNDS_MAX = 8
"""How often all requests of a moment are looked at anew; most are settled after two."""

Prompts = tuple[tuple[float, int], ...]
"""When each came and how many tokens are left to compute, in order."""


class Clairvoyant:
    """The choice of ``ClairvoyantPool``, which makes it before it asks."""

    needs_overlap = False
    row = 0

    def __init__(self, together: bool = False) -> None:
        self.together = together
        self.name = "clairvoyant, together" if together else "clairvoyant"

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Return what was chosen."""
        return Choice(self.row, self.name)


class ClairvoyantPool(SimulatedPool):
    """A pool whose router looks into the engines."""

    def __init__(
        self,
        workload: Workload,
        policy: Clairvoyant,
        workers: int,
        limits: SimulatedLimits,
        timing: TimingModel,
        speeds: WorkerSpeeds | None = None,
    ) -> None:
        unbounded = RouterFleet(waits_for_engines=False)
        super().__init__(workload, policy, workers, limits, timing, routers=unbounded, speeds=speeds)
        self._limits, self._timing, self._true = limits, timing, speeds or WorkerSpeeds()
        self._clairvoyant = policy
        self._step_ends = [0.0] * workers
        self._prompts: list[dict[str, list[float]]] = [{} for _ in range(workers)]
        """Of each worker, when a request came and how many tokens are left, steps under way counted as done."""
        self._moments = {
            moment: list(group) for moment, group in groupby(workload.requests, lambda each: each.arrival_ms)
        }
        self._plan: dict[str, int] = {}

    def begin_step(self, number: int, now: float, horizon: float) -> StepOutcome | None:
        """Note when the step will end, and what it computes."""
        outcome = super().begin_step(number, now, horizon)
        if outcome is None:
            return None
        self._step_ends[number] = outcome.ended_ms
        prompts = self._prompts[number]
        for fact in outcome.facts:
            if isinstance(fact, RequestStarted) and fact.request_id in prompts:
                prompts[fact.request_id][1] = fact.isl - fact.cached_tokens
        computed: float = outcome.prefill_tokens
        for request_id in list(prompts):
            taken = min(computed, prompts[request_id][1])
            prompts[request_id][1] -= taken
            computed -= taken
            if prompts[request_id][1] <= 0:
                del prompts[request_id]
            if not computed:
                break
        return outcome

    def arrive(self, request: SimulatedRequest, now: float) -> None:
        """Choose with all knowledge, and go on as any pool does."""
        policy = self._clairvoyant
        if not policy.together:
            policy.row = self._divide([request], now)[0]
        else:
            if request is self._moments[now][0]:
                group = self._moments[now]
                self._plan = {each.request_id: row for each, row in zip(group, self._divide(group, now), strict=True)}
            policy.row = self._plan[request.request_id]
        super().arrive(request, now)

    def _send(self, router: int, request: SimulatedRequest, decision: Decision, now: float) -> None:
        uncached = self._uncached(request)[self._clairvoyant.row]
        super()._send(router, request, decision, now)
        self._prompts[self._sent[-1]][request.request_id] = [now, uncached]

    def _uncached(self, request: SimulatedRequest) -> list[int]:
        """Return the tokens that each worker would have to compute, at least one."""
        block_size, index = self._workload.block_size, self.projection.index
        rows = [request.isl] * len(self.engines)
        slots = [index.slot(key) for key in self._keys]
        for depth, mask in index.find(request.path):
            for number, slot in enumerate(slots):
                if mask >> slot & 1:
                    rows[number] = request.isl - block_size * min(depth, (request.isl - 1) // block_size)
        return rows

    def _divide(self, group: Sequence[SimulatedRequest], now: float) -> list[int]:
        """Return the worker of each request of a group that comes now."""
        uncached = [self._uncached(request) for request in group]
        known: dict[tuple[int, tuple[int, ...]], float] = {}

        def total(number: int, members: tuple[int, ...]) -> float:
            key = (number, members)
            if key not in known:
                known[key] = self._ttfts_ms(number, now, tuple((now, uncached[each][number]) for each in members))
            return known[key]

        def gain(number: int, members: tuple[int, ...], one: int) -> float:
            return total(number, tuple(sorted((*members, one)))) - total(number, members)

        workers = range(len(self.engines))
        at: list[int] = []
        on: list[tuple[int, ...]] = [() for _ in workers]
        for one in range(len(group)):
            best = min(workers, key=lambda number: gain(number, on[number], one))
            at.append(best)
            on[best] = (*on[best], one)
        for _ in range(ROUNDS_MAX if len(group) > 1 else 0):
            before = list(at)
            for one in range(len(group)):
                _move(one, at, on, gain)
                for other in range(len(group)):
                    _swap(one, other, at, on, total)
            if at == before:
                break
        return at

    def _ttfts_ms(self, number: int, now: float, more: Prompts) -> float:
        """Return the sum of the TTFTs of a worker's open prompts, with more behind them."""
        prompts = [*((each[0], each[1]) for each in self._prompts[number].values()), *more]
        load = self.engines[number].load()
        decode_ms = self._timing.decode_ms(load.active_blocks / load.total_blocks)
        decoding = load.running_requests > 0
        at_ms, total_ms = max(now, self._step_ends[number]), 0.0
        room = step_tokens = self._limits.max_num_tokens
        in_step: list[float] = []

        def step(tokens: float) -> None:
            nonlocal at_ms, total_ms, decoding
            at_ms += (self._timing.prefill_ms(int(tokens)) + decode_ms * decoding) / self._true.at(number, at_ms)
            total_ms += sum(at_ms - came_ms for came_ms in in_step)
            decoding = decoding or bool(in_step)
            in_step.clear()

        for came_ms, tokens in prompts:
            left = int(tokens)
            while left >= room:
                left -= room
                room = step_tokens
                if not left:
                    in_step.append(came_ms)
                step(step_tokens)
            if left:
                room -= left
                in_step.append(came_ms)
        if room < step_tokens:
            step(step_tokens - room)
        return total_ms


def _move(
    one: int, at: list[int], on: list[tuple[int, ...]], gain: Callable[[int, tuple[int, ...], int], float]
) -> None:
    """Put a request where all together wait least."""
    rest = tuple(each for each in on[at[one]] if each != one)
    costs = [gain(number, rest if number == at[one] else members, one) for number, members in enumerate(on)]
    best = int(np.argmin(costs))
    if costs[best] < costs[at[one]] - 1e-6:
        on[at[one]] = rest
        on[best] = tuple(sorted((*on[best], one)))
        at[one] = best


def _swap(
    one: int, other: int, at: list[int], on: list[tuple[int, ...]], total: Callable[[int, tuple[int, ...]], float]
) -> None:
    """Let two requests change places where all together wait less then."""
    here, there = at[one], at[other]
    if here == there:
        return
    new_here = tuple(sorted((*(each for each in on[here] if each != one), other)))
    new_there = tuple(sorted((*(each for each in on[there] if each != other), one)))
    if total(here, new_here) + total(there, new_there) < total(here, on[here]) + total(there, on[there]) - 1e-6:
        on[here], on[there] = new_here, new_there
        at[one], at[other] = there, here


def least_ttfts(
    workload: Workload, timing: TimingModel, step_tokens: int, speeds: Sequence[float]
) -> tuple[list[float], float]:
    """Return a TTFT that each request cannot pass, sorted, and one that the mean of all cannot, in milliseconds.

    Each: alone on an idle worker at full speed that holds all that was ever computed. The mean: of requests that come
    at one moment, those on one worker are computed one after the other, however they are divided and ordered. Who has
    ``n`` tokens before it waits at least ``n`` times what one more token of a step takes. The best division is that of
    requests to places (a worker, and how many come behind), at the least sum: an assignment problem. What earlier
    requests have left to compute, and all decoding, is left out. ``speeds`` are the highest that each worker ever has.
    It holds where a step's time grows at least in proportion to its tokens, as that of the published formulas does.
    """
    block_size = workload.block_size
    each_token_ms = min(timing.prefill_ms(n + 1) - timing.prefill_ms(n) for n in range(1, step_tokens))
    seen: set[int] = set()
    alone: list[float] = []
    total_ms = 0.0
    for _, group in groupby(workload.requests, lambda each: each.arrival_ms):
        costs: list[tuple[float, float]] = []
        for request in group:
            lead = 0
            while lead < (request.isl - 1) // block_size and request.path[lead] in seen:
                lead += 1
            seen.update(request.path)
            tokens = request.isl - block_size * lead
            own_ms = tokens // step_tokens * timing.prefill_ms(step_tokens) + timing.prefill_ms(tokens % step_tokens)
            costs.append((own_ms, each_token_ms * tokens))
        alone += [own_ms / max(speeds) for own_ms, _ in costs]
        places = [(speed, behind) for speed in speeds for behind in range(len(costs))]
        total_ms += least_assignment(
            np.array([[(own + behind * delay) / speed for speed, behind in places] for own, delay in costs])
        )
    return sorted(alone), total_ms / len(alone)


def least_assignment(costs: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the least sum of one cost per row, each in another column; at most as many rows as columns.

    The Hungarian method with potentials: rows are added one by one, each by the shortest augmenting path.
    """
    rows, columns = costs.shape
    of_row, of_column = np.zeros(rows), np.zeros(columns)
    taken_by = np.full(columns, -1)
    for row in range(rows):
        least, came_from = np.full(columns, np.inf), np.full(columns, -1)
        used = np.zeros(columns, bool)
        column, current = -1, row
        while True:
            reduced = costs[current] - of_row[current] - of_column
            better = ~used & (reduced < least)
            least[better] = reduced[better]
            came_from[better] = column
            column = int(np.where(used, np.inf, least).argmin())
            step = float(least[column])
            of_row[row] += step
            of_row[taken_by[used]] += step
            of_column[used] -= step
            least[~used] -= step
            used[column] = True
            if taken_by[column] < 0:
                break
            current = int(taken_by[column])
        while column >= 0:
            before = int(came_from[column])
            taken_by[column] = row if before < 0 else taken_by[before]
            column = before
    return float(sum(costs[row, column] for column, row in enumerate(taken_by) if row >= 0))
