"""All boards."""

from __future__ import annotations

from lab.dashboards.events import EVENTS
from lab.dashboards.model import Board
from lab.dashboards.overview import OVERVIEW
from lab.dashboards.pools import POOLS_BOARD
from lab.dashboards.routing import ROUTING
from lab.dashboards.tenants import TENANTS_BOARD
from lab.dashboards.workers import WORKERS_BOARD

BOARDS: tuple[Board, ...] = (OVERVIEW, ROUTING, POOLS_BOARD, WORKERS_BOARD, EVENTS, TENANTS_BOARD)
