"""How a worker is chosen: the protocol that anyone may implement, and the policies that come with poolgrid.

A policy is asked with at least one candidate and returns the row it chose, a short reason code, and the terms that led
to it. It must be a function of its arguments and its own counted state: no clock, no global randomness. Ties and
samples come from the request id, so the same events and requests give the same decisions, bit for bit.

A policy of your own is a class with ``name``, ``needs_overlap`` and ``choose``; start the router with
``--policy package.module:ClassName``. See ``docs/policies.md``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from poolgrid.router.core.candidates import Candidates
from poolgrid.router.core.choice import Choice as Choice  # policies of operators have it from here
from poolgrid.router.core.choice_of_few import TIE_SEED
from poolgrid.router.core.cost import costs_of, softmax_weights
from poolgrid.router.core.cost_weights import FIELD_WEIGHTS, CostWeights
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.core.step_curve import FloatArray
from poolgrid.router.core.terms_of_few import KV_TERMS
from poolgrid.wire.hashing import stable_u64
from poolgrid.wire.identifiers import Stage

_SAMPLE_SEED = 2
_RANDOM_SEED = 3

EXPECTED_MS, PACE, OWN_MS = "expected_ttft_ms", "pace", "own_ms"
"""Terms of a policy that ``needs_paces``, by which its choices are learned from: the time to the first token that it
expects, the pace that it reckoned with, and what the request's own prompt takes at pace 1."""


class Policy(Protocol):
    """Chooses a worker.

    One that counts also has ``checkpoint() -> int`` and ``restore(count)``, so that a replay can begin in the middle.
    One with ``needs_paces = True`` finds ``Candidates.engines``: step times, and paces that are learned from the terms
    ``EXPECTED_MS``, ``PACE`` and ``OWN_MS`` of its choices.
    """

    @property
    def name(self) -> str:
        """Return the name under which decisions and metrics show this policy."""
        ...

    @property
    def needs_overlap(self) -> bool:
        """Tell whether the overlap columns must be filled in; they are 0 otherwise."""
        ...

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose one of at least one candidates."""
        ...


def lowest(costs: FloatArray, tie_key: str) -> tuple[int, str]:
    """Return the row of the lowest cost and ``cheapest``, or a tie broken by ``tie_key`` and ``tie``."""
    ties = np.flatnonzero(costs == costs.min())
    if len(ties) == 1:
        return int(ties[0]), "cheapest" if len(costs) > 1 else "only"
    return int(ties[stable_u64(tie_key, TIE_SEED) % len(ties)]), "tie"


class KvAware:
    """Least work left: uncached prefill, queued prefill and decode load, weighed by ``poolgrid.router.core.cost``."""

    needs_overlap = True

    def __init__(self, weights: CostWeights | None = None, temperature: float = 0.0, name: str = "kv") -> None:
        if not 0.0 <= temperature <= 1000.0:
            raise ValueError(f"making a {name} policy: temperature is {temperature}, allowed are 0 to 1000")
        self.name = name
        self.weights = weights if weights is not None else CostWeights()
        self.temperature = temperature

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the lowest cost, or sample by cost when the temperature is above 0.

        A decode worker computes no prompt, so in that stage there is neither prefill nor credit for overlap.
        """
        isl, queued = request.isl, candidates.prefill_tokens
        device, host, disk = candidates.device_overlap, candidates.host_overlap, candidates.disk_overlap
        if request.stage is Stage.DECODE:
            isl, queued = 0, np.zeros(len(candidates))
            device = host = disk = queued
        columns = (queued, candidates.active_blocks, device, host, disk)
        [(credit, prefill, decode, costs)] = costs_of([columns], self.weights, isl, request.block_size, request.blocks)
        terms = dict(zip(KV_TERMS, (credit, prefill, decode), strict=True))
        if self.temperature > 0.0 and len(costs) > 1:
            shares = np.cumsum(softmax_weights(costs, self.temperature))
            point = stable_u64(request.drawn_by, _SAMPLE_SEED) / 2**64
            row = min(int(np.searchsorted(shares, point, side="right")), len(costs) - 1)
            return Choice(row, "sampled", costs, terms)
        row, reason = lowest(costs, request.tie_key)
        return Choice(row, reason, costs, terms)


