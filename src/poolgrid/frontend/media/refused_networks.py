"""Networks that media are never fetched from, by what they are for. Pure data.

They are written out because what Python's ``ipaddress`` calls global changes with its patch version. Sources: the IANA
IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890 and its updates), all entries, also those that are marked
globally reachable (anycast services of the network itself, at which nobody serves media); the multicast and reserved
parts of the address space registries; and prefixes that were withdrawn, because machines still route them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

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
