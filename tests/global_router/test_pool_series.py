"""Series by pool: there before anything has happened, and gone with their pool."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from poolgrid.global_router.metrics import GlobalRouterMetrics


def pools_of(registry: CollectorRegistry, name: str) -> dict[str, float]:
    return {
        sample.labels["pool"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and sample.labels.get("state", "open") == "open"
    }


def test_a_breakers_first_step_is_an_increase_and_pools_that_left_have_no_series() -> None:
    registry = CollectorRegistry()
    metrics = GlobalRouterMetrics(registry)
    metrics.use_pools({"a", "b"})
    metrics.dispatches.labels("a", "decode", "grid").inc()
    assert pools_of(registry, "poolgrid_global_router_breaker_steps_total") == {"a": 0, "b": 0}

    metrics.breaker_steps.labels("b", "open").inc()
    metrics.use_pools({"b", "c"})

    assert pools_of(registry, "poolgrid_global_router_breaker_steps_total") == {"b": 1, "c": 0}
    assert pools_of(registry, "poolgrid_global_router_dispatches_total") == {}
