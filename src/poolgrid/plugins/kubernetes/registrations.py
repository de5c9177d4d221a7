"""Names on Kubernetes: EndpointSlices, read from the API server (``api_reader``). Nothing is written there.

A look lists the slices with the labels of names in each Kubernetes namespace.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from poolgrid.kernel.wire.registration import Registration
from poolgrid.plugins.kubernetes.api_reader import ACCOUNT_DIR, ApiReader, api_server, look_pace_s
from poolgrid.plugins.kubernetes.slices import COMPONENT_LABEL, NAMESPACE_LABEL, EndpointSlice, decode_slices, seen_in
from poolgrid.server.discovery.registry import DiscoveryUnavailable, Scope, Seen
from poolgrid.server.discovery.settings import DiscoverySettings
from poolgrid.server.process.clock import Clock

SLICES = "endpointslices of discovery.k8s.io"

SLICES_MAX = 10_000
"""Slices of one look; more are something else."""


class KubernetesRegistrations:
    """Implements ``poolgrid.server.discovery.registry.RegistrationStore``; reads only."""

    kind = "kubernetes"
    writable = False

    def __init__(self, api: str, account_dir: Path, namespaces: Sequence[str], clock: Clock, chance: float) -> None:
        """``api`` is the API server's URL and ``namespaces`` are Kubernetes'; none = the one of the account.

        ``chance`` is a number between 0 and 1, of which the pace is made.
        """
        self.where = api
        self._reader = ApiReader(api, account_dir, clock)
        self._namespaces = tuple(namespaces)
        self.look_s = look_pace_s(chance)
        self._looks = 0

    async def open(self) -> None:
        """Read the account; raises ``ValueError`` or ``OSError`` without one."""
        await self._reader.open()
        if not self._namespaces:
            self._namespaces = (await self._reader.own_namespace(),)
        self.where = f"{self._reader.url}, {', '.join(self._namespaces)}"

    async def close(self) -> None:
        self._reader.close()

    async def write(self, registration: Registration, data: bytes) -> None:
        raise DiscoveryUnavailable(f"{registration.key} is not written: names on Kubernetes are read only")

    async def remove(self, key: str) -> None:
        raise DiscoveryUnavailable(f"{key} is not removed: names on Kubernetes are read only")

    async def look(self, scopes: Sequence[Scope]) -> list[Seen]:
        """Return the entries of some scopes; raises ``DiscoveryUnavailable``."""
        await self._reader.begin_look()
        self._looks += 1
        found: dict[tuple[str, str], EndpointSlice] = {}
        for selector in sorted({_selector(scope) for scope in scopes}):
            for namespace in self._namespaces:
                path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
                for each in await self._reader.every(path, selector, decode_slices, SLICES, SLICES_MAX):
                    found[each.metadata.namespace, each.metadata.name] = each
        return seen_in(found.values(), self._looks)


def _selector(scope: Scope) -> str:
    namespace = f"{NAMESPACE_LABEL}={scope.namespace}" if scope.namespace else NAMESPACE_LABEL
    component = f"{COMPONENT_LABEL}={scope.component}" if scope.component else COMPONENT_LABEL
    return f"{namespace},{component}"


def open_store(settings: DiscoverySettings, clock: Clock) -> KubernetesRegistrations:
    """Return the registrations that a cluster has (entry point of ``poolgrid.discovery``)."""
    api = settings.kubernetes_api or api_server()
    return KubernetesRegistrations(api, ACCOUNT_DIR, settings.kubernetes_namespace, clock, os.urandom(1)[0] / 255)
