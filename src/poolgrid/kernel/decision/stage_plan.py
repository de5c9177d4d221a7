"""In how many legs a request is served: whole on one worker, or prefill and decode on two; media encoded before.

The rule, in this order:

0. A request with images, where there are encode workers, begins with an encode leg; what follows takes the embeddings
   instead of the images. Without encode workers, or once that has failed, the worker that computes the prompt encodes
   too.
1. Without prefill or without decode workers there is one leg, on a worker that can do it: an aggregated one, else a
   decode worker whose engine can compute a prompt too (a prefill worker cannot continue alone). Where none can, the
   request waits for the side that is missing. So it is for a forwarded request that two engine servers cannot share.
2. A prompt with media goes to a prefill worker: what an image costs is not among its tokens. So does every prompt where
   that is asked for (``legs`` of the settings), to compare.
3. Otherwise the lower cost in milliseconds decides, each way on the worker that is best for it:

       one leg  = queue + prompt + PAUSE_WEIGHT * pause         on an aggregated or decode worker
       two legs = queue + prompt + TRANSFER_WEIGHT * transfer   on a prefill worker, then a decode worker

   ``queue`` are the prompts before this one, ``prompt`` is its own computation: together the TTFT. Requests that
   generate on the worker get no token meanwhile: ``pause`` is the prompt's time once more, or 0 on a worker without
   any. ``transfer`` is what the second token waits for.

So a short rest has one leg, a long prompt two while the prefill side has room for it. Prompts overflow to decode
workers as soon as the queue of the prefill side is longer than what the pause counts, and come back when it is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.tasks import TASK_ROLES

WHOLE_ROLES = (Role.AGGREGATED,)
PREFILL_ROLES = (Role.PREFILL,)
DECODE_ROLES = (Role.DECODE,)
ENCODE_ROLES = (Role.ENCODE,)
ONE_LEG_ROLES = (Role.AGGREGATED, Role.DECODE)
"""Who can serve a whole request, unless it decodes only."""
EITHER_ROLES = (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
"""Of a question to the selector that leaves the number of legs to it."""


PAUSE_WEIGHT: Final = 0.1
"""TTFT counts most, or a full prefill side would keep prompts for seconds to spare a batch tenths. Simulated at several
loads (``docs/decisions/0080-one-leg-or-two-by-expected-time.md``): with 0.1 the TTFT is that of aggregated workers, and
requests take 2 to 7 % longer than apart; with 1 the p99 of the TTFT is a third longer."""

TRANSFER_WEIGHT: Final = 0.04
"""A transfer delays one token of one request. With as much as the pause, prompts of all lengths would be computed on
decode workers where moving KV is as slow as computing it; with 0, a rest of a few tokens would be moved."""


@dataclass(frozen=True, slots=True)
class LegSpec:
    """What the next worker has to do, and which workers may do it."""

    stage: Stage
    roles: tuple[Role, ...]
    reason: str
    """``aggregated``, ``local_prefill``, ``overflow``, ``no_prefill_worker``, ``disaggregated``, ``one_server``,
    ``media`` or ``task``."""


class RoleAvailability(NamedTuple):
    """Whether any worker of a role takes requests, and can be reached."""

    aggregated: bool = False
    prefill: bool = False
    decode: bool = False
    encode: bool = False
    whole: bool = False
    """Of any role: whether one can do a whole request."""

    @property
    def missing(self) -> str:
        """Return the role without which no request can be served although others are there; empty = none."""
        if self.whole or self.prefill == self.decode:
            return ""
        return "decode" if self.prefill else "prefill"


class Outlook(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a request expects of one way to serve it, in milliseconds."""

    queue_ms: float
    prompt_ms: float
    further_ms: float
    """The pause of others with one leg, the transfer with two."""
    weight: float
    """Of ``further_ms``."""

    @property
    def cost_ms(self) -> float:
        return self.queue_ms + self.prompt_ms + self.weight * self.further_ms


class LegChoice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One leg or two, and why."""

    reason: str
    """As in ``LegSpec``."""
    one: Outlook | None
    """``None`` = no worker that could do the whole takes it now."""
    two: Outlook | None


class PromptWorker(NamedTuple):
    """What one worker would need for a prompt."""

    queue_ms: float
    prompt_ms: float
    is_decoding: bool
    """Whether it has other requests, which would pause."""


def one_leg(workers: Iterable[PromptWorker]) -> Outlook | None:
    """Return what the best of some workers offers for a whole request."""
    return _best(
        Outlook(queue_ms, prompt_ms, prompt_ms if is_decoding else 0.0, PAUSE_WEIGHT)
        for queue_ms, prompt_ms, is_decoding in workers
    )


def two_legs(workers: Iterable[PromptWorker], transfer_ms: float) -> Outlook | None:
    """Return what the best of some prefill workers offers."""
    return _best(Outlook(each.queue_ms, each.prompt_ms, transfer_ms, TRANSFER_WEIGHT) for each in workers)


def _best(outlooks: Iterable[Outlook]) -> Outlook | None:
    return min(outlooks, key=lambda outlook: outlook.cost_ms, default=None)


def choose_legs(one: Outlook | None, two: Outlook | None) -> LegChoice:
    """Return which costs less; at least one of them is possible."""
    if two is None:
        reason = "no_prefill_worker"
    elif one is None or two.cost_ms < one.cost_ms:
        reason = "disaggregated"
    elif two.cost_ms - two.queue_ms < one.cost_ms:
        reason = "overflow"
    else:
        reason = "local_prefill"
    return LegChoice(reason, one, two)


def spec_of(choice: LegChoice) -> LegSpec:
    """Return what a choice asks of which workers."""
    return _SPECS[choice.reason]


def first_leg(has: RoleAvailability, always_two: bool) -> LegSpec:
    """Return the first leg as far as roles decide it; ``EITHER`` where milliseconds do."""
    if has.prefill and has.decode:
        return _PREFILL if always_two else EITHER
    if has.aggregated or not has.decode:
        return _AGGREGATED
    return _SPECS["no_prefill_worker"] if has.whole else _PREFILL


_PREFILL: Final = LegSpec(Stage.PREFILL, PREFILL_ROLES, "disaggregated")
_AGGREGATED: Final = LegSpec(Stage.WHOLE, WHOLE_ROLES, "aggregated")
_SPECS: Final = {
    spec.reason: spec
    for spec in (
        _PREFILL,
        *(LegSpec(Stage.WHOLE, ONE_LEG_ROLES, why) for why in ("local_prefill", "overflow", "no_prefill_worker")),
    )
}

ONE_SERVER: Final = LegSpec(Stage.WHOLE, ONE_LEG_ROLES, "one_server")
"""Of a forwarded request that two engine servers cannot share."""

EITHER: Final = LegSpec(Stage.PREFILL, EITHER_ROLES, "")
"""One leg or two: the selector decides."""

ENCODE_LEG: Final = LegSpec(Stage.ENCODE, ENCODE_ROLES, "media")
"""Before the legs that compute tokens."""

TASK_LEGS: Final = {stage: LegSpec(stage, (role,), "task") for stage, role in TASK_ROLES.items()}
"""The one leg of a task."""

SECOND_LEG: Final = LegSpec(Stage.DECODE, DECODE_ROLES, "disaggregated")
"""After a prefill leg that did not finish the request."""
