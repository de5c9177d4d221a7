"""How much prompt computation may wait in an engine: the order of a router's queue is void for what lies there.

An engine computes prompts in the order in which they came. So a request of the highest priority, or of a tenant that was
served nothing, waits behind all that its engine was given before.
"""

from __future__ import annotations

from typing import Final

from poolgrid.router.core.decision import Decision
from poolgrid.router.core.engine_times import card_prompt_ms
from poolgrid.router.core.selector import PROMPT_STAGES
from poolgrid.wire.card import WorkerCard

BACKLOG_MS: Final = 250.0
"""Expected time to the first token within which an engine must be for a further prompt, unless it computes none. Two or
three full steps of most engines: it does not stand still while a first token comes here and the next request there."""


def prompt_done_ms(decision: Decision, card: WorkerCard) -> float:
    """Return in how many milliseconds the chosen worker is expected to have computed a prompt, what waits before it
    included.

    A policy that predicts has learned the worker's pace; of a worker without observations it takes that of the pool, and
    at first that of the cards. Other policies learn none: the step times of the card count, or published ones.
    """
    forecast = decision.choice.forecast
    if forecast is not None:
        return forecast.expected_ms
    uncached = max(1, decision.request.isl - decision.overlap_tokens)
    return card_prompt_ms(card, decision.prefill_tokens + uncached)


def waits_too_long(decision: Decision, card: WorkerCard) -> bool:
    """Return whether a prompt has to wait at the router until its engine has computed others.

    A prompt of any length may go to an engine that has no other to compute.
    """
    if not decision.prefill_tokens or decision.request.stage not in PROMPT_STAGES:
        return False
    return prompt_done_ms(decision, card) > BACKLOG_MS
