"""All boards."""

from __future__ import annotations

from poolgrid.observability.dashboards.events import EVENTS
from poolgrid.observability.dashboards.model import Board
from poolgrid.observability.dashboards.overview import OVERVIEW
from poolgrid.observability.dashboards.pools import POOLS_BOARD
from poolgrid.observability.dashboards.routing import ROUTING
from poolgrid.observability.dashboards.tenants import TENANTS_BOARD
from poolgrid.observability.dashboards.workers import WORKERS_BOARD

BOARDS: tuple[Board, ...] = (OVERVIEW, ROUTING, POOLS_BOARD, WORKERS_BOARD, EVENTS, TENANTS_BOARD)