class Predicted:
    """Least time to the first token, and least delay of others, in milliseconds that are learned per worker.

        queue    = max(own, prompt_ms(queued + uncached) − done)   what the engine computes until then, at pace 1
        expected = pace · (queue + steps · decode_ms)              decode steps come between, while others generate
        own      = prompt_ms(uncached)                             who comes behind it waits for that, too
        joined   = pace · (who is in the last step) · (how much longer that step takes)
        crowding = rate · (after² − before²) / 2                   and so do those who would have been free of a queue
        behind   = pace · own · (who waits at the router, to be computed behind it)
        cost     = expected + own + joined + crowding + behind

    What a prompt takes of others is counted at pace 1: a slow worker's requests wait longer for it, and are fewer.
    ``prompt_ms`` and ``decode_ms`` are the step times of a worker's card, its pace is learned from its first tokens
    (``poolgrid.router.core.paces``). Nothing is weighed against anything, so there is no knob.

    An engine's step ends for all prompts in it at once. Those that would be in the last step of the queue are delayed
    by the part of this prompt that joins them. So a long prompt keeps away from short ones that have only just come.

    Crowding is of the worker with the shortest queue alone: the next requests would go there. Its queue becomes longer
    by the prompt, or the next worker is the shortest; until either is worked off, ``rate`` requests a millisecond find
    a queue of ``after`` in the place of ``before``. So a long prompt does not take the last free worker from short ones
    where it can as well wait behind another long one.

    It plans: requests wait at the router until the worker that is best for them has nothing to compute, and those that
    wait are placed with a view to each other (``poolgrid.router.core.hold_plan``).
    """

    name = "predicted"
    needs_overlap = True
    needs_paces = True

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the least cost in milliseconds; who only decodes is chosen by the length of its steps."""
        engines = candidates.engines
        if engines is None:
            raise ValueError("choosing by predicted times: the candidates came without what is known of their engines")
        paces, blocks = engines.paces, candidates.active_blocks
        if request.stage is Stage.DECODE:
            step = paces * engines.decode_ms(blocks + request.blocks)
            row, reason = lowest(step, request.tie_key)
            return Choice(row, reason, step, {"step_ms": step, PACE: paces})
        uncached = uncached_tokens(request, candidates.device_overlap, candidates.host_overlap, candidates.disk_overlap)
        costs, terms = self.reckon(np.array((request.ttft_target_ms,)), uncached, candidates)
        if candidates.behind is not None:
            behind = candidates.behind * paces * terms[OWN_MS]
            costs = costs + behind
            terms["behind_ms"] = behind
        row, reason = lowest(costs, request.tie_key)
        return Choice(row, reason, costs, terms)

    def reckon(
        self, targets_ms: FloatArray, uncached: FloatArray, candidates: Candidates
    ) -> tuple[FloatArray, dict[str, FloatArray]]:
        """Return what prompts would cost on each worker, and the terms of that, without those who would come behind.

        ``uncached`` are the tokens that each worker would compute, at least one: one number a worker, or a row of them
        for each of several prompts; ``targets_ms`` are within how long each prompt's first token is wanted, or 0.
        Overlaps of ``candidates`` are not looked at.
        """
        engines = candidates.engines
        assert engines is not None, "candidates of a policy that needs paces have engines"
        paces, blocks = engines.paces, candidates.active_blocks
        ahead = candidates.prefill_tokens + uncached
        own = engines.prompt_ms(uncached)
        queue = np.maximum(own, engines.prompt_ms(ahead) - engines.done_ms)
        steps = np.ceil(ahead / engines.step_tokens)
        between = np.where(candidates.requests > 0.0, steps * engines.decode_ms(blocks), 0.0)
        expected = paces * (queue + between)
        before = paces * np.maximum(0.0, engines.prompt_ms(candidates.prefill_tokens) - engines.done_ms)
        crowding = _crowding(before, paces * own, paces * engines.typical_ms, engines.choices_per_ms)
        queued = np.maximum(1.0, candidates.prefill_tokens)
        in_last_step = (
            engines.waiting * (queued - np.floor(queued / engines.step_tokens) * engines.step_tokens) / queued
        )
        joined = paces * in_last_step * engines.joined_ms(candidates.prefill_tokens, uncached)
        others = own + joined + crowding
        costs = expected + others
        if targets_ms.any():
            # In time is in time: what counts then is the others, and of those in time the place that is worth least.
            wanted = targets_ms if uncached.ndim == 1 else targets_ms[:, np.newaxis]
            late = np.maximum(0.0, expected * TARGET_MARGIN - wanted)
            costs = np.where(wanted > 0.0, EARLY_WORTH * expected + others + LATE_WORTH * late, costs)
        terms = {
            "uncached_tokens": uncached, EXPECTED_MS: expected, OWN_MS: own,
            "joined_ms": joined, "crowding_ms": crowding, PACE: paces,
        }  # fmt: skip
        return costs, terms


def uncached_tokens(request: RoutingRequest, device: FloatArray, host: FloatArray, disk: FloatArray) -> FloatArray:
    """Return the tokens of a prompt that each worker would compute, which holds so many of its blocks on each tier."""
    held = device + HOST_WORTH * host + DISK_WORTH * disk
    # Engines compute at least one token, or there would be no next one.
    tokens: FloatArray = np.maximum(1.0, request.isl - held * request.block_size)
    return tokens


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


TARGET_MARGIN = 1.25
"""By how much a first token may be later than expected and still be within its target."""

EARLY_WORTH, LATE_WORTH = 0.1, 10.0
"""What a millisecond is worth that a first token comes within its target, and after it."""

HOST_WORTH, DISK_WORTH = CostWeights().host_weight, CostWeights().disk_weight
"""What a block on a lower tier spares of its computation: it must be brought back first."""


class Lmetric:
    """New tokens times batch size, the product that LMetric's authors propose in the place of a weighted sum.

    New tokens are those of this prompt that the worker does not hold, and all that it has accepted and not computed.
    The batch is the worker's requests with this one, so that an idle worker's product still tells of the prompt.
    """

    name = "lmetric"
    needs_overlap = True

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the smallest product; blocks on any tier count as held."""
        held = candidates.device_overlap + candidates.host_overlap + candidates.disk_overlap
        new = np.maximum(0.0, request.isl - held * request.block_size) + candidates.prefill_tokens
        batch = candidates.requests + 1.0
        costs = new * batch
        row, reason = lowest(costs, request.tie_key)
        return Choice(row, reason, costs, {"new_tokens": new, "batch": batch})


