"""``GET /v1/fleet``: who of a deployment has a name, for operators. It is there where a process has names itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI

from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.openapi import error_answers
from poolgrid.wire.answers import FleetList

LIST_PATH = "/v1/fleet"


def add_fleet_list(app: FastAPI, look: Callable[[], Awaitable[FleetList]]) -> None:
    """Add the endpoint; ``look`` raises ``OSError`` when registrations cannot be read."""

    @app.get(LIST_PATH, tags=["names"], responses=error_answers({"503": "Registrations cannot be read now"}))
    async def fleet() -> dict[str, Any]:
        """List every process that has a name, in all namespaces, and the registrations that are refused and why."""
        try:
            return (await look()).to_json()
        except OSError as error:
            raise RequestError(503, "names_unavailable", f"looking who has a name: {error}") from None
