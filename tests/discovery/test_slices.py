"""What EndpointSlices say of pods, in words of names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from poolgrid.kernel.wire.addresses import parse_name
from poolgrid.plugins.kubernetes.slices import decode_slices, seen_in
from poolgrid.server.discovery.registry import Registry
from tests.discovery.slices import (
    ENDING,
    ENDING_UNREADY_PUBLISHED,
    READY,
    STARTING,
    endpoint,
    endpoint_slice,
)

SELECT = parse_name("dyn://blue.router.select")


def registry_of(*slices: dict[str, Any], look: int = 1, registry: Registry | None = None) -> Registry:
    page = decode_slices(json.dumps({"metadata": {}, "items": slices}).encode())
    found = registry or Registry()
    found.look(seen_in(page.items or (), look), 1000.0 * look)
    return found


def instances(*slices: dict[str, Any]) -> list[str]:
    registry = registry_of(*slices)
    assert not registry.refused
    return sorted(each.instance for each in registry.instances())


def test_the_pods_of_a_service_are_instances_with_its_ports_as_endpoints() -> None:
    registry = registry_of(endpoint_slice(endpoints=[endpoint(1)]))

    [found] = registry.instances("blue", "router")
    assert found.instance == "router-1"
    assert found.endpoints == {"http": "http://10.1.0.1:8000", "select": "tcp://10.1.0.1:8001"}
    assert found.started_ms == 0, "nobody said"


@pytest.mark.parametrize(
    ("conditions", "there"),
    [
        (READY, True),
        ({}, True),
        (STARTING, False),
        (ENDING, False),
        (ENDING_UNREADY_PUBLISHED, False),
        ({"ready": False, "serving": True}, False),
    ],
)
def test_a_pod_has_a_name_while_it_is_ready_and_does_not_end(conditions: dict[str, bool], there: bool) -> None:
    assert instances(endpoint_slice(endpoints=[endpoint(1, conditions)])) == (["router-1"] if there else [])


def test_a_pod_in_two_slices_amid_a_rollover_is_one_instance_ready_or_ending_as_either_says() -> None:
    def two(one: dict[str, bool], other: dict[str, bool]) -> list[str]:
        return instances(
            endpoint_slice("blue-router-names-aaaaa", [endpoint(1, one)]),
            endpoint_slice("blue-router-names-bbbbb", [endpoint(1, other)]),
        )

    assert two(READY, READY) == ["router-1"]
    assert two(READY, STARTING) == two(STARTING, READY) == ["router-1"]
    assert two(READY, ENDING) == two(ENDING, READY) == []


def test_of_both_address_families_ipv4_comes_first_and_ipv6_alone_will_do() -> None:
    old = endpoint_slice("blue-router-names-zzzzz", [endpoint(1)])
    new = endpoint_slice("blue-router-names-aaaaa", [endpoint(1, address="fd00::1")], family="IPv6")

    assert registry_of(new, old).addresses(SELECT) == ["tcp://10.1.0.1:8001"]
    assert registry_of(new).addresses(SELECT) == ["tcp://[fd00::1]:8001"]
    assert instances(endpoint_slice(endpoints=[endpoint(1, address="a.example")], family="FQDN")) == []


def test_a_pod_behind_two_services_has_the_endpoints_of_both() -> None:
    ports = [{"name": "http", "port": 8443, "protocol": "TCP", "appProtocol": "https"}]
    select = [{"name": "select", "port": 8001, "protocol": "TCP"}, {"name": "select", "port": 8001, "protocol": "UDP"}]

    registry = registry_of(
        endpoint_slice("http-aaaaa", [endpoint(1)], ports=ports),
        endpoint_slice("select-aaaaa", [endpoint(1)], ports=select),
    )

    [found] = registry.instances()
    assert found.endpoints == {"http": "https://10.1.0.1:8443", "select": "tcp://10.1.0.1:8001"}


def test_all_readers_see_the_same_lives_in_the_same_order_whatever_order_slices_come_in() -> None:
    slices = [endpoint_slice(f"blue-router-names-{number:05}", [endpoint(number)]) for number in range(1, 30)]

    one, other = registry_of(*slices), registry_of(*reversed(slices), look=7)

    assert one.instances() == other.instances()
    assert len(one.instances()) == 29


def test_slices_of_others_without_pods_and_with_wrong_labels_keep_nobody_out() -> None:
    nobodys = endpoint_slice("kubernetes", [endpoint(1)])
    nobodys["metadata"]["labels"] = None
    empty = endpoint_slice("empty-aaaaa")
    wrong = endpoint_slice("wrong-aaaaa", [endpoint(3)], namespace="blue.green")
    manual = {"addresses": ["10.9.9.9"], "conditions": {}}

    registry = registry_of(nobodys, empty, wrong, endpoint_slice(endpoints=[manual, endpoint(2)]))

    assert sorted(each.instance for each in registry.instances()) == ["10.9.9.9", "router-2"]
    [why] = registry.refused.values()
    assert "namespace is 'blue.green'" in why


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b'{"metadata": {}, "items": [{}]}', b'{"metadata": {}, "items": 3}']
)
def test_what_is_no_list_of_slices_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no list of EndpointSlices"):
        decode_slices(data)
