"""From EndpointSlices of Kubernetes to registrations: pods of a cluster as registered processes. Pure.

Rules
    1. A slice counts when it has the labels ``poolgrid/namespace`` and ``poolgrid/component``, which it has from its
       Service. Each of its ports is an endpoint of that name: ``http`` and ``https`` as ``appProtocol``, or a port
       that is called ``http``, make a URL, every other port is ZMQ's.
    2. A pod has a name while it is ready and does not end. No process renews anything: the cluster's word is as good
       as the look that brought it, so each look renews all that it has (``Seen.mark``).
    3. The same pod may stand in several slices: of several Services, of both address families, or during a change. It
       is one instance, by its uid. It ends when any of them reports it, and else is ready when any of them reports it.
       Its IPv4 address comes first.
    4. A cluster does not report when a pod began. A life is made from the pod's uid alone, so that all readers see the
       same lives in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from poolgrid.kernel.wire.addresses import bracketed
from poolgrid.kernel.wire.registration import UNKNOWN_START, Registration
from poolgrid.server.discovery.registry import Seen

NAMESPACE_LABEL = "poolgrid/namespace"
COMPONENT_LABEL = "poolgrid/component"

LEASE_MS = 10_000
"""Lease of registrations, because they must have one: five looks. None ends by it while looks succeed."""

FAMILIES = ("IPv4", "IPv6")
"""Types of addresses that are read, the one that is preferred first; names of hosts (FQDN) are no pods."""


class Conditions(msgspec.Struct, frozen=True):
    """State of an endpoint in the cluster; ``None`` = not reported."""

    ready: bool | None = None
    terminating: bool | None = None


class Reference(msgspec.Struct, frozen=True):
    """The pod behind an endpoint."""

    name: str = ""
    uid: str = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    """One pod in a slice."""

    addresses: list[str]
    conditions: Conditions | None = None
    target_ref: Reference | None = None
    hostname: str | None = None


class Port(msgspec.Struct, frozen=True, rename="camel"):
    """A port that all pods of a slice have."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None
    app_protocol: str | None = None


class SliceMetadata(msgspec.Struct, frozen=True):
    """Which slice it is, and of what."""

    name: str
    namespace: str
    labels: dict[str, str] | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """A slice of ``discovery.k8s.io/v1``, of which lists may be ``null``."""

    metadata: SliceMetadata
    address_type: str
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class ListMetadata(msgspec.Struct, frozen=True, rename={"more": "continue"}):
    """Where a list continues."""

    more: str = ""
    """Token for the next page; empty = there is none."""


class SliceList(msgspec.Struct, frozen=True):
    """A page of slices."""

    metadata: ListMetadata
    items: list[EndpointSlice] | None = None

    @property
    def more(self) -> str:
        """Token for the next page; empty = there is none."""
        return self.metadata.more

    @property
    def found(self) -> list[EndpointSlice]:
        return self.items or []


_DECODER = msgspec.json.Decoder(SliceList)


def decode_slices(data: bytes) -> SliceList:
    """Return a page; raises ``ValueError`` when it is none."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"this is no list of EndpointSlices: {error}") from None


@dataclass(slots=True)
class _Pod:
    instance: str
    ready: bool = False
    ending: bool = False
    endpoints: dict[str, str] = field(default_factory=dict)


def seen_in(slices: Iterable[EndpointSlice], look: int) -> list[Seen]:
    """Return the entries that slices of one look make; ``look`` counts the looks of a reader."""
    pods: dict[tuple[str, str, str], _Pod] = {}
    read = [each for each in slices if each.address_type in FAMILIES]
    # In an order that does not depend on the server's: equal entries are the same.
    read.sort(key=lambda each: (FAMILIES.index(each.address_type), each.metadata.namespace, each.metadata.name))
    for each in read:
        labels = each.metadata.labels or {}
        namespace, component = labels.get(NAMESPACE_LABEL, ""), labels.get(COMPONENT_LABEL, "")
        if not namespace or not component:
            continue
        ports = [port for port in each.ports or () if port.name and port.port and port.protocol in ("TCP", None)]
        for endpoint in each.endpoints or ():
            if not endpoint.addresses:
                continue
            address = endpoint.addresses[0]
            about = endpoint.target_ref or Reference()
            uid = about.uid or f"{each.metadata.namespace}/{address}"
            pod = pods.get((namespace, component, uid))
            if pod is None:
                pod = pods[namespace, component, uid] = _Pod(about.name or endpoint.hostname or address)
            conditions = endpoint.conditions or Conditions()
            pod.ready = pod.ready or conditions.ready is not False
            pod.ending = pod.ending or conditions.terminating is True
            for port in ports:
                assert port.name is not None, "it was looked at above"
                pod.endpoints.setdefault(port.name, _address(port, address))
    return [
        _entry(namespace, component, uid, pod, look)
        for (namespace, component, uid), pod in pods.items()
        if pod.ready and not pod.ending
    ]


def _address(port: Port, host: str) -> str:
    scheme = port.app_protocol if port.app_protocol in ("http", "https") else "http" if port.name == "http" else "tcp"
    return f"{scheme}://{bracketed(host)}:{port.port}"


def _entry(namespace: str, component: str, uid: str, pod: _Pod, look: int) -> Seen:
    life = UNKNOWN_START + hashlib.sha256(uid.encode()).hexdigest()[: 24 - len(UNKNOWN_START)]
    made = Registration(
        namespace=namespace,
        component=component,
        instance=pod.instance,
        life=life,
        endpoints=pod.endpoints,
        lease_ms=LEASE_MS,
    )
    return Seen(made.key, msgspec.json.encode(made), look)
