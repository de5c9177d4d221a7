"""The policy ``kv``: the least cost in milliseconds, for the request and for those that are there and will come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import ceil, floor
from struct import pack
from typing import Final, Generic, TypeVar

import msgspec
import numpy as np
from msgspec.structs import astuple

from poolgrid.kernel.decision.policy import (
    EXPECTED_MS,
    OWN_MS,
    PACE,
    Candidates,
    Choice,
    Column,
    FloatArray,
    Forecast,
    RoutingRequest,
    lowest,
)
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.routing.batch_planner import BatchPlanner, WaitingPrompts
from poolgrid.kernel.routing.engine_times import EngineKind, Engines, FewEngines, uncached_of_few, uncached_tokens
from poolgrid.kernel.routing.learned_speeds import ARRIVALS_MEMORY_MS, LearnedSpeeds
from poolgrid.kernel.routing.selector import Selector
from poolgrid.kernel.wire.identifiers import Stage

T = TypeVar("T")

TARGET_MARGIN = 1.25
"""By how much a first token may be later than expected and still be within its target."""

EARLY_WORTH, LATE_WORTH = 0.1, 10.0
"""What a millisecond is worth that a first token comes within its target, and after it."""

AGAIN_WORTH: Final = 1.0
"""What a millisecond is worth that computes again what another worker holds: it displaces as much of what is cached."""

LEFT_WORTH: Final = 8.0
"""The same for a later turn, which leaves its history: what it displaces where it goes is the history of others, who
return for it."""

LEAVE_WORTH: Final = 2.0
"""How many typical prompts it costs a later turn to leave the worker that holds most: what it holds of the conversation
is never used again. At 0 every twenty-fifth later turn of a simulated peak load leaves, at 2 every seventieth."""

NEXT_WORTH, UNNAMED_WORTH, EVEN, UNEVEN = 5.0, 1.0, 1.1, 1.4
"""How many typical prompts it costs a first turn, at most, to come to a worker that was sent more than its share of
late: the next turns of a conversation will come there too. Up to ``EVEN`` times the mean, workers count as equally
used; from ``UNEVEN`` on the whole of it counts. ``UNNAMED_WORTH`` is for turns that are not known, as gateways'."""

FEW_REQUESTS: Final = 1.0 / ARRIVALS_MEMORY_MS
"""What is no share yet: a single request of late."""

UNCACHED_TOKENS: Final = "uncached_tokens"

DECODING_WORTH: Final = 0.01
"""What a millisecond is worth by which the streams of a worker stand still: each spreads it over about a hundred tokens
that are still to come, so these are milliseconds of ITL. At a tenth, mean TTFT of the trace at ×7 is 6 % higher."""


class CostTerms(msgspec.Struct, Generic[T], gc=False):
    """The terms of a choice in their order, a column of each."""

    uncached_tokens: T
    expected_ttft_ms: T
    own_ms: T
    joined_ms: T
    crowding_ms: T
    pace: T
    decoding_ms: T
    again_ms: T
    next_ms: T


