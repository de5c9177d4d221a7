"""From settings to names: the only place that picks a backend."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import cast

from prometheus_client import CollectorRegistry

from poolgrid.discovery.directory import DirectoryRegistrations
from poolgrid.discovery.discovery import Discovery
from poolgrid.discovery.ports import RegistrationStore
from poolgrid.discovery.settings import DiscoverySettings
from poolgrid.process.clock import Clock
from poolgrid.process.plugins import DISCOVERY, load_plugin


async def open_discovery(
    opened: AsyncExitStack, settings: DiscoverySettings, clock: Clock, registry: CollectorRegistry | None = None
) -> Discovery:
    """Return the names that settings ask for, reached; raises ``ValueError`` or ``OSError``."""
    names = Discovery(_store(settings, clock), settings.namespace, settings.names_lease_ms // 1000, clock, registry)
    opened.push_async_callback(names.close)
    await names.open()
    return names


def _store(settings: DiscoverySettings, clock: Clock) -> RegistrationStore:
    if settings.names != "directory":
        return cast(RegistrationStore, load_plugin(DISCOVERY, settings.names)(settings, clock))
    assert settings.names_dir is not None, "the settings have seen to that"
    return DirectoryRegistrations(settings.names_dir, clock)
