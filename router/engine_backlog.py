"""How much prompt computation may wait in an engine: the order of a router's queue is void for what lies there.

An engine computes prompts in the order in which they came. So a request of the highest priority, or of a tenant that
was served nothing, waits behind all that its engine was given before.
"""

from __future__ import annotations

from typing import Final

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.routing.engine_times import card_prompt_ms
from poolgrid.kernel.routing.selector import PROMPT_STAGES
from poolgrid.kernel.routing.worker_groups import WorkerGroup
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.identifiers import WorkerKey

BACKLOG_MS: Final = 300.0
"""Expected time until an engine begins with a further prompt, above which it is given none: a few full steps of most
engines, so none stands still while a first token comes here and the next request there. Its length does not count: a
long prompt would wait without end where short ones come from other routers."""


ENOUGH_TO_COMPUTE: Final = "its engine has enough to compute"
"""Why a request does not go to a worker, or waits for it."""


def times_ms(decision: Decision, card: WorkerCard) -> tuple[float, float]:
    """Return in how many milliseconds the chosen worker is expected to begin with a prompt, and to have computed it.

    A policy that predicts has learned the worker's pace; of a worker without observations it takes that of the pool,
    and at first that of the cards. Other policies learn none: the step times of the card count, or published ones.
    """
    forecast = decision.choice.forecast
    if forecast is not None:
        return forecast.expected_ms - forecast.pace * forecast.own_ms, forecast.expected_ms
    before = decision.prefill_tokens
    together = before + max(1, decision.request.isl - decision.overlap_tokens)
    return card_prompt_ms(card, before), card_prompt_ms(card, together)


def waits_too_long(decision: Decision, card: WorkerCard) -> bool:
    """Return whether a prompt has to wait at the router until its engine has computed others."""
    if not decision.prefill_tokens or decision.request.stage not in PROMPT_STAGES:
        return False
    return times_ms(decision, card)[0] > BACKLOG_MS


def with_enough(group: WorkerGroup, ledger: LoadLedger) -> dict[WorkerKey, str]:
    """Return the workers of a group whose engines have enough to compute by their cards, with that as the reason."""
    queued = ledger.prefill_tokens[group.slots].tolist()
    return {
        worker.key: ENOUGH_TO_COMPUTE
        for worker, tokens in zip(group.members, queued, strict=True)
        if tokens and card_prompt_ms(worker.card, tokens) > BACKLOG_MS
    }