class KvAware:
    """Least time to the first token, and least delay of others, in milliseconds that are learned per worker.

        cost     = expected + own + joined + decoding              of the worker alone: ``prompt_cost``
                   + crowding + again + next + behind
        crowding = rate · (after² − before²) / 2                   who would have been free of a queue
        again    = AGAIN_WORTH · (own − own of the worker that holds most)
                   or, of a later turn, LEFT_WORTH · (the same) + LEAVE_WORTH · typical
        next     = NEXT_WORTH · typical · (where its load of late is between EVEN and UNEVEN times the mean: 0 to 1)
        behind   = pace · own · (requests queued at the router, to be computed behind it)

    What a prompt takes of others is counted at pace 1: a slow worker's requests wait longer for it, and are fewer.
    Step times are those of a worker's card, its pace is learned from its first tokens
    (``poolgrid.kernel.routing.learned_speeds``). There is no setting for it.

    An engine's step ends for all prompts in it at once. Those that would be in the last step of the queue are delayed
    by the part of this prompt that joins them. So a long prompt keeps away from short ones that have only just come.

    Crowding is of the worker with the shortest queue alone: the next requests would go there. Its queue becomes longer
    by the prompt, or the next worker is the shortest; until either is worked off, ``rate`` requests a millisecond find
    a queue of ``after`` in the place of ``before``. So a long prompt does not take the last free worker from short ones
    where it can as well wait behind another long one.

    A later turn stays where its history is (``again``). A first turn goes where least was sent of late (``next``), as
    long as a worker that was sent no more than its share has nothing to compute. Where it is not known which of them a
    request is, ``next`` counts little.

    It plans: of requests that come together, some wait at the router until the worker that is best for them has nothing
    to compute (``poolgrid.kernel.routing.batch_planner``).
    """

    name = "kv"
    needs_overlap = True
    compares_numbers = True

    def observer(self, index: PrefixIndex) -> LearnedSpeeds:
        return LearnedSpeeds()

    def planner(self, selector: Selector) -> BatchPlanner:
        return BatchPlanner(selector, self.estimate)

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the least cost in milliseconds; a decode worker is chosen by the length of its steps."""
        engines = candidates.engines
        if isinstance(engines, FewEngines):
            return _choice_of_few(request, candidates, engines)
        assert isinstance(engines, Engines), "it is what the policy's observer describes"
        paces, blocks = engines.paces_at(candidates.requests), candidates.active_blocks
        if request.stage is Stage.DECODE:
            step = paces * engines.decode_ms(blocks + request.blocks)
            row, reason = lowest(step, request)
            return Choice(row, reason, step, {"step_ms": step, PACE: paces})
        uncached = uncached_tokens(request, candidates.device_overlap, candidates.host_overlap, candidates.disk_overlap)
        all_costs, all_terms = _costs((request,), uncached[np.newaxis], candidates)
        costs = all_costs.flatten()
        terms = {name: column if column.ndim == 1 else column.flatten() for name, column in all_terms.items()}
        if candidates.behind is not None:
            behind = candidates.behind * paces * terms[OWN_MS]
            costs = costs + behind
            terms["behind_ms"] = behind
        row, reason = lowest(costs, request)
        forecast = Forecast(*(float(terms[name][row]) for name in (EXPECTED_MS, OWN_MS, PACE, UNCACHED_TOKENS)))
        return Choice(row, reason, costs, terms, forecast)

    def estimate(self, requests: Sequence[RoutingRequest], candidates: Sequence[Candidates]) -> WaitingPrompts:
        """Return what several prompts would cost, each with its candidates: the same workers at the same time."""
        uncached = np.stack(
            [
                uncached_tokens(request, each.device_overlap, each.host_overlap, each.disk_overlap)
                for request, each in zip(requests, candidates, strict=True)
            ]
        )
        costs, terms = _costs(requests, uncached, candidates[0])
        return WaitingPrompts(costs.tolist(), (terms[OWN_MS] * terms[PACE]).tolist(), uncached.tolist())


def _costs(
    requests: Sequence[RoutingRequest], uncached: FloatArray, candidates: Candidates
) -> tuple[FloatArray, dict[str, FloatArray]]:
    """Return what prompts would cost on each worker, and the terms of that, without those who would come behind.

    ``uncached`` are the tokens that each worker would compute, at least one, in a row for each prompt. Overlaps of
    ``candidates`` are not looked at. The same as ``_costs_of_few``, to the bit.
    """
    engines = candidates.engines
    assert isinstance(engines, Engines), "it is what the policy's observer describes"
    paces, blocks = engines.paces_at(candidates.requests), candidates.active_blocks
    ahead = candidates.prefill_tokens + uncached
    own = engines.prompt_ms(uncached)
    queue = np.maximum(own, engines.prompt_ms(ahead) - engines.done_ms)
    steps = np.ceil(ahead / engines.step_tokens)
    between = np.where(candidates.requests > 0.0, steps * engines.decode_ms(blocks), 0.0)
    expected = paces * (queue + between)
    before = paces * np.maximum(0.0, engines.prompt_ms(candidates.prefill_tokens) - engines.done_ms)
    crowding = _crowding(before, paces * own, paces * engines.typical_ms, engines.choices_per_ms)
    queued = np.maximum(1.0, candidates.prefill_tokens)
    in_last_step = engines.waiting * (queued - np.floor(queued / engines.step_tokens) * engines.step_tokens) / queued
    joined = paces * in_last_step * engines.joined_ms(candidates.prefill_tokens, uncached)
    generating = np.maximum(0.0, candidates.requests - engines.waiting)
    fixed = np.ceil(uncached / engines.step_tokens) * engines.least_ms()
    decoding = DECODING_WORTH * paces * generating * np.maximum(0.0, own - fixed)
    least = np.broadcast_to(uncached.min(axis=-1, keepdims=True), uncached.shape)
    later, first = (np.array([[each.is_later is known] for each in requests]) for known in (True, False))
    more = np.where(later, LEFT_WORTH, AGAIN_WORTH) * np.maximum(0.0, own - engines.prompt_ms(least))
    next_worth = np.where(first, NEXT_WORTH, np.where(later, 0.0, UNNAMED_WORTH))
    leaving = np.where(later, LEAVE_WORTH * engines.typical_ms, 0.0)
    again = np.where(uncached > least, more + leaving, 0.0)
    loads = engines.loads
    even, span = _even_load(sum(loads.tolist()), len(loads))
    above = np.minimum(1.0, np.maximum(0.0, loads - even) / span)
    is_free = ((loads <= even) & (candidates.prefill_tokens == 0.0)).any()
    following = np.where(is_free, next_worth * engines.typical_ms * above, 0.0)
    others = own + joined + crowding + decoding + again + following
    terms = CostTerms(
        uncached_tokens=uncached,
        expected_ttft_ms=expected,
        own_ms=own,
        joined_ms=joined,
        crowding_ms=crowding,
        pace=paces,
        decoding_ms=decoding,
        again_ms=again,
        next_ms=following,
    )
    costs = expected + others
    wanted = np.array([[each.ttft_target_ms] for each in requests])
    if wanted.any():
        # In time is in time: what counts then is the others, and of those in time the place that is worth least.
        late = np.maximum(0.0, expected * TARGET_MARGIN - wanted)
        costs = np.where(wanted > 0.0, EARLY_WORTH * expected + others + LATE_WORTH * late, costs)
    return costs, msgspec.structs.asdict(terms)


def _even_load(loads: float, workers: int) -> tuple[float, float]:
    """Return up to which load a worker counts as equally used, and how much above it counts in full."""
    even = EVEN * loads / workers + FEW_REQUESTS
    return even, even * (UNEVEN / EVEN - 1.0)


def _crowding(queues: FloatArray, own: FloatArray, typical: FloatArray, rate_per_ms: float) -> FloatArray:
    """Return what a prompt costs those who come next, by worker; all in milliseconds.

    ``queues`` are what each has to do, ``own`` is what the prompt adds (or a row for each of several prompts),
    ``typical`` what a typical next one would.
    """
    crowding = np.zeros(own.shape)
    if len(queues) > 1:
        soonest = queues + typical
        order = np.argsort(soonest, kind="stable")
        first, second = int(order[0]), int(order[1])
        before = float(queues[first])
        after = np.minimum(before + own[..., first], float(soonest[second] - typical[first]))
        crowding[..., first] = rate_per_ms * (after * after - before * before) / 2.0
    return crowding


# -- few candidates, in plain numbers: the same to the bit ---------------------------------------------------------


class PromptCost(Forecast, frozen=True, gc=False):
    """The parts of what a prompt costs on one worker, in milliseconds."""

    joined_ms: float = 0.0
    """For prompts whose last step it makes longer."""
    decoding_ms: float = 0.0
    """For the streams of requests that generate there."""
    before_ms: float = 0.0
    """No part of the cost: what the worker has to compute before it."""


def prompt_cost(
    kind: EngineKind,
    learned: tuple[float, float, float, float, float],
    queued: float,
    active_blocks: float,
    requests: float,
    uncached_tokens: float,
    own: float,
) -> PromptCost:
    """Return what it costs to compute so many tokens of a prompt, at least one, on a worker.

        queue    = max(own, prompt_ms(queued + uncached) − done)   what the engine computes until then, at pace 1
        expected = pace · (queue + steps · decode_ms)              decode steps come between, while others generate
        own      = prompt_ms(uncached)                             requests behind it wait for that, too
        joined   = pace · (requests in the last step) · (how much longer that step takes)
        decoding = DECODING_WORTH · pace · (who generates there) · (how much longer their steps take)

    An idle worker that holds nothing of a prompt costs what the prompt takes to compute, twice: for itself, and for the
    next one.

    ``learned`` is its pace, the milliseconds at pace 1 of its queue that are done, the requests that wait for their
    first token there, its load, and its pace while it has nothing to do. ``queued`` are prompt tokens that it has
    accepted and not computed, ``requests`` its active ones, waiting ones included; ``own`` is how long the prompt takes
    at pace 1.
    """
    pace, done_ms, waiting, _, idle_pace = learned
    if not requests:
        return PromptCost(idle_pace * own, own, idle_pace, uncached_tokens)
    curve, step_tokens, total_blocks = kind
    before = curve.one_prompt_ms(queued, step_tokens) if queued else 0.0
    ahead = queued + uncached_tokens
    together = curve.one_prompt_ms(ahead, step_tokens) if queued else own
    queue = max(own, together - done_ms)
    queue += ceil(ahead / step_tokens) * curve.one_decode_ms(active_blocks / total_blocks)
    joined = 0.0
    if waiting and queued:
        last, longer = queued, together - before
        if ahead >= step_tokens:
            last = queued - floor(queued / step_tokens) * step_tokens
            longer = curve.one_prompt_ms(min(step_tokens, last + uncached_tokens), step_tokens)
            longer -= curve.one_prompt_ms(last, step_tokens)
        if last > 0.0:
            joined = pace * (waiting * last / queued) * longer
    decoding = 0.0
    generating = requests - waiting
    if generating > 0.0:
        # The fixed part of a step is not theirs to wait for: engines compute few tokens together with a decode step.
        fixed = ceil(uncached_tokens / step_tokens) * curve.least_ms
        if own > fixed:
            decoding = DECODING_WORTH * pace * generating * (own - fixed)
    before_ms = pace * max(0.0, before - done_ms)
    return PromptCost(pace * queue, own, pace, uncached_tokens, joined, decoding, before_ms)


def _choice_of_few(request: RoutingRequest, candidates: Candidates, engines: FewEngines) -> Choice:
    if request.stage is Stage.DECODE:
        steps = _steps_of_few(request, candidates, engines)
        row, reason = lowest(steps, request)
        paces = _paces_of_few(candidates, engines)
        terms = TermsOfFew(("step_ms", PACE), pack(f"{2 * len(steps)}d", *steps, *paces))
        return Choice(row, reason, tuple(steps), terms)
    prompts, crowding, again, following, costs = _costs_of_few(request, candidates, engines)
    row, reason = lowest(costs, request)
    named = CostTerms(
        uncached_tokens=[prompt.uncached_tokens for prompt in prompts],
        expected_ttft_ms=[prompt.expected_ms for prompt in prompts],
        own_ms=[prompt.own_ms for prompt in prompts],
        joined_ms=[prompt.joined_ms for prompt in prompts],
        crowding_ms=crowding,
        pace=[prompt.pace for prompt in prompts],
        decoding_ms=[prompt.decoding_ms for prompt in prompts],
        again_ms=again,
        next_ms=following,
    )
    names, columns = named.__struct_fields__, astuple(named)
    if candidates.behind is not None:
        names = (*names, "behind_ms")
        behind = [each * prompt.pace * prompt.own_ms for each, prompt in zip(candidates.behind, prompts, strict=True)]
        columns = (*columns, behind)
    terms = TermsOfFew(names, pack(f"{len(names) * len(prompts)}d", *chain.from_iterable(columns)))
    return Choice(row, reason, tuple(costs), terms, prompts[row])


def _steps_of_few(request: RoutingRequest, candidates: Candidates, engines: FewEngines) -> list[float]:
    return [
        pace * kind.curve.one_decode_ms((blocks + request.blocks) / kind.total_blocks)
        for pace, kind, blocks in zip(
            _paces_of_few(candidates, engines), engines.kinds, candidates.active_blocks, strict=True
        )
    ]


def _paces_of_few(candidates: Candidates, engines: FewEngines) -> list[float]:
    return [
        pace if requests else idle_pace
        for (pace, *_, idle_pace), requests in zip(engines.learned, candidates.requests, strict=True)
    ]


def _costs_of_few(
    request: RoutingRequest, candidates: Candidates, engines: FewEngines
) -> tuple[list[PromptCost], list[float], list[float], list[float], list[float]]:
    """Return what a prompt costs alone, crowding, again, next and the whole cost, by worker."""
    target_ms, typical_ms = request.ttft_target_ms, engines.typical_ms
    uncached = uncached_of_few(request, candidates)
    prompts: list[PromptCost] = []
    before: EngineKind | None = None
    before_tokens, own = 0.0, 0.0
    for kind, learned, queued, blocks, requests, tokens in zip(
        engines.kinds,
        engines.learned,
        candidates.prefill_tokens,
        candidates.active_blocks,
        candidates.requests,
        uncached,
        strict=True,
    ):
        # Workers that hold as much of the prompt and are of a kind take as long for the rest.
        if kind is not before or tokens != before_tokens:
            before, before_tokens = kind, tokens
            own = kind.curve.one_prompt_ms(tokens, kind.step_tokens)
        prompts.append(prompt_cost(kind, learned, queued, blocks, requests, tokens, own))
    crowding = _crowding_of_few(prompts, engines)
    following = _next_of_few(request, candidates, engines)
    again, least = [0.0] * len(prompts), min(uncached)
    if max(uncached) > least:
        again_worth, leaving_ms = (LEFT_WORTH, LEAVE_WORTH * typical_ms) if request.is_later else (AGAIN_WORTH, 0.0)
        before = None
        for row, (kind, prompt) in enumerate(zip(engines.kinds, prompts, strict=True)):
            if prompt.uncached_tokens > least:
                if kind is not before:
                    before, own = kind, kind.curve.one_prompt_ms(least, kind.step_tokens)
                again[row] = again_worth * max(0.0, prompt.own_ms - own) + leaving_ms
    costs = []
    for prompt, crowd, extra, next_ms in zip(prompts, crowding, again, following, strict=True):
        expected = prompt.expected_ms
        others = prompt.own_ms + prompt.joined_ms + crowd + prompt.decoding_ms + extra + next_ms
        if target_ms > 0.0:
            late = max(0.0, expected * TARGET_MARGIN - target_ms)
            costs.append(EARLY_WORTH * expected + others + LATE_WORTH * late)
        else:
            costs.append(expected + others)
    if (behind := candidates.behind) is not None:
        costs = [
            cost + each * prompt.pace * prompt.own_ms for cost, each, prompt in zip(costs, behind, prompts, strict=True)
        ]
    return prompts, crowding, again, following, costs


def _crowding_of_few(prompts: Sequence[PromptCost], engines: FewEngines) -> list[float]:
    crowding = [0.0] * len(prompts)
    if len(prompts) > 1:
        typical_ms = engines.typical_ms
        soonest = [prompt.before_ms + prompt.pace * typical_ms for prompt in prompts]
        least, second, *_ = sorted(soonest)
        first = soonest.index(least)
        prompt = prompts[first]
        before = prompt.before_ms
        after = min(before + prompt.pace * prompt.own_ms, second - prompt.pace * typical_ms)
        crowding[first] = engines.choices_per_ms * (after * after - before * before) / 2.0
    return crowding


def _next_of_few(request: RoutingRequest, candidates: Candidates, engines: FewEngines) -> list[float]:
    loads = [load for _, _, _, load, _ in engines.learned]
    if not request.is_later:
        even, span = _even_load(sum(loads), len(loads))
        if any(load <= even and not queued for load, queued in zip(loads, candidates.prefill_tokens, strict=True)):
            worth_ms = (UNNAMED_WORTH if request.is_later is None else NEXT_WORTH) * engines.typical_ms
            return [worth_ms * min(1.0, (load - even) / span) if load > even else 0.0 for load in loads]
    return [0.0] * len(loads)


class TermsOfFew(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The terms of a choice, packed: a log keeps thousands of decisions, and few are looked at."""

    names: tuple[str, ...]
    columns: bytes
    """One after the other, as 64-bit floats."""

    def __call__(self) -> Mapping[str, Column]:
        columns = np.frombuffer(self.columns, np.float64).reshape(len(self.names), -1)
        return dict(zip(self.names, columns, strict=True))
