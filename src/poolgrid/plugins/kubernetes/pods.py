"""Pods of a cluster by a label selector, as addresses of engine servers.

A pod counts while it runs and does not end. Its readiness is not looked at: a probe that fails under load does not
mean that the engine is gone, and what follows the server asks it itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from poolgrid.plugins.kubernetes.api_reader import ACCOUNT_DIR, ApiReader, api_server, look_pace_s
from poolgrid.plugins.kubernetes.slices import ListMetadata
from poolgrid.server.process.clock import SystemClock

PODS_MAX = 1000
"""Pods of one selector; more than a follower takes, so that a wrong selector is reported."""


class PodMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """Which pod it is, and whether it is being ended."""

    deletion_timestamp: str | None = None


class PodStatus(msgspec.Struct, frozen=True):
    """What a pod is at, and its address."""

    phase: str = ""
    ip: str | None = msgspec.field(name="podIP", default=None)


class Pod(msgspec.Struct, frozen=True):
    """A pod of ``v1``."""

    metadata: PodMetadata = PodMetadata()
    status: PodStatus = PodStatus()

    @property
    def serves(self) -> bool:
        return self.status.phase == "Running" and bool(self.status.ip) and not self.metadata.deletion_timestamp


class PodList(msgspec.Struct, frozen=True):
    """A page of pods."""

    metadata: ListMetadata
    items: list[Pod] | None = None

    @property
    def more(self) -> str:
        """Token for the next page; empty = there is none."""
        return self.metadata.more

    @property
    def found(self) -> list[Pod]:
        return self.items or []


_decoder = msgspec.json.Decoder(PodList)


def decode_pods(data: bytes) -> PodList:
    """Return a page; raises ``ValueError`` when it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"this is no list of pods: {error}") from None


class SelectedPods:
    """The pods that a selector finds in one namespace."""

    def __init__(self, reader: ApiReader, selector: str, namespace: str) -> None:
        self._reader = reader
        self._selector = selector
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self.look_s = look_pace_s(os.urandom(1)[0] / 255)

    async def addresses(self) -> list[str]:
        """Return the addresses of the pods that serve; raises ``DiscoveryUnavailable``."""
        await self._reader.begin_look()
        pods = await self._reader.every(self._path, self._selector, decode_pods, "pods", PODS_MAX)
        return sorted({pod.status.ip for pod in pods if pod.serves and pod.status.ip})

    def close(self) -> None:
        self._reader.close()


async def open_pods(selector: str, namespace: str, api: str = "", account_dir: Path = ACCOUNT_DIR) -> SelectedPods:
    """Return the pods of a selector; an empty ``namespace`` is the one of the account. Raises ``ValueError`` or
    ``OSError`` outside of a cluster."""
    reader = ApiReader(api or api_server("engine_url is k8s+http://"), account_dir, SystemClock())
    await reader.open()
    return SelectedPods(reader, selector, namespace or await reader.own_namespace())
