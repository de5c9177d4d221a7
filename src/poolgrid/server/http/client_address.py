"""By what clients without API keys are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import AddressValueError, IPv6Address
from typing import Any, Final

NETWORK_BYTES: Final = 8
"""Of an IPv6 address: one client has all addresses of such a network."""


def client_address(scope: Mapping[str, Any]) -> str:
    """Return the address that a request came from, of IPv6 the network; empty where there is none.

    Behind a gateway it is the gateway's: headers do not count, since a client can write them.
    """
    client = scope.get("client")
    if client is None:
        return ""
    address: str = client[0]
    if ":" not in address:
        return address
    try:
        known = IPv6Address(address)
    except AddressValueError:
        return address
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return known.packed[:NETWORK_BYTES].hex()
