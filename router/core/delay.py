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
from typing import Final

from poolgrid.router.core.candidates import Forecast
from poolgrid.router.core.engine_times import EngineKind

DECODING_WORTH: Final = 0.01
"""What a millisecond is worth by which the streams of a worker stand still: each spreads it over about a hundred tokens
that are still to come, so these are milliseconds of ITL. At a tenth, mean TTFT of the trace at ×7 is 6 % higher."""


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
    learned: tuple[float, float, float, float],
    queued: float,
    active_blocks: float,
    requests: float,
    uncached_tokens: float,
    own: float,
) -> PromptCost:
    """Return what it costs to compute so many tokens of a prompt, at least one, on a worker.

    ``learned`` is its pace, the milliseconds at pace 1 of its queue that are done, and the requests that wait for their
    first token there. ``queued`` are prompt tokens that it has accepted and not computed, ``requests`` its active ones,
    waiting ones included; ``own`` is how long the prompt takes at pace 1.
    """
    pace, done_ms, waiting, _ = learned
    if not requests:
        return PromptCost(pace * own, own, pace, uncached_tokens)
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
