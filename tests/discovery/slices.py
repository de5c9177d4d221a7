"""EndpointSlices as a cluster has them; ``tests.kubernetes`` holds them against Kubernetes' own schemas."""

from __future__ import annotations

from typing import Any

READY = {"ready": True, "serving": True, "terminating": False}
STARTING = {"ready": False, "serving": False, "terminating": False}
ENDING = {"ready": False, "serving": True, "terminating": True}
ENDING_UNREADY_PUBLISHED = {"ready": True, "serving": True, "terminating": True}
"""Of a Service with publishNotReadyAddresses: pods are ready there whatever becomes of them."""

ROUTER_PORTS = [
    {"name": "http", "port": 8000, "protocol": "TCP", "appProtocol": "http"},
    {"name": "select", "port": 8001, "protocol": "TCP"},
]


def uid(number: int) -> str:
    return f"6f1d7c9e-0000-4000-8000-{number:012d}"


def endpoint(number: int, conditions: dict[str, bool] | None = None, address: str = "") -> dict[str, Any]:
    return {
        "addresses": [address or f"10.1.0.{number}"],
        "conditions": READY if conditions is None else conditions,
        "nodeName": f"node-{number}",
        "zone": "a",
        "targetRef": {"kind": "Pod", "namespace": "llm", "name": f"router-{number}", "uid": uid(number)},
    }


def endpoint_slice(
    name: str = "blue-router-names-x7k2p",
    endpoints: list[dict[str, Any]] | None = None,
    *,
    namespace: str = "blue",
    component: str = "router",
    ports: list[dict[str, Any]] | None = None,
    family: str = "IPv4",
) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "generateName": name[:-5],
            "generation": 3,
            "resourceVersion": "48211",
            "uid": uid(0),
            "creationTimestamp": "2026-11-22T09:00:00Z",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": name.rpartition("-")[0],
                "service.kubernetes.io/headless": "",
                "poolgrid/namespace": namespace,
                "poolgrid/component": component,
            },
        },
        "addressType": family,
        "endpoints": endpoints,
        "ports": ROUTER_PORTS if ports is None else ports,
    }


EXAMPLES = [
    endpoint_slice(endpoints=[endpoint(1), endpoint(2, STARTING), endpoint(3, ENDING)]),
    endpoint_slice("blue-router-names-6abcd", [endpoint(1, address="fd00::1")], family="IPv6"),
    endpoint_slice("blue-consolidator-names-qqqqq", [endpoint(4, ENDING_UNREADY_PUBLISHED)], component="consolidator"),
]
