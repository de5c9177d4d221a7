"""What the fleet page shows of a router: its workers and their caches, its requests, its conversations, its queue."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from poolgrid import __version__
from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire.answers import QueueRow, RequestExplanation
from poolgrid.kernel.wire.identifiers import STAGE_WORD, StreamState, dispatch_id
from poolgrid.plugins.fleet_page.endpoints import open_fleet_page
from poolgrid.plugins.fleet_page.hub import Picture, Row
from poolgrid.plugins.fleet_page.router_watch import FleetWatch, Leg, ServedSeconds, open_served_seconds
from poolgrid.server.frontend.app import Application
from poolgrid.server.frontend.metrics import SERVED_COLUMNS
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.lifecycle import GroupPlace
from poolgrid.server.router.service import RouterService
from poolgrid.server.router.settings import RouterSettings

REQUESTS_SHOWN = 240
"""Of the last decisions, how many are watched for changes: what came of one that is older is seen when it is opened."""

CONVERSATIONS_SHOWN = 24

CONVERSATIONS_EVERY = 4
"""Pictures between two looks at who holds which conversation: that asks the index for each of them."""

WORKERS_PER_TURN = 64
"""Rows made between two turns of the event loop: a quarter of a millisecond."""

COLUMNS: Mapping[str, Sequence[str]] = {
    "workers": (
        "state",
        "role",
        "model",
        "running",
        "waiting",
        "active",
        "capacity",
        "prefill_tokens",
        "active_blocks",
        "held_blocks",
        "total_blocks",
        "requests_total",
        "stored",
        "removed",
        "lag_ms",
        "recorded_ms",
        "stream",
        "trusted",
        "note",
        "sources",
        "http_endpoint",
    ),
    "requests": (
        "time_ms",
        "request_id",
        "worker",
        "stage",
        "isl",
        "found_tokens",
        "reused_tokens",
        "reason",
        "status",
        "conversation",
        "started_ms",
        "prefilled_ms",
        "ended_ms",
    ),
    "conversations": ("turns", "blocks", "isl", "last_ms", "request_id", "holders"),
    "seconds": ("requests", "prompt_tokens", "found_tokens", "moves"),
    "served": SERVED_COLUMNS,
}


class RouterFleetSource:
    """Implements ``poolgrid.plugins.fleet_page.hub.FleetSource``."""

    columns = COLUMNS

    def __init__(
        self,
        settings: RouterSettings,
        service: RouterService,
        watch: FleetWatch,
        served: ServedSeconds,
        place: GroupPlace | None = None,
    ) -> None:
        self._service = service
        self._watch = watch
        self._served = served
        self._looks = 0
        self._conversations: dict[str, Row] = {}
        self._about = {
            "kind": "router",
            "name": settings.router_id,
            "pool": settings.namespace if settings.has_names else "",
            "version": __version__,
            "policy": settings.policy,
            "process": 0 if place is None else place.index,
            "processes": 1 if place is None else place.size,
            "queue_factor": settings.worker_queue_factor,
        }

    def begin(self) -> None:
        self._watch.begin()

    def end(self) -> None:
        self._watch.end()

    async def look(self) -> Picture:
        service, projection = self._service, self._service.projection
        fleet, unreachable = projection.fleet.workers, service.unreachable
        workers: dict[str, Row] = {}
        for number, key in enumerate(sorted(fleet)):
            worker = fleet.get(key)
            if worker is not None:
                workers[str(key)] = self._worker(worker, unreachable.get(key, ""))
            if number % WORKERS_PER_TURN == WORKERS_PER_TURN - 1:
                await asyncio.sleep(0)
        if self._looks % CONVERSATIONS_EVERY == 0:
            await self._look_at_conversations()
        self._looks += 1
        active, waiting = service.counts()
        values = {
            "about": self._about,
            "queue": msgspec.convert(service.queue.view(), QueueRow, from_attributes=True).to_json(),
            "totals": {
                "ready": service.ready,
                "active": active,
                "waiting": waiting,
                "for_room": len(service.queue.turns_without_place()),
                "decisions": service.decisions.added,
                "since_ms": self._served.since_ms,
                "offset": projection.next_offset,
                "behind": service.behind_records,
                "trouble": service.trouble,
                "records": self._watch.records,
            },
        }
        tables = {
            "workers": workers,
            "requests": self._requests(),
            "conversations": self._conversations,
            "seconds": dict(service.decisions.seconds.rows()),
            "served": dict(self._served.rows()),
        }
        return Picture(values, tables)

    def _requests(self) -> dict[str, Row]:
        decisions = self._service.decisions.newest(REQUESTS_SHOWN)
        return dict(self._request(decision) for decision in reversed(decisions))

    def _worker(self, worker: Worker, unreachable: str) -> Row:
        projection = self._service.projection
        key, load, card = worker.key, worker.load, worker.card
        slot = projection.index.slot(key)
        ledger = projection.ledger
        ledger.ensure_slot(slot)
        stream, reason = projection.trust.stream(key)
        untrusted = projection.trust.untrusted.get(key)
        flow = self._watch.flows.get(key)
        state = "draining" if worker.draining else "unreachable" if unreachable else "ready"
        return (
            state,
            card.role.name.lower(),
            card.model,
            load.running_requests if load else 0,
            load.waiting_requests if load else 0,
            int(ledger.requests[slot]),
            card.limits.max_batch_size,
            int(ledger.prefill_tokens[slot]),
            int(ledger.active_blocks[slot]),
            projection.index.held_blocks(key),
            card.limits.total_kv_blocks,
            worker.requests_total,
            flow.stored if flow else 0,
            flow.removed if flow else 0,
            max(0, worker.last_recorded_ms - worker.last_event_ms) if worker.last_event_ms else None,
            worker.last_recorded_ms,
            _STREAM_WORDS[stream],
            untrusted is None,
            unreachable or untrusted or ("" if stream is StreamState.LIVE else reason),
            [(name, _STREAM_WORDS[each.state], each.reason) for name, each in sorted(worker.streams.items())]
            if len(worker.streams) > 1
            else _NO_SOURCES,
            card.http_endpoint,
        )

    def _request(self, decision: Decision) -> tuple[str, Row]:
        request = decision.request
        name = dispatch_id(request.request_id, decision.attempt)
        leg = self._watch.legs.get(name) or _UNWATCHED
        return name, (
            decision.time_ms,
            request.request_id,
            str(decision.worker),
            STAGE_WORD[request.stage],
            request.isl,
            min(request.isl, decision.overlap_blocks * request.block_size),
            decision.realised_cached_tokens,
            decision.reason,
            "ended" if self._ended_unseen(decision, name, leg) else "" if leg is _UNWATCHED else leg.status,
            leg.conversation,
            leg.started_ms,
            leg.prefilled_ms,
            leg.ended_ms,
        )

    def _ended_unseen(self, decision: Decision, name: str, leg: Leg) -> bool:
        """Tell whether a dispatch is off the router's books and its end was not watched."""
        is_open = leg.ended_ms is None and not leg.released
        return is_open and not self._service.projection.ledger.knows(decision.worker, name)

    async def _look_at_conversations(self) -> None:
        index = self._service.projection.index
        found: dict[str, Row] = {}
        for conversation in self._watch.conversations.latest(CONVERSATIONS_SHOWN):
            holders = [(str(worker), blocks, lost) for worker, blocks, lost in conversation.holders(index)]
            row = (
                conversation.turns,
                len(conversation.path),
                conversation.isl,
                conversation.last_ms,
                conversation.request_id,
                holders,
            )
            found.setdefault(conversation.name, row)
            await asyncio.sleep(0)
        self._conversations = found

    # -- one request ---------------------------------------------------------------------------------------------------

    async def request(self, request_id: str) -> dict[str, Any] | None:
        """Return a request's decisions and the times of its legs, which are known where it was watched."""
        decisions = self._service.decisions.of_request(request_id)
        if not decisions:
            return None
        legs: list[Leg] = []
        source = "watched"
        for decision in decisions:
            name = dispatch_id(decision.request.request_id, decision.attempt)
            watched = self._watch.legs.get(name)
            ended_unseen = self._ended_unseen(decision, name, watched or _UNWATCHED)
            leg = watched
            if leg is None:
                leg = Leg(name, str(decision.worker), STAGE_WORD[decision.request.stage], decision.time_ms)
                leg.queued_ms = round(decision.queued_ms, 3)
            if ended_unseen:
                leg = msgspec.structs.replace(leg, released=True)
            legs.append(leg)
            if watched is None or ended_unseen:
                source = "unknown"
        attempts = [decision.explanation() for decision in decisions]
        explanation = RequestExplanation(request_id=request_id, attempts=attempts).to_json()
        return {"explanation": explanation, "legs": msgspec.to_builtins(legs), "legs_from": source}


_STREAM_WORDS = {state: state.name.lower() for state in StreamState}
_UNWATCHED = Leg("", "", "")
_NO_SOURCES: list[tuple[str, str, str]] = []
"""Of a worker without further sources, as nearly all are."""


def open_router_page(
    opened: AsyncExitStack,
    app: Application,
    settings: RouterSettings,
    service: RouterService,
    state: RouterState,
    clock: Clock,
    place: GroupPlace | None,
) -> None:
    """Add the page of a router."""
    watch = FleetWatch(state)
    served = open_served_seconds(opened, app.served, clock)
    source = RouterFleetSource(settings, service, watch, served, place)
    open_fleet_page(opened, app, source, clock)
