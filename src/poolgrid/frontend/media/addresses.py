"""Which network addresses media may be fetched from. Pure: addresses in, a reason or nothing out.

A client chooses the URL, and this process stands inside the operator's network: without this, a chat message could read
the cloud's metadata service or a neighbour's admin page. So an address must be public unicast, however it is written
(IPv4 inside IPv6, 6to4, Teredo, NAT64), or lie in a network that the operator allowed.

What is not public is a list (``refused_networks``) and nothing else: no answer depends on the version of Python.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

from poolgrid.frontend.media.refused_networks import CARRIERS, GLOBAL_UNICAST, REFUSED_IPV4, REFUSED_IPV6, Network

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA_ADDRESSES = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, GCP, Azure, OpenStack
        "169.254.170.2",  # AWS ECS credentials
        "fd00:ec2::254",  # AWS over IPv6
        "fd20:ce::254",  # GCP over IPv6
        "100.100.100.200",  # Alibaba Cloud
        "192.0.0.192",  # Oracle Cloud, first generation
        "168.63.129.16",  # Azure's wire server: routable by its number, and not public
    )
)
"""Metadata services; but for the last, their networks are refused already, and the names make the message better."""

_REFUSED: tuple[tuple[Network, str], ...] = tuple(
    (ipaddress.ip_network(text), what) for text, what in (*REFUSED_IPV4.items(), *REFUSED_IPV6.items())
)
_CARRIERS = tuple(ipaddress.IPv6Network(text) for text in CARRIERS)
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
_TEREDO = ipaddress.IPv6Network("2001::/32")
_U32 = 0xFFFF_FFFF


class AddressPolicy:
    """Tells which addresses are refused."""

    def __init__(self, allowed_networks: Iterable[str] = ()) -> None:
        self._allowed: list[Network] = [ipaddress.ip_network(text) for text in allowed_networks]

    def refusal(self, text: str) -> str | None:
        """Return why an address must not be connected to, or ``None`` when it may.

        An address that carries others is refused when one of them is: allowing a NAT64 prefix allows nothing behind it.
        """
        try:
            # A zone (fe80::1%eth0) only says which interface.
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return "not an IP address"
        # What is carried first: it is what would be reached, and names the danger better.
        for each in (*_carried(address), address):
            if not any(each in network for network in self._allowed):
                why = _why_not_public(each)
                if why is not None:
                    return why
        return None


def _carried(address: Address) -> Iterator[Address]:
    """Yield the IPv4 addresses that an IPv6 address carries and that a gateway would connect to."""
    if isinstance(address, ipaddress.IPv4Address):
        return
    number = int(address)
    if any(address in network for network in _CARRIERS) and number > 1:
        yield ipaddress.IPv4Address(number & _U32)
    elif address in _SIX_TO_FOUR:
        yield ipaddress.IPv4Address(number >> 80 & _U32)
    elif address in _TEREDO:
        yield ipaddress.IPv4Address(number >> 64 & _U32)  # the server
        yield ipaddress.IPv4Address(~number & _U32)  # the client, written in complement


def _why_not_public(address: Address) -> str | None:
    if address in METADATA_ADDRESSES:
        return "a metadata service"
    for network, what in _REFUSED:
        if address in network:
            return f"in {network}, {what}"
    if isinstance(address, ipaddress.IPv6Address) and address not in GLOBAL_UNICAST:
        if any(address in network for network in _CARRIERS):
            return None  # judged by the address inside
        return f"private or reserved, outside {GLOBAL_UNICAST}"
    return None
