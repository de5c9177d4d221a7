"""Networks that media are never fetched from: all, in every form, on every Python, before a socket exists."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.server.frontend.media.addresses import (
    CARRIERS,
    GLOBAL_UNICAST,
    METADATA_ADDRESSES,
    REFUSED_IPV4,
    REFUSED_IPV6,
    AddressPolicy,
)
from poolgrid.server.frontend.media.fetcher import MediaFetcher
from tests.frontend.media.audit_events import AuditEvents
from tests.frontend.media.loading import Names, loading

REFUSED = [ipaddress.ip_network(text) for text in (*REFUSED_IPV4, *REFUSED_IPV6)]
POLICY = AddressPolicy()

IANA = (
    # iana-ipv4-special-registry
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32", "192.0.0.10/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24",
    "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15",
    "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4", "255.255.255.255/32", "224.0.0.0/4",
    # iana-ipv6-special-registry, less the two prefixes that carry IPv4 (64:ff9b::/96, ::ffff:0:0/96)
    "::1/128", "::/128", "64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "2001::/32", "2001:1::1/128",
    "2001:1::2/128", "2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48", "2001:10::/28", "2001:20::/28",
    "2001:30::/28", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20", "5f00::/16", "fc00::/7",
    "fe80::/10",
    # and what is multicast, withdrawn, or was never given out
    "ff00::/8", "fec0::/10", "4000::/3", "6000::/3", "8000::/3", "e000::/4", "200::/7", "fe00::/9",
)  # fmt: skip
"""Written out once more, so that an entry that gets lost is missed."""


def _embedded(number: int) -> list[str]:
    """An IPv4 address in every form that carries it."""
    prefixes = [int(ipaddress.IPv6Network(text).network_address) for text in CARRIERS]
    return [
        *(str(ipaddress.IPv6Address(prefix | number)) for prefix in prefixes),
        str(ipaddress.IPv6Address(0x2002 << 112 | number << 80)),
        str(ipaddress.IPv6Address(0x2001_0000 << 96 | number << 64 | 0x8000_F000_0000)),
        str(ipaddress.IPv6Address(0x2001_0000 << 96 | 0x41_36_E3_78 << 64 | (~number & 0xFFFF_FFFF))),
    ]


@pytest.mark.parametrize("text", IANA)
def test_every_network_of_the_registries_is_refused_from_its_first_address_to_its_last(text: str) -> None:
    network = ipaddress.ip_network(text)

    for address in (network[0], network[-1], network[network.num_addresses // 2]):
        assert POLICY.refusal(str(address)) is not None, address


@given(st.sampled_from([network for network in REFUSED if network.version == 4]), st.randoms(use_true_random=False))
def test_no_form_of_a_refused_ipv4_address_passes(network: ipaddress.IPv4Network, random: object) -> None:
    offset = random.randrange(network.num_addresses)  # type: ignore[attr-defined]
    address = network[offset]

    assert POLICY.refusal(str(address)) is not None
    for form in _embedded(int(address)):
        assert POLICY.refusal(form) is not None, form


@given(st.integers(0, 2**128 - 1))
def test_no_ipv6_address_outside_of_global_unicast_passes_but_one_that_carries_a_public_ipv4_address(
    number: int,
) -> None:
    address = ipaddress.IPv6Address(number)
    carries = any(address in ipaddress.IPv6Network(text) for text in CARRIERS)

    if address not in GLOBAL_UNICAST and not carries:
        assert POLICY.refusal(str(address)) is not None


def test_a_public_address_passes_as_it_is_and_mapped_or_translated_but_not_through_what_was_withdrawn() -> None:
    number = int(ipaddress.IPv4Address("93.184.215.14"))
    *carried, six_to_four, teredo_server, teredo_client = _embedded(number)

    assert POLICY.refusal("93.184.215.14") is None
    assert [POLICY.refusal(form) for form in carried] == [None] * len(CARRIERS)
    assert all(POLICY.refusal(form) for form in (six_to_four, teredo_server, teredo_client))


@pytest.mark.parametrize("network", REFUSED, ids=str)
def test_a_network_is_refused_no_further_than_it_goes(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> None:
    whole = 2 ** (32 if network.version == 4 else 128)
    make = ipaddress.IPv4Address if network.version == 4 else ipaddress.IPv6Address
    for number in (int(network[0]) - 1, int(network[-1]) + 1):
        if not 0 <= number < whole:
            continue
        address = make(number)
        others = [other for other in REFUSED if other != network and address in other]
        if not others and (network.version == 4 or address in GLOBAL_UNICAST):
            assert POLICY.refusal(str(address)) is None, address


def test_nothing_depends_on_what_this_python_calls_global(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(self: object) -> bool:
        raise AssertionError("the answer of this Python's version was used")

    for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        for name in ("is_global", "is_private", "is_reserved", "is_multicast", "is_loopback", "is_link_local"):
            monkeypatch.setattr(kind, name, property(asked))

    assert POLICY.refusal("192.0.0.192") is not None
    assert POLICY.refusal("93.184.215.14") is None
    assert POLICY.refusal("2606:2800:21f:cb07::1") is None


def test_allowing_a_network_that_carries_others_allows_none_of_these() -> None:
    through_nat64 = AddressPolicy(("64:ff9b::/96", "64:ff9b:1::/48", "::ffff:0:0/96", "2002::/16"))

    for form in _embedded(int(ipaddress.IPv4Address("10.0.0.7")))[:-2]:
        assert through_nat64.refusal(form) is not None, form
    assert AddressPolicy(("10.0.0.0/8",)).refusal("64:ff9b::10.0.0.7") is None


SOCKETS = AuditEvents(lambda event, _: event if event.startswith("socket.") else None)


async def test_what_is_refused_is_refused_before_a_socket_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(self: MediaFetcher, address: str, *_: object) -> bytes:
        raise AssertionError(f"{address} was about to be connected to")

    # So that no packet leaves this machine even when the policy is wrong.
    monkeypatch.setattr(MediaFetcher, "_get_from", connect)
    literals = [str(network[-1]) for network in REFUSED] + [str(address) for address in METADATA_ADDRESSES]
    hosts = [f"[{text}]" if ":" in text else text for text in literals]

    names = Names(inside_test=["fec0::7"], half_test=["93.184.215.14,192.0.0.192"])
    async with loading(names, media_allowed_networks=()) as media:
        await media.refused("http://127.0.0.1/")  # the fetcher is made with the first URL
        with SOCKETS.listening() as heard:
            for host in (*hosts, "inside.test", "half.test"):
                error = await media.refused(f"http://{host}/x.png")
                assert error.code == "media_address_not_allowed", host

        assert heard == []
