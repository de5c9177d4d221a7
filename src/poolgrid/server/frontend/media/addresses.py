"""Which network addresses media may be fetched from. Pure: addresses in, a reason or nothing out.

A client chooses the URL, and this process stands inside the operator's network: without this, a chat message could read
the cloud's metadata service or a neighbour's admin page. So an address must be public unicast, however it is written
(IPv4 inside IPv6, 6to4, Teredo, NAT64), or lie in a network that the operator allowed.

What is not public is a list of networks and nothing else: what Python's ``ipaddress`` calls global changes with its
patch version. Sources: the IANA IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890 and its updates), all
entries, also those that are marked globally reachable (anycast services of the network itself, at which no server
offers media); the multicast and reserved parts of the address space registries; and prefixes that were withdrawn,
because machines still route them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

REFUSED_IPV4: Mapping[str, str] = {
    "0.0.0.0/32": "the unspecified address",
    "0.0.0.0/8": "this network (RFC 791)",
    "10.0.0.0/8": "private (RFC 1918)",
    "100.64.0.0/10": "private behind a carrier's NAT (RFC 6598)",
    "127.0.0.0/8": "a loopback address",
    "169.254.0.0/16": "a link-local address",
    "172.16.0.0/12": "private (RFC 1918)",
    "192.0.0.0/24": "IETF protocol assignments (RFC 6890), and a metadata service of Oracle",
    "192.0.2.0/24": "documentation (RFC 5737)",
    "192.31.196.0/24": "AS112 (RFC 7535)",
    "192.52.193.0/24": "automatic multicast tunneling (RFC 7450)",
    "192.88.99.0/24": "the withdrawn 6to4 relays (RFC 7526)",
    "192.168.0.0/16": "private (RFC 1918)",
    "192.175.48.0/24": "AS112 (RFC 7534)",
    "198.18.0.0/15": "benchmarks of networks (RFC 2544)",
    "198.51.100.0/24": "documentation (RFC 5737)",
    "203.0.113.0/24": "documentation (RFC 5737)",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "private or reserved (RFC 1112)",
}

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that IANA has given out as IPv6 unicast; the rest of the space is special, reserved, or carries IPv4."""

REFUSED_IPV6: Mapping[str, str] = {
    "::/128": "the unspecified address",
    "::1/128": "a loopback address",
    "64:ff9b:1::/48": "private NAT64 (RFC 8215)",
    "100::/64": "discarded (RFC 6666)",
    "100:0:0:1::/64": "a dummy prefix (RFC 9780)",
    "2001::/23": "private: IETF protocol assignments, Teredo, ORCHID (RFC 2928)",
    "2001:db8::/32": "documentation (RFC 3849)",
    "2002::/16": "the withdrawn 6to4 (RFC 7526)",
    "2620:4f:8000::/48": "AS112 (RFC 7534)",
    "3ffe::/16": "the withdrawn 6bone (RFC 3701)",
    "3fff::/20": "documentation (RFC 9637)",
    "5f00::/16": "segment routing (RFC 9602)",
    "fc00::/7": "private: unique local (RFC 4193)",
    "fe80::/10": "a link-local address",
    "fec0::/10": "private: the withdrawn site-local (RFC 3879)",
    "ff00::/8": "multicast",
}

CARRIERS: Mapping[str, str] = {
    "::/96": "IPv4-compatible (RFC 4291, withdrawn)",
    "::ffff:0:0/96": "IPv4-mapped (RFC 4291)",
    "::ffff:0:0:0/96": "IPv4-translated (RFC 7915)",
    "64:ff9b::/96": "NAT64 (RFC 6052)",
}
"""Prefixes whose last 32 bits are the IPv4 address that is really meant: judged by that one."""

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
