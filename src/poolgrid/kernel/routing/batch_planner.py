"""Which of the requests that wait at a router go to a worker now, and how many will be computed behind each.

A request that is sent to a worker with work to do waits there, behind everything sent before it, and cannot move
to another worker. One that waits at the router goes to the first free worker, in the best order.

Rules
    1. Every request that waits is given a worker, the dearest first: the one where its cost is least, and its own
       computation delays all that were given that worker before it. They are dearer, so they are computed behind it.
       For workers that hold nothing of the prompts and are equally free this is the division with the least sum of
       times to the first token: Horowitz and Sahni, "Exact and approximate algorithms for scheduling nonidentical
       processors", JACM 23 (1976).
    2. A request whose worker has nothing to compute is sent at once: of several, first a small one (rule 4), then the
       one that is computed soonest. The longer one has waited beyond ``PATIENCE_MS``, the shorter it counts. All others
       wait, and are planned again at the next occasion.
    3. Another one goes with it into the same step where the time that both together save, for it and for all behind it,
       is more than what those before it lose: their first tokens come at the end of the step.
    4. *Small* prompts, which take at most ``SMALL_STEPS`` times what the smallest step takes, do not wait for a worker
       to be free where all its prompt tokens with theirs fit into one step: there is little to win by waiting, and
       engines compute many of them in the time of a few. While none waits, such a request is not even planned.
    5. A request that waits alone goes at once: there is no order to choose, and its worker would stand still until a
       first token has come here and the request there.
    6. A higher priority is planned first. What it was given stands before all of a lower one, which gets no worker that
       a higher one waits for.

Nothing here reads a clock or keeps anything: it is a function of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isinf

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import Candidates, Column, RoutingRequest, lowest
from poolgrid.kernel.routing.engine_times import Engines, FewEngines, StepCurve
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.identifiers import Role, WorkerKey

SMALL_STEPS = 2.0
"""Up to so many times the smallest step a prompt is small: half of its time or more is the step's own."""

PATIENCE_MS = 1000.0
"""From this time on a request that has waited twice as long counts as an eighth of it to compute. Agents above the
capacity of the caches, on a GPU: the 99th percentile of TTFT is no longer than behind vllm-router, and the mean 13
to 35 % shorter (decision record 0126)."""

OTHERS_SHARE_MAX = 0.1
"""Up to this share of requests may come to workers from other routers; above it no request waits here: routers that
do not see each other's queues would all count on the same workers."""


class WaitingPrompts(msgspec.Struct, frozen=True, gc=False):
    """What prompts that wait would cost and take on each worker: a row for each prompt, a column for each worker."""

    costs: Sequence[Sequence[float]]
    """Milliseconds, without what is behind."""
    own_ms: Sequence[Sequence[float]]
    """What the computation of its prompt takes there."""
    tokens: Sequence[Sequence[float]]
    """What would have to be computed."""
    waited_ms: Sequence[float] = ()
    """How long each has waited at the router; nothing = none of them has."""


Estimate = Callable[[Sequence[RoutingRequest], Sequence[Candidates]], WaitingPrompts]
"""``KvAware.estimate``: of requests, each with the same workers as candidates."""


class BatchPlanner:
    """Plans the requests that wait at one router."""

    def __init__(self, selector: Selector, estimate: Estimate) -> None:
        self._selector = selector
        self._estimate = estimate

    @property
    def is_active(self) -> bool:
        """Return whether requests should wait here: where workers have few requests of other routers."""
        return self._selector.projection.ledger.others_share <= OTHERS_SHARE_MAX

    def holds(self, decision: Decision) -> bool:
        """Return whether a new request, while none waits, is planned with those that come in the same turn instead of
        going where a decision sends it."""
        choice, engines = decision.choice, decision.candidates.engines
        assert isinstance(engines, Engines | FewEngines), "it is what the policy's observer describes"
        assert choice.forecast is not None, "the policy gives one for each prompt"
        step_tokens, curve = engines.step_of(choice.row)
        together = decision.prefill_tokens + choice.forecast.uncached_tokens
        return together > step_tokens or not _is_small(choice.forecast.own_ms, curve)

    def openings(self, model: str, roles: tuple[Role, ...]) -> int:
        """Return how many workers of these roles may be given one more: they have requests and prompt tokens to compute
        below their limits."""
        group, ledger = self._selector.groups.of(model, roles), self._selector.projection.ledger
        queued, requests = ledger.prefill_tokens[group.slots].tolist(), ledger.requests[group.slots].tolist()
        rows = zip(group.members, group.limits.tolist(), queued, requests, strict=True)
        return sum(
            tokens < max(1, each.card.limits.max_num_tokens) and active < limit for each, limit, tokens, active in rows
        )

    def can_plan(self, wanted: WorkerWanted) -> bool:
        """Return whether any worker could serve a request now."""
        group = self._selector.groups.of(wanted.request.model, wanted.roles)
        return bool(len(group.eligible(wanted.request, wanted.unavailable, self._selector.projection.ledger)[0]))

    def plan(self, wanted: Sequence[WorkerWanted]) -> list[tuple[int, Mapping[WorkerKey, int]]]:
        """Return which requests go now, in order, and how many are planned behind each. One that no worker can serve
        goes first, at once."""
        selector, ledger = self._selector, self._selector.projection.ledger
        group = selector.groups.of(wanted[0].request.model, wanted[0].roles)
        if len(wanted) == 1 or not group.workers:
            return [(0, {})]
        requests, candidates = [each.request for each in wanted], selector.waiting_candidates(group, wanted)
        prompts = self._estimate(requests, candidates)
        workers, costs = range(len(group.workers)), list(prompts.costs)
        for row, each in enumerate(wanted):
            eligible, _ = group.eligible(each.request, each.unavailable, ledger)
            if eligible is not group.all_rows:
                can = set(eligible.tolist())
                costs[row] = [costs[row][worker] if worker in can else inf for worker in workers]
        engines, queued = candidates[0].engines, candidates[0].prefill_tokens
        assert isinstance(engines, Engines), "it is what the policy's observer describes"
        prompts = msgspec.structs.replace(prompts, costs=costs, waited_ms=[each.queued_ms for each in wanted])
        placed = plan(requests, prompts, queued, engines.step_of)
        nowhere = [row for row, each in enumerate(costs) if isinf(min(each))][:1]
        going = [(goes.request, {group.workers[row]: n for row, n in goes.behind.items()}) for goes in placed]
        return [*((row, {}) for row in nowhere), *going]


class BatchedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request and the worker that it was given."""

    request: int
    """Its row."""
    worker: int
    """The column of its worker."""
    behind: Mapping[int, int]
    """How many requests were given each worker before it, and will be computed behind it; 0 is left out."""


def plan(
    requests: Sequence[RoutingRequest],
    prompts: WaitingPrompts,
    queued_tokens: Column,
    step_of: Callable[[int], tuple[float, StepCurve]],
) -> list[BatchedRequest]:
    """Return who goes now, in order.

    A cost is infinite where a request cannot go. ``queued_tokens`` are the prompt tokens that each worker has to
    compute, ``step_of`` returns how many a step of one may have, and how long it takes.
    """
    ahead_ms = [0.0] * len(queued_tokens)
    is_taken = [False] * len(queued_tokens)
    placed: list[BatchedRequest] = []
    for priority in sorted({each.priority for each in requests}, reverse=True):
        rows = [row for row, each in enumerate(requests) if each.priority == priority]
        for worker, given in divide(requests, prompts, rows, ahead_ms).items():
            if not is_taken[worker]:
                step_tokens, curve = step_of(worker)
                turns = sorted(given, key=partial(_turn, prompts, curve))
                room = _Room(float(queued_tokens[worker]), step_tokens, curve)
                placed += turns[: room.count([prompts.tokens[each.request][worker] for each in turns])]
            is_taken[worker] = True
            ahead_ms[worker] += sum(prompts.own_ms[each.request][worker] for each in given)
    return placed


def divide(
    requests: Sequence[RoutingRequest], prompts: WaitingPrompts, rows: Sequence[int], ahead_ms: Sequence[float]
) -> dict[int, list[BatchedRequest]]:
    """Return the requests of each worker that gets any.

    ``rows`` are the requests to divide, ``ahead_ms`` is what each worker was given before. A request without any worker
    is in none.
    """
    own_ms = prompts.own_ms
    behind = [0] * len(ahead_ms)
    given: dict[int, list[BatchedRequest]] = {}
    for row in sorted(rows, key=lambda row: -min(own_ms[row])):
        costs = [
            cost + ahead + count * own
            for cost, ahead, count, own in zip(prompts.costs[row], ahead_ms, behind, own_ms[row], strict=True)
        ]
        if isinf(min(costs)):
            continue
        worker, _ = lowest(costs, requests[row])
        known = {each: len(those) for each, those in given.items()}
        given.setdefault(worker, []).append(BatchedRequest(row, worker, known))
        behind[worker] += 1
    return given


def _turn(prompts: WaitingPrompts, curve: StepCurve, given: BatchedRequest) -> tuple[bool, float, int]:
    """Return the place of a request among those of a worker, whose steps take so long."""
    row, worker = given.request, given.worker
    own_ms, waited_ms = prompts.own_ms[row][worker], prompts.waited_ms[row] if prompts.waited_ms else 0.0
    is_small = _is_small(curve.one_step_ms(prompts.tokens[row][worker]), curve)
    return not is_small, own_ms / max(PATIENCE_MS, waited_ms) ** 3, row


def _is_small(own_ms: float, curve: StepCurve) -> bool:
    """Return whether a prompt is small that takes so long, in one step."""
    return own_ms <= SMALL_STEPS * curve.one_token_ms


class _Room(msgspec.Struct, frozen=True, gc=False):
    """What a worker takes now."""

    queued_tokens: float
    step_tokens: float
    curve: StepCurve

    def count(self, prompts: Sequence[float]) -> int:
        """Return how many of some prompts go now, whose tokens are given in order."""
        return self._in_first_step(prompts) if not self.queued_tokens else self.small(prompts)

    def small(self, prompts: Sequence[float]) -> int:
        """Return how many are small and join what the worker has already."""
        together = self.queued_tokens
        for count, tokens in enumerate(prompts):
            together += tokens
            if together > self.step_tokens or not _is_small(self.curve.one_step_ms(tokens), self.curve):
                return count
        return len(prompts)

    def _in_first_step(self, prompts: Sequence[float]) -> int:
        """Return how many go into the first step of a worker that is free: one at least, however long."""
        together, step_ms = prompts[0], self.curve.one_step_ms
        together_ms = step_ms(together)
        for count, tokens in enumerate(prompts[1:], start=1):
            if together + tokens > self.step_tokens:
                return count
            joined_ms = step_ms(together + tokens) - together_ms
            saved_ms = step_ms(tokens) - joined_ms
            if (len(prompts) - count) * saved_ms <= count * joined_ms:
                return count
            together += tokens
            together_ms += joined_ms
        return len(prompts)