class LeastLoaded:
    """Fewest active requests; among equals, fewest tokens waiting for prefill."""

    name = "least-loaded"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the worker with the fewest requests."""
        queued = candidates.prefill_tokens
        costs = candidates.requests + queued / (1.0 + queued.max())
        row, reason = lowest(costs, request.tie_key)
        return Choice(row, reason, costs, {"requests": candidates.requests})


class RoundRobin:
    """Each worker in turn, in the order of their keys."""

    name = "round-robin"
    needs_overlap = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the next worker."""
        row = self._turn % len(candidates)
        self._turn += 1
        return Choice(row, "turn")

    def checkpoint(self) -> int:
        return self._turn

    def restore(self, turn: int) -> None:
        self._turn = turn


class Random:
    """Any worker, drawn from the request id."""

    name = "random"
    needs_overlap = False

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        return Choice(stable_u64(request.drawn_by, _RANDOM_SEED) % len(candidates), "drawn")


POLICY_NAMES = ("kv", "approximate", "predicted", "field", "lmetric", "round-robin", "random", "least-loaded")
"""Policies that ``--policy`` knows by name; ``approximate`` is ``kv`` over the router's own choices."""


def make_policy(name: str, weights: CostWeights | None = None, temperature: float = 0.0) -> Policy:
    """Return one of the policies that come with poolgrid."""
    if name in ("kv", "approximate"):
        return KvAware(weights, temperature)
    if name == "predicted":
        return Predicted()
    if name == "field":
        return KvAware(FIELD_WEIGHTS, temperature, name)
    if name == "lmetric":
        return Lmetric()
    if name == "round-robin":
        return RoundRobin()
    if name == "random":
        return Random()
    if name == "least-loaded":
        return LeastLoaded()
    raise ValueError(f"choosing a policy: {name!r} is unknown, allowed are {', '.join(POLICY_NAMES)}")
