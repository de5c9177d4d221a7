"""Which network addresses media may be fetched from. Pure: addresses in, a reason or nothing out.

A client chooses the URL, and this process stands inside the operator's network: without this, a chat message could read
the cloud's metadata service or a neighbour's admin page. So an address must be globally routable, however it is
written (IPv4 inside IPv6, 6to4, Teredo, NAT64), or lie in a network that the operator allowed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

METADATA_ADDRESSES = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, GCP, Azure, OpenStack
        "169.254.170.2",  # AWS ECS credentials
        "fd00:ec2::254",  # AWS over IPv6
        "100.100.100.200",  # Alibaba Cloud
        "168.63.129.16",  # Azure's wire server: routable by its number, and not public
    )
)
"""Metadata services; most are refused as link-local or private already, the names make the message better."""

_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))


class AddressPolicy:
    """Tells which addresses are refused."""

    def __init__(self, allowed_networks: Iterable[str] = ()) -> None:
        self._allowed: list[Network] = [ipaddress.ip_network(text) for text in allowed_networks]

    def refusal(self, text: str) -> str | None:
        """Return why an address must not be connected to, or ``None`` when it may."""
        try:
            # A zone (fe80::1%eth0) only says which interface.
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return "not an IP address"
        meant = list(_embedded(address))
        if any(each in network for each in (address, *meant) for network in self._allowed):
            return None
        for each in (*meant, address):
            why = _why_not_public(each)
            if why is not None:
                return why
        return None


def _embedded(address: Address) -> Iterator[Address]:
    """Yield the IPv4 addresses that an IPv6 address carries and that a gateway would connect to."""
    if isinstance(address, ipaddress.IPv4Address):
        return
    for inner in (address.ipv4_mapped, address.sixtofour):
        if inner is not None:
            yield inner
    if address.teredo is not None:
        yield from address.teredo
    if any(address in network for network in _NAT64):
        yield ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if int(address) >> 32 == 0 and int(address) > 1:
        yield ipaddress.IPv4Address(int(address))  # ::a.b.c.d, deprecated and still understood


def _why_not_public(address: Address) -> str | None:
    if address in METADATA_ADDRESSES:
        return "a metadata service"
    if address.is_loopback:
        return "a loopback address"
    if address.is_link_local:
        return "a link-local address"
    if address.is_multicast:
        return "a multicast address"
    if address.is_unspecified:
        return "the unspecified address"
    if isinstance(address, ipaddress.IPv6Address) and (address.ipv4_mapped is not None or address.sixtofour):
        return None  # judged by the address inside
    if not address.is_global or address.is_reserved:
        return "a private or reserved address"
    return None
