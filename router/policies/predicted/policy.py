"""The policy ``predicted``: costs in milliseconds, that it learns per worker."""

from __future__ import annotations

import numpy as np

from poolgrid.router.core.batch_planner import BatchPlanner
from poolgrid.router.core.candidates import EXPECTED_MS, Candidates, Choice, FloatArray, RoutingRequest
from poolgrid.router.core.engine_times import Engines, uncached_tokens
from poolgrid.router.core.learned_speeds import OWN_MS, PACE, LearnedSpeeds
from poolgrid.router.core.policy import lowest
from poolgrid.router.core.prefix_index import PrefixIndex
from poolgrid.router.core.selector import Selector
from poolgrid.wire.identifiers import Stage

TARGET_MARGIN = 1.25
"""By how much a first token may be later than expected and still be within its target."""

EARLY_WORTH, LATE_WORTH = 0.1, 10.0
"""What a millisecond is worth that a first token comes within its target, and after it."""


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
    (``poolgrid.router.core.learned_speeds``). Nothing is weighed against anything, so there is no knob.

    An engine's step ends for all prompts in it at once. Those that would be in the last step of the queue are delayed
    by the part of this prompt that joins them. So a long prompt keeps away from short ones that have only just come.

    Crowding is of the worker with the shortest queue alone: the next requests would go there. Its queue becomes longer
    by the prompt, or the next worker is the shortest; until either is worked off, ``rate`` requests a millisecond find
    a queue of ``after`` in the place of ``before``. So a long prompt does not take the last free worker from short ones
    where it can as well wait behind another long one.

    It plans: requests wait at the router until the worker that is best for them has nothing to compute, and those that
    wait are placed with a view to each other (``poolgrid.router.core.batch_planner``).
    """

    name = "predicted"
    needs_overlap = True

    def observer(self, index: PrefixIndex) -> LearnedSpeeds:
        return LearnedSpeeds()

    def planner(self, selector: Selector) -> BatchPlanner:
        return BatchPlanner(selector, self.estimate)

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Choice:
        """Choose the least cost in milliseconds; who only decodes is chosen by the length of its steps."""
        engines = candidates.engines
        assert isinstance(engines, Engines), "it is what the policy's observer describes"
        paces, blocks = engines.paces, candidates.active_blocks
        if request.stage is Stage.DECODE:
            step = paces * engines.decode_ms(blocks + request.blocks)
            row, reason = lowest(step, request)
            return Choice(row, reason, step, {"step_ms": step, PACE: paces})
        uncached = uncached_tokens(request, candidates.device_overlap, candidates.host_overlap, candidates.disk_overlap)
        costs, terms = self.estimate(np.array((request.ttft_target_ms,)), uncached, candidates)
        if candidates.behind is not None:
            behind = candidates.behind * paces * terms[OWN_MS]
            costs = costs + behind
            terms["behind_ms"] = behind
        row, reason = lowest(costs, request)
        return Choice(row, reason, costs, terms)

    def estimate(
        self, targets_ms: FloatArray, uncached: FloatArray, candidates: Candidates
    ) -> tuple[FloatArray, dict[str, FloatArray]]:
        """Return what prompts would cost on each worker, and the terms of that, without those who would come behind.

        ``uncached`` are the tokens that each worker would compute, at least one: one number a worker, or a row of them
        for each of several prompts; ``targets_ms`` are within how long each prompt's first token is wanted, or 0.
        Overlaps of ``candidates`` are not looked at.
        """
        engines = candidates.engines
        assert isinstance(engines, Engines), "it is what the policy's observer describes"
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
