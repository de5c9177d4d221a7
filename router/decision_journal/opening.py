"""Puts a router's decision journal together with the real things: a directory, a clock, the settings it must name."""

from __future__ import annotations

import logging
from importlib import metadata

from poolgrid.kernel.decision.policy import Policy
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.server.consolidator.journal.posix_disk import DirectoryInUse, PosixDisk
from poolgrid.server.consolidator.settings import ConsolidatorSettings, Tuning
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.settings import with_constants
from poolgrid.server.router.decision_journal.entries import RouterSettingsNoted
from poolgrid.server.router.decision_journal.reader import DIRECTORY
from poolgrid.server.router.decision_journal.recorder import DecisionRecorder, DecisionSegments, settings_noted
from poolgrid.server.router.policy_loading import load_policy
from poolgrid.server.router.settings import RouterSettings

log = logging.getLogger(__name__)

DECIDING_SETTINGS = (
    "policy",
    "approximate_ttl_ms",
    "index_budget_bytes",
    "ledger_budget_bytes",
    "worker_queue_factor",
    "reservation_ttl_ms",
    "session_admission",
)
"""Settings and constants that a decision depends on, besides its inputs."""


def settings_of(noted: RouterSettingsNoted) -> RouterSettings:
    """Return recorded settings; those that a recording does not name have their defaults."""
    known = {name: value for name, value in noted.settings.items() if name in DECIDING_SETTINGS}
    return with_constants(RouterSettings, known)


def policy_of(noted: RouterSettingsNoted) -> Policy:
    """Return the policy that recorded settings name; raises ``PolicyError`` when it cannot be loaded here."""
    return load_policy(settings_of(noted))


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
