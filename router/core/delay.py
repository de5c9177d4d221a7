"""What a prompt costs on one worker, in milliseconds: its own first token, and the delay of those already there.

    queue    = max(own, prompt_ms(queued + uncached) − done)   what the engine computes until then, at pace 1
    expected = pace · (queue + steps · decode_ms)              decode steps come between, while others generate
    own      = prompt_ms(uncached)                             requests behind it wait for that, too
    joined   = pace · (requests in the last step) · (how much longer that step takes)
    decoding = DECODING_WORTH · pace · (who generates there) · (how much longer their steps take)
    cost     = expected + own + joined + decoding

An idle worker that holds nothing of a prompt costs what the prompt takes to compute, twice: for itself, and for the
next one. What only a pool as a whole shows (requests that would have come to the last free worker) is added by the
policy.

Nothing here keeps or reads anything. ``poolgrid.router.core.engine_times`` has the same for many workers at once, to
the bit.
"""

from __future__ import annotations

from math import ceil, floor
from typing import Final, NamedTuple

from poolgrid.router.core.engine_times import StepCurve

DECODING_WORTH: Final = 0.01
"""What a millisecond is worth by which the streams of a worker stand still: each spreads it over about a hundred tokens
that are still to come, so these are milliseconds of ITL. At a tenth, mean TTFT of the trace at ×7 is 6 % higher."""


class WorkerDelay(NamedTuple):
    """What delays a prompt on one worker."""

    curve: StepCurve
    """Step times, at pace 1."""
    step_tokens: float
    """Prompt tokens of one step."""
    total_blocks: float
    pace: float
    """Its speed factor: real times over those of its curve."""
    done_ms: float
    """Milliseconds at pace 1 by which its queue is shorter than by its tokens, since part of it is computed."""
    queued_tokens: float
    """Prompt tokens that it has accepted and not computed."""
    active_blocks: float
    requests: float
    """Active requests, waiting ones included."""
    waiting: float
    """Those of them that wait for their first token."""
    recent_load: float = 0.0
    """Requests that it was sent per millisecond of late."""


class PromptCost(NamedTuple):
    """The parts of what a prompt costs, in milliseconds."""

    expected_ms: float
    """Until its first token."""
    own_ms: float
    """Delay of the requests behind it, at pace 1."""
    joined_ms: float
    """For prompts whose last step it makes longer."""
    decoding_ms: float
    """For the streams of requests that generate there."""
    queue_ms: float
    """No part of the cost: what the prompts before it take, at pace 1."""

    @property
    def total_ms(self) -> float:
        return self.expected_ms + (self.own_ms + self.joined_ms + self.decoding_ms)


def prompt_cost(worker: WorkerDelay, uncached_tokens: float, own: float) -> PromptCost:
    """Return what it costs to compute so many tokens of a prompt, at least one, on a worker; ``own`` is how long that
    takes at pace 1."""
    curve, step_tokens, total_blocks, pace, done_ms, queued, active_blocks, requests, waiting, _ = worker
    before = curve.one_prompt_ms(queued, step_tokens) if queued else 0.0
    if not requests:
        return PromptCost(pace * own, own, 0.0, 0.0, before)
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
    return PromptCost(pace * queue, own, joined, decoding, before)


def decode_step_ms(worker: WorkerDelay, blocks: float) -> float:
    """Return how long a decode step takes once a request of so many blocks is there."""
    return worker.pace * worker.curve.one_decode_ms((worker.active_blocks + blocks) / worker.total_blocks)
