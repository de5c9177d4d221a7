"""HTTP API of a standalone consolidator."""

from __future__ import annotations

from poolgrid.consolidator.service import ConsolidatorService


class ConsolidatorHealth:
    """Implements ``poolgrid.http.health_app.Observed``: it is well while it takes events."""

    def __init__(self, service: ConsolidatorService) -> None:
        self._service = service

    @property
    def is_ready(self) -> bool:
        return self._service.ready

    @property
    def is_healthy(self) -> bool:
        return self._service.ready

    def describe(self) -> dict[str, object]:
        service = self._service
        return {
            "status": "ready" if service.ready else "journal unavailable" if service.stalled else "starting",
            "reason": service.trouble if service.stalled else "",
            "degraded": service.trouble,
            "consolidator_id": service.consolidator_id,
            "offset": service.offset,
            "workers": len(service.core.pool.workers),
            "degraded_sources": [source.name for source in service.sources() if source.degraded],
            "sources": [source.row() for source in service.sources()],
        }
