"""Policy ``kv`` without admission of sessions, as a baseline: a router that loads it lets no turn wait for a place."""

from __future__ import annotations

from poolgrid.router.core.kv_policy import KvAware
from poolgrid.router.core.working_set import WorkingSet


class PlainKv(KvAware):
    """Chooses as ``kv`` does."""

    name = "plain-kv"


def _always_free(self: WorkingSet, blocks: int) -> bool:
    return True


WorkingSet.is_free = _always_free  # type: ignore[method-assign]
