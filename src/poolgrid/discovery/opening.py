"""From settings to names: the only place that picks a backend."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import cast

from prometheus_client import CollectorRegistry

from poolgrid.discovery.directory import DirectoryNames
from poolgrid.discovery.names import Names
from poolgrid.discovery.ports import NameStore
from poolgrid.discovery.settings import NamesSettings
from poolgrid.process.clock import Clock
from poolgrid.process.plugins import DISCOVERY, load_plugin


async def open_names(
    opened: AsyncExitStack, settings: NamesSettings, clock: Clock, registry: CollectorRegistry | None = None
) -> Names:
    """Return the names that settings ask for, reached; raises ``ValueError`` or ``OSError``."""
    names = Names(_store(settings, clock), settings.namespace, settings.names_lease_s, clock, registry)
    opened.push_async_callback(names.close)
    await names.open()
    return names


def _store(settings: NamesSettings, clock: Clock) -> NameStore:
    if settings.names != "directory":
        return cast(NameStore, load_plugin(DISCOVERY, settings.names)(settings, clock))
    assert settings.names_dir is not None, "the settings have seen to that"
    return DirectoryNames(settings.names_dir, clock)
