"""From settings to names: the only place that picks a backend."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from poolgrid.discovery.names import Names
from poolgrid.discovery.ports import NameStore
from poolgrid.discovery.settings import NamesSettings
from poolgrid.process.clock import Clock


async def open_names(
    opened: AsyncExitStack, settings: NamesSettings, clock: Clock, registry: CollectorRegistry | None = None
) -> Names:
    """Return the names that settings ask for, reached; raises ``ValueError`` or ``OSError``."""
    names = Names(_store(settings, clock), settings.namespace, settings.names_lease_s, clock, registry)
    opened.push_async_callback(names.close)
    await names.open()
    return names


def _store(settings: NamesSettings, clock: Clock) -> NameStore:
    # Each is imported when it is used: nobody needs two of them.
    if settings.names == "nats":
        from poolgrid.discovery.nats import NatsNames

        return NatsNames(settings, settings.names_lease_s, settings.names_replicas, clock)
    if settings.names == "kubernetes":
        from poolgrid.discovery.kubernetes import KubernetesNames, api_server

        api = settings.kubernetes_api or api_server()
        namespaces = settings.kubernetes_namespace
        return KubernetesNames(api, settings.kubernetes_account_dir, namespaces, clock, os.urandom(1)[0] / 255)
    assert settings.names_dir is not None, "the settings have seen to that"
    from poolgrid.discovery.directory import DirectoryNames

    return DirectoryNames(settings.names_dir, clock)
