"""``POST /v1/workers/{worker_id}/drain``: an operator takes a worker out of use, over the request plane.

The worker takes nothing new from anybody, hands over what does not finish in time, and waits to be ended. Any router of
the pool can tell it so; all of them hear of it in the worker's events.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Path, Query

from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.openapi import error_answers
from poolgrid.router.service import RouterService
from poolgrid.wire.answers import DrainAnswer
from poolgrid.wire.identifiers import WorkerId
from poolgrid.wire.limits import DRAIN_TIMEOUT_MS_MAX, IDENTIFIER_BYTES_MAX

ERRORS = {"404": "The pool has no such worker", "503": "The worker cannot be told now"}


def add_drain_endpoint(app: FastAPI, service: RouterService) -> None:
    """Add ``POST /v1/workers/{worker_id}/drain``."""

    @app.post("/v1/workers/{worker_id}/drain", tags=["router"], status_code=202, responses=error_answers(ERRORS))
    async def drain(
        worker_id: Annotated[str, Path(max_length=IDENTIFIER_BYTES_MAX)],
        timeout_ms: Annotated[
            int | None,
            Query(
                ge=0,
                le=DRAIN_TIMEOUT_MS_MAX,
                description="How long running requests may take to finish; by default the worker's drain_timeout_ms.",
            ),
        ] = None,
    ) -> dict[str, Any]:
        """Tell a worker to drain: to take nothing new, and to hand over what does not finish in time."""
        if not any(key.worker_id == worker_id for key in service.projection.fleet.workers):
            raise RequestError(404, "worker_not_found", f"there is no worker {worker_id!r}; GET /v1/workers has them")
        if not service.links.drain(WorkerId(worker_id), timeout_ms):
            raise RequestError(
                503,
                "worker_unreachable",
                f"worker {worker_id!r} cannot be told to drain: this router has no connection to it; "
                "GET /v1/workers says why, and SIGTERM to its process does the same",
            )
        return DrainAnswer(worker_id=worker_id, timeout_ms=timeout_ms).to_json()
