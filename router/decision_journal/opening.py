"""Puts a router's decision journal together with the real things: a directory, a clock, the settings it must name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any

from poolgrid.consolidator.journal.posix_disk import DirectoryInUse, PosixDisk
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.consolidator.tuning import Tuning
from poolgrid.process.clock import Clock
from poolgrid.process.settings import with_constants
from poolgrid.router.core.kv_policy import KvAware
from poolgrid.router.core.policy import Policy
from poolgrid.router.core.router_state import RouterState
from poolgrid.router.decision_journal.entries import MILLISECONDS_VERSION, RouterSettingsNoted
from poolgrid.router.decision_journal.reader import DIRECTORY
from poolgrid.router.decision_journal.recorder import DecisionRecorder, DecisionSegments, settings_noted
from poolgrid.router.policies.approximate import WeightedApproximate
from poolgrid.router.policies.weighted_cost import FIELD_WEIGHTS, CostWeights, FieldCost, WeightedCost
from poolgrid.router.policy_loading import load_policy
from poolgrid.router.settings import RouterSettings

log = logging.getLogger(__name__)

DECIDING_SETTINGS = (
    "policy",
    "approximate_ttl_ms",
    "index_budget_bytes",
    "ledger_budget_bytes",
    "worker_queue_factor",
    "reservation_ttl_ms",
)
"""Settings and constants that a decision depends on, besides its inputs."""


def settings_of(noted: RouterSettingsNoted) -> RouterSettings:
    """Return recorded settings; those that an old recording does not name have their defaults."""
    known = {name: value for name, value in noted.settings.items() if name in DECIDING_SETTINGS}
    return with_constants(RouterSettings, known)


def policy_of(noted: RouterSettingsNoted) -> Policy:
    """Return the policy that recorded settings name; raises ``PolicyError`` when it cannot be loaded here."""
    if noted.inputs_version < MILLISECONDS_VERSION:
        former = _former_policy(noted.settings)
        if former is not None:
            return former
    return load_policy(settings_of(noted))


def _former_policy(recorded: Mapping[str, Any]) -> Policy | None:
    """Return what a policy was when costs had weights; ``None`` for one that is still the same."""
    name = recorded.get("policy", "kv")
    if name == "predicted":
        return KvAware(is_former=True)
    temperature = float(recorded.get("temperature", 0.0))
    if name == "field":
        return FieldCost(FIELD_WEIGHTS, temperature)
    if name not in ("kv", "approximate"):
        return None
    names = CostWeights.__dataclass_fields__
    weights = {each: float(value) for each, value in recorded.items() if each in names}
    credit = float(recorded.get("overlap_weight", 1.0))
    known = CostWeights(**weights)
    known = replace(
        known,
        device_weight=known.device_weight * credit,
        host_weight=known.host_weight * credit,
        disk_weight=known.disk_weight * credit,
    )
    if name == "kv":
        return WeightedCost(known, temperature)
    approximate = WeightedApproximate(known, temperature)
    approximate.ttl_ms = float(recorded.get("approximate_ttl_ms", approximate.ttl_ms))
    return approximate


def open_recorder(
    settings: RouterSettings, data: ConsolidatorSettings, state: RouterState, clock: Clock
) -> DecisionRecorder | None:
    """Return the recorder of a router's decisions, or ``None`` when they are not to be kept or the disk refuses.

    Raises ``DirectoryInUse`` when another router of the same id writes there.
    """
    if data.data_dir is None or not settings.record_decisions:
        return None
    directory = data.data_dir / DIRECTORY / settings.router_id
    try:
        disk = PosixDisk(directory)
    except DirectoryInUse as error:
        raise DirectoryInUse(
            f"recording decisions in {directory}: another router of the id {settings.router_id!r} does; give each "
            "router a router_id of its own"
        ) from error
    except OSError as error:
        log.error("recording decisions in %s: %s; decisions are not recorded", directory, error)
        return None
    try:
        segments = DecisionSegments(disk, data.journal_retention_bytes, data.journal_retention_ms)
    except OSError as error:
        disk.close()
        log.error("recording decisions in %s: %s; decisions are not recorded", directory, error)
        return None
    for line in segments.report:
        log.warning("decision journal %s: %s", directory, line)
    values = {name: getattr(settings, name) for name in DECIDING_SETTINGS}
    return DecisionRecorder(
        segments,
        state,
        settings_noted(settings.router_id, metadata.version("poolgrid"), values),
        clock,
        Tuning().segment_bytes_of(data.journal_retention_bytes),
    )
