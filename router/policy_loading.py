"""From a policy's name to the policy, by entry points: ``kv`` is in the core, others are found like those of operators.

The group is ``poolgrid.policies``.
"""

from __future__ import annotations

import importlib
from typing import Any

from poolgrid.kernel.decision.policy import APPROXIMATE_TTL_MS, Policy, PolicyOptions
from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.kv_policy import KvAware
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Selector
from poolgrid.server.process.plugins import POLICIES, check_policy_name, load_plugin
from poolgrid.server.router.settings import RouterSettings


class PolicyError(ValueError):
    """A policy cannot be used."""


def make_policy(name: str, approximate_ttl_ms: float = APPROXIMATE_TTL_MS) -> Policy:
    """Return the policy of a name, or an object of ``module:Class``; raises ``PolicyError``."""
    made = KvAware if name == KvAware.name else _loaded(name)
    configured = getattr(made, "configured", None)
    try:
        policy = made() if configured is None else configured(PolicyOptions(approximate_ttl_ms))
    except Exception as error:
        raise PolicyError(f"--policy {name}: {type(error).__name__}: {error}") from error
    missing = [each for each in ("name", "needs_overlap", "choose") if not hasattr(policy, each)]
    if missing:
        raise PolicyError(f"--policy {name}: it lacks {', '.join(missing)}; see docs/policies.md")
    loaded: Policy = policy
    return loaded


def load_policy(settings: RouterSettings) -> Policy:
    """Return the policy that the settings name; raises ``PolicyError``."""
    return make_policy(settings.policy, settings.approximate_ttl_ms)


def make_state(settings: RouterSettings, policy: Policy | None = None) -> RouterState:
    """Return the state of a router that has just begun; raises ``PolicyError``."""
    index, ledger = PrefixIndex(settings.index_budget_bytes), settings.ledger_budget_bytes
    projection = Projection(index, LoadLedger(settings.reservation_ttl_ms, ledger))
    return RouterState(Selector(projection, policy or load_policy(settings), settings.worker_queue_factor))


def _loaded(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    try:
        check_policy_name(name)
    except ValueError as error:
        raise PolicyError(str(error)) from None
    try:
        return getattr(importlib.import_module(module), attribute) if colon else load_plugin(POLICIES, name)
    except Exception as error:
        raise PolicyError(f"--policy {name}: {type(error).__name__}: {error}") from error
