"""From what a pool last said of itself to whether it takes a request of a model and stage.

A pool without a fresh status is down. One that has nobody for a request and workers that load is loading, which is
no better for the request: it is told for people, and because it ends by itself. Workers that do a stage: those of its
role; an aggregated worker does any but encode, a decode worker also the whole. A pool whose ready workers are all full
is saturated; one that has only draining workers is draining.
"""

from __future__ import annotations

from poolgrid.global_router.core.choice.fallback import PoolStanding
from poolgrid.wire.identifiers import Role, Stage
from poolgrid.wire.selection import ModelStatus, PoolStatus

ROLES: dict[Stage, tuple[Role, ...]] = {
    Stage.WHOLE: (Role.AGGREGATED, Role.DECODE),
    Stage.PREFILL: (Role.PREFILL, Role.AGGREGATED),
    Stage.DECODE: (Role.DECODE, Role.AGGREGATED),
    Stage.ENCODE: (Role.ENCODE,),
}


def model_status(status: PoolStatus | None, model: str) -> ModelStatus | None:
    """Return what a pool says of one model."""
    if status is None:
        return None
    return next((each for each in status.models if each.model == model), None)


def state_for(status: PoolStatus | None, model: str, stage: Stage) -> PoolStanding:
    """Return whether a pool with a fresh ``status`` takes a request; ``None`` is no fresh status."""
    if status is None or not status.ready:
        return PoolStanding.DOWN
    served = model_status(status, model)
    nobody = PoolStanding.LOADING if status.loading_workers else PoolStanding.DOWN
    if served is None:
        return nobody
    roles = [role for role in served.roles if role.role in ROLES[stage]]
    usable = [role for role in roles if role.ready]
    if not usable:
        return PoolStanding.DRAINING if any(role.draining for role in roles) else nobody
    if all(role.requests >= role.capacity for role in usable):
        return PoolStanding.SATURATED
    return PoolStanding.AVAILABLE
