"""What a router counts of the shares of tenants' limits."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from poolgrid.process.instruments import Counter, Gauge


class ShareMetrics:
    """Failures and changes, among how many routers limits are divided, and how old what is known is."""

    def __init__(self, registry: CollectorRegistry, routers: Callable[[], float], age_s: Callable[[], float]) -> None:
        self.failures = Counter(
            "poolgrid_frontend_limit_division_failures",
            "Looks at the shares of tenants' limits, or writes of them, that failed because NATS gave no answer.",
            registry=registry,
        )
        self.writes = Counter(
            "poolgrid_frontend_limit_division_writes",
            "Changes of the shares of tenants' limits that this router wrote.",
            registry=registry,
        )
        Gauge(
            "poolgrid_frontend_limit_division_routers",
            "Routers among whom tenants' limits are divided, this one included, as it sees it.",
            registry=registry,
        ).set_function(routers)
        Gauge(
            "poolgrid_frontend_limit_division_age_seconds",
            "Time since this router last saw the shares of all. Above the lease, others may have taken its shares, "
            "which it still grants.",
            registry=registry,
        ).set_function(age_s)
