"""From a policy's name in the settings to the policy: one of poolgrid's, or a class of the operator's own."""

from __future__ import annotations

import importlib

from poolgrid.router.core.policy import Policy, make_policy
from poolgrid.router.settings import RouterSettings


class PolicyError(ValueError):
    """A policy cannot be used."""


def load_policy(settings: RouterSettings) -> Policy:
    """Return the policy that the settings name; raises ``PolicyError``."""
    if ":" not in settings.policy:
        try:
            return make_policy(settings.policy, settings.cost_weights(), settings.temperature)
        except ValueError as error:
            raise PolicyError(f"{error}, or module:Class") from None
    module_name, _, class_name = settings.policy.partition(":")
    try:
        policy = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:
        raise PolicyError(f"loading policy {settings.policy!r}: {type(error).__name__}: {error}") from error
    missing = [name for name in ("name", "needs_overlap", "choose") if not hasattr(policy, name)]
    if missing:
        raise PolicyError(f"loading policy {settings.policy!r}: it lacks {', '.join(missing)}; see docs/policies.md")
    loaded: Policy = policy
    return loaded
