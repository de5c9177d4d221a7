"""From a policy's name in the settings to the policy: one of poolgrid's, or a class of the operator's own."""

from __future__ import annotations

import importlib

from poolgrid.router.core.cost_weights import CostWeights
from poolgrid.router.core.policy import Policy, make_policy
from poolgrid.router.settings import RouterSettings


class PolicyError(ValueError):
    """A policy cannot be used."""


def load_policy(settings: RouterSettings) -> Policy:
    """Return the policy that the settings name; raises ``PolicyError``."""
    return policy_named(settings.policy, settings.cost_weights(), settings.temperature)


def policy_named(name: str, weights: CostWeights, temperature: float) -> Policy:
    """Return a policy that comes with poolgrid, or an object of ``module:Class``; raises ``PolicyError``."""
    if ":" not in name:
        try:
            return make_policy(name, weights, temperature)
        except ValueError as error:
            raise PolicyError(f"{error}, or module:Class") from None
    module_name, _, class_name = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:
        raise PolicyError(f"loading policy {name!r}: {type(error).__name__}: {error}") from error
    missing = [each for each in ("name", "needs_overlap", "choose") if not hasattr(policy, each)]
    if missing:
        raise PolicyError(f"loading policy {name!r}: it lacks {', '.join(missing)}; see docs/policies.md")
    loaded: Policy = policy
    return loaded
