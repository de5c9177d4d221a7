"""In how many legs a request is served: whole on one worker, or prefill and decode on two; media encoded before.

The rule, in this order:

0. A request with images, where there are encode workers, begins with an encode leg; what follows takes the embeddings
   instead of the images. Without encode workers, or once that has failed, who computes the prompt encodes too.
1. Without prefill or without decode workers there is one leg, on whoever can do it: an aggregated worker, else a decode
   worker (it can compute a prompt too; a prefill worker cannot go on alone).
2. A prompt of which at most ``local_prefill_max_tokens`` tokens are not cached on some decode worker is served whole by
   a decode worker: moving its KV would cost more than computing the rest. Never a prompt with media: what an image
   costs is not among its tokens.
3. Otherwise a prefill worker computes the prompt and the first token, and a decode worker goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from poolgrid.wire.identifiers import Role, Stage

WHOLE_ROLES = (Role.AGGREGATED,)
PREFILL_ROLES = (Role.PREFILL,)
DECODE_ROLES = (Role.DECODE,)
ENCODE_ROLES = (Role.ENCODE,)


@dataclass(frozen=True, slots=True)
class LegSpec:
    """What the next worker is asked to do, and who may be asked."""

    stage: Stage
    roles: tuple[Role, ...]
    reason: str
    """``aggregated``, ``local_prefill``, ``no_prefill_worker``, ``disaggregated`` or ``media``."""


class RoleAvailability(NamedTuple):
    """Whether any worker of a role takes requests, and can be reached."""

    whole: bool
    prefill: bool
    decode: bool
    encode: bool


def first_leg(
    has_aggregated: bool, has_prefill: bool, has_decode: bool, uncached_tokens: int, local_prefill_max_tokens: int
) -> LegSpec:
    """Return the first leg; ``uncached_tokens`` counts against the decode worker that holds most of the prompt."""
    if has_prefill and has_decode:
        return _LOCAL_PREFILL if uncached_tokens <= local_prefill_max_tokens else _PREFILL
    if not has_aggregated and has_decode:
        return _NO_PREFILL_WORKER
    return _AGGREGATED


_LOCAL_PREFILL: Final = LegSpec(Stage.WHOLE, DECODE_ROLES, "local_prefill")
_PREFILL: Final = LegSpec(Stage.PREFILL, PREFILL_ROLES, "disaggregated")
_NO_PREFILL_WORKER: Final = LegSpec(Stage.WHOLE, DECODE_ROLES, "no_prefill_worker")
_AGGREGATED: Final = LegSpec(Stage.WHOLE, WHOLE_ROLES, "aggregated")

ENCODE_LEG: Final = LegSpec(Stage.ENCODE, ENCODE_ROLES, "media")
"""Before the legs that compute tokens."""

NEVER_LOCAL: Final = -1
"""As ``local_prefill_max_tokens``: not even a prompt that is all cached."""

SECOND_LEG: Final = LegSpec(Stage.DECODE, DECODE_ROLES, "disaggregated")
"""After a prefill leg that did not finish the request."""
