"""The pools as the global router sees them: connections to each pool's routers, its last status, its circuit breaker.

Rules
    1. A pool has one router behind its URL, or those that are registered under its name. There is a connection to each
       (``router_link``). One of them is active: its reports describe the pool, and it is asked for workers.
    2. The active one stays so while it is ready. When it is lost, or does not answer, the oldest that is ready follows
       it at once, and what it was asked is asked again: a pool is down when none of its routers is left.
    3. What a router reserved is renewed and released there. What a lost router had reserved went with it.
    4. Names are for finding: a router whose registration is gone stays as long as its connection does.
    5. Pools are kept by name. A changed document adds, drops and moves them; requests in flight are not touched,
       because tokens go between us and the workers directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from poolgrid.kernel.pool_grids.circuit_breaker import BreakerStep, CircuitBreaker
from poolgrid.kernel.pool_grids.grid import PoolStanding
from poolgrid.kernel.pool_grids.grid_document import CircuitBreakerSettings, GridDocument
from poolgrid.kernel.requests.log_fields import about
from poolgrid.kernel.wire.addresses import ROUTER, SCHEME, bracketed, is_name, zmq_endpoint_problem
from poolgrid.kernel.wire.identifiers import Role, Stage
from poolgrid.kernel.wire.selection import (
    ModelStatus,
    PoolStatus,
    Probe,
    Probed,
    Reservation,
    RoleStatus,
    Select,
    Selected,
    SelectRefusal,
    SelectRefused,
)
from poolgrid.server.global_router.router_link import Discover, PoolLost, PoolNetwork, RouterLink

log = logging.getLogger(__name__)

ROUTERS_MAX = 64
"""Connections to routers of one pool; of further ones the latest lives are left out."""


class RouterAddress(NamedTuple):
    """Where one router of a pool is, as it registered."""

    key: str
    """Tells it from others, and sorts before those that came later."""
    url: str
    select: str


Routers = Callable[[str], Sequence[RouterAddress]]
"""Return who is registered under the name of a pool's routers."""


@dataclass(slots=True)
class FreedRoom:
    """Room in a pool that its last status does not know of, because it is older."""

    places: int = 0
    """Dispatches of ours that ended since the pool last reported full, and that we have not asked for again."""
    ever: int = 0
    """Dispatches of ours that ever ended there."""
    sent: int = 0
    """Requests that were forwarded since the pool last reported, less those that ended since."""
    refused: bool = False
    """Whether it has refused a forwarded request for lack of room since it last reported."""


class RoomAsked(NamedTuple):
    """What was known of freed room when a pool was asked for a worker."""

    counted_on: bool
    ever: int


class PoolConnection:
    """One pool: where its routers are, how it is, and what it has reserved for us."""

    def __init__(
        self,
        name: str,
        address: str,
        breaker: CircuitBreakerSettings,
        network: PoolNetwork,
        on_news: Callable[[], None],
        routers: Routers | None = None,
    ) -> None:
        """``address`` is the URL of its router, or the name of its routers, which ``routers`` finds."""
        self.name = name
        self.address = address
        self.url = address
        """The active router's, where there is one."""
        self.breaker = CircuitBreaker(breaker)
        self.breaker_steps: list[BreakerStep] = []
        """The last changes, newest last."""
        self.status: PoolStatus | None = None
        self.last_error = "not looked for yet"
        self.endpoint = ""
        self.reached = asyncio.Event()
        """Set once the first attempt to find the pool has ended, well or not."""
        self._network = network
        self._on_news = on_news
        self._routers = routers if is_name(address) else None
        self._asks = count(1)
        self._links: dict[str, RouterLink] = {}
        self._named: set[str] = set()
        """Those of the links whose routers are registered."""
        self._active: RouterLink | None = None
        self._reserved: dict[str, RouterLink] = {}
        """The reserving router, where there may be several."""
        self._tidying: asyncio.Handle | None = None
        self._freed: dict[tuple[str, bool], FreedRoom] = {}
        """By model, and whether it is for encoding: all else that a pool's workers do takes the same room."""
        self.has_servers = False
        """Whether its router forwards requests to engine servers, as it last reported."""

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._routers is None:
            self._add("", self.address, self._network.discover)
        else:
            self.look_for_routers()

    def look_for_routers(self) -> None:
        """Take in who is registered as a router of this pool now; nothing where it has a URL."""
        if self._routers is None:
            return
        try:
            found = {router.key: router for router in self._routers(self.address)[:ROUTERS_MAX]}
            why = f"no router is registered as {self.address}"
        except ValueError as error:
            found, why = {}, str(error)
        self._named = set(found)
        for key, router in found.items():
            if key not in self._links and len(self._links) < ROUTERS_MAX:
                self._add(key, router.url, _known(router.select))
        self._tidy()
        if not self._links:
            self.last_error = why
            self.reached.set()
            self._on_news()

    def _add(self, key: str, url: str, discover: Discover) -> None:
        link = RouterLink(self.name, url, self._network, discover, self._heard, self.next_ask)
        self._links[key] = link
        link.start()

    def close(self) -> None:
        """End the connections; open questions fail."""
        if self._tidying is not None:
            self._tidying.cancel()
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
        self._heard()

    def _heard(self) -> None:
        """Take in that a router sent something, or was lost."""
        before = self._active
        if before is None or before.status is None or not before.status.ready or before not in self._links.values():
            there = [link for _, link in sorted(self._links.items()) if link.status is not None]
            ready = [link for link in there if link.status is not None and link.status.ready]
            self._use(next(iter(ready or there), None))
        active = self._active
        self._take(None if active is None else active.status)
        if active is not None:
            self.last_error = active.last_error
        elif self._links:
            self.last_error = "; ".join(dict.fromkeys(link.last_error for _, link in sorted(self._links.items())))
        # Before all of them were looked for, one that is there is enough to begin.
        if active is not None or all(link.reached.is_set() for link in self._links.values()):
            self.reached.set()
        if self._routers is not None and self._tidying is None and self._to_forget():
            self._tidying = asyncio.get_running_loop().call_soon(self._tidy)  # this may be a link's own turn
        self._on_news()

    def _take(self, status: PoolStatus | None) -> None:
        if status is self.status:
            return
        self.status = status
        for room in self._freed.values():
            room.sent, room.refused = 0, False
        if status is not None and status.models:
            self.has_servers = any(served.server_kind for served in status.models)

    def _use(self, link: RouterLink | None) -> None:
        if link is self._active:
            return
        if link is not None and self._active is not None:
            log.warning(
                "pool %s is asked through its router at %s instead of the one at %s, which %s",
                self.name,
                link.url,
                self._active.url,
                self._active.last_error or "does not answer",
                extra=about(pool=self.name),
            )
        self._active = link
        self.endpoint = "" if link is None else link.endpoint
        self.url = self.address if link is None else link.url

    def _to_forget(self) -> list[str]:
        return [key for key, link in self._links.items() if key not in self._named and link.status is None]

    def _tidy(self) -> None:
        """Drop routers that are neither registered nor connected."""
        self._tidying = None
        for key in self._to_forget():
            link = self._links.pop(key)
            self._reserved = {name: kept for name, kept in self._reserved.items() if kept is not link}
            link.close()

    def routers(self) -> list[tuple[str, str, str]]:
        """Return where each router of a named pool is, and whether it is active, stands by or is away, and why."""
        if self._routers is None:
            return []
        return [
            (
                link.url,
                "away" if link.status is None else "active" if link is self._active else "standby",
                link.last_error,
            )
            for _, link in sorted(self._links.items())
        ]

    # -- questions -------------------------------------------------------------------------------------------------

    def next_ask(self) -> int:
        return next(self._asks)

    async def select(self, message: Select, timeout_s: float) -> Selected | SelectRefused:
        """Have a worker chosen and reserved, by the next router where one does not answer; raises ``PoolLost``."""
        link = self._asked()
        if len(self._links) <= 1 and self._routers is None:
            return await link.select(message, timeout_s)
        tried: list[RouterLink] = []
        while True:
            tried.append(link)
            lost: PoolLost | None = None
            answer: Selected | SelectRefused | None = None
            try:
                answer = await link.select(message, timeout_s)
            except PoolLost as error:
                lost = error
            if isinstance(answer, Selected):
                self._reserved[message.request_id] = link
            if answer is not None and not (
                isinstance(answer, SelectRefused) and answer.code is SelectRefusal.NOT_READY
            ):
                if link is not self._active and link.status is not None:
                    self._use(link)
                    self._heard()
                return answer
            others = [each for _, each in sorted(self._links.items()) if each.status is not None and each not in tried]
            if not others:
                if answer is not None:
                    return answer
                assert lost is not None, "no answer is a pool that was lost"
                raise lost
            link = others[0]
            message = msgspec.structs.replace(message, ask=self.next_ask())

    async def probe(self, message: Probe, timeout_s: float) -> Probed:
        """Ask what a select would find; raises ``PoolLost``."""
        return await self._asked().probe(message, timeout_s)

    def _asked(self) -> RouterLink:
        if self._active is None:
            raise PoolLost(f"pool {self.name}: {self.last_error}")
        return self._active

    def release(self, reservation: Reservation) -> None:
        """Take a dispatch off the pool's books; a router that is lost forgets it by itself."""
        link = self._reserved.pop(reservation.request_id, self._active)
        if link is not None:
            link.release(reservation)

    def renew(self, reservations: list[Reservation]) -> None:
        if not self._reserved:
            if self._active is not None:
                self._active.renew(reservations)
            return
        for link in list(self._links.values()):
            due = [each for each in reservations if self._reserved.get(each.request_id, self._active) is link]
            if due:
                link.renew(due)

    def ask_status(self) -> None:
        if self._active is not None:
            self._active.ask_status()

    def note_freed(self, model: str, stage: Stage) -> None:
        """Take note that a dispatch of ours ended."""
        room = self._freed.setdefault((model, stage is Stage.ENCODE), FreedRoom())
        room.places += 1
        room.ever += 1
        room.sent = max(0, room.sent - 1)
        room.refused = False

    def note_asked(self, model: str, stage: Stage) -> RoomAsked:
        """Take note that a worker is asked for; one of the freed places, if there is one, is counted on for it."""
        room = self._freed.get((model, stage is Stage.ENCODE))
        if room is None:
            return RoomAsked(False, 0)
        counted_on = room.places > 0
        room.places -= counted_on
        return RoomAsked(counted_on, room.ever)

    def note_full(self, model: str, stage: Stage, asked: RoomAsked) -> None:
        """Take note that the pool had no room when it was asked; what was freed after that is still there."""
        room = self._freed.get((model, stage is Stage.ENCODE))
        if room is not None:
            room.places = min(room.places, room.ever - asked.ever)

    def note_sent(self, model: str, stage: Stage) -> RoomAsked:
        """Take note that a request is forwarded, which no answer to a question of ours has room for."""
        self._freed.setdefault((model, stage is Stage.ENCODE), FreedRoom()).sent += 1
        return self.note_asked(model, stage)

    def note_refused(self, model: str, stage: Stage, asked: RoomAsked) -> None:
        """Take note that the pool had no room for a forwarded request; it is full until it reports, or one ends."""
        room = self._freed[model, stage is Stage.ENCODE]
        room.sent = max(0, room.sent - 1)
        room.refused = True
        self.note_full(model, stage, asked)

    # -- how it is -------------------------------------------------------------------------------------------------

    def state(self, model: str, stage: Stage, now_ms: float) -> PoolStanding:
        if not self.reached.is_set():
            return PoolStanding.CONNECTING
        state = state_for(self.status, model, stage)
        room = self._freed.get((model, stage is Stage.ENCODE))
        if room is not None:
            if state is PoolStanding.SATURATED and room.places > 0:
                state = PoolStanding.AVAILABLE
            elif state is PoolStanding.AVAILABLE and room.sent and room.sent >= room_for(self.status, model, stage):
                state = PoolStanding.SATURATED
            if state is PoolStanding.AVAILABLE and room.refused:
                state = PoolStanding.SATURATED
        if state in (PoolStanding.AVAILABLE, PoolStanding.SATURATED) and not self.breaker.would_admit(now_ms):
            return PoolStanding.BREAKER_OPEN
        return state

    def overall_state(self, now_ms: float) -> PoolStanding:
        """Return the best state of any model, for views."""
        if not self.reached.is_set():
            return PoolStanding.CONNECTING
        if self.status is None or not self.status.ready:
            return PoolStanding.DOWN
        states = {
            self.state(model.model, stage, now_ms)
            for model in self.status.models
            for stage in (Stage.WHOLE, Stage.PREFILL, Stage.DECODE)
        }
        without_worker = PoolStanding.LOADING if self.status.loading_workers else PoolStanding.DOWN
        return next((state for state in PoolStanding if state in states), without_worker)


class Pools:
    """All pools of the document in force."""

    def __init__(
        self,
        urls: Mapping[str, str],
        network: PoolNetwork,
        routers: Routers | None = None,
    ) -> None:
        """``urls`` replace those of the document; ``routers`` finds the routers of pools that have names."""
        self._urls = urls
        self._routers = routers
        self._network = network
        self._pools: dict[str, PoolConnection] = {}
        self._on_news: Callable[[], None] = lambda: None

    def use(self, document: GridDocument) -> None:
        """Have exactly the pools of a document; a pool of the same name and URL keeps its connection."""
        wanted: dict[str, str] = {}
        for stage in document.stages.values():
            for pool in stage.pools:
                wanted[pool.name] = self._urls.get(pool.name, (pool.url or "").rstrip("/"))
                if self._routers is not None and not wanted[pool.name]:
                    wanted[pool.name] = f"{SCHEME}{pool.name}.{ROUTER}.select"
        for name in [each for each, pool in self._pools.items() if wanted.get(each) != pool.address]:
            self._pools.pop(name).close()
        for name, url in wanted.items():
            pool_there = self._pools.get(name)
            if pool_there is None:
                made = PoolConnection(name, url, document.circuit_breaker, self._network, self._news, self._routers)
                self._pools[name] = made
                made.start()
            else:
                pool_there.breaker.use(document.circuit_breaker)
        self._pools = {name: self._pools[name] for name in wanted}

    def look_for_routers(self) -> None:
        for pool in list(self._pools.values()):
            pool.look_for_routers()

    async def first_look(self) -> None:
        """Wait until every pool was found, or not, for the first time."""
        await asyncio.gather(*(pool.reached.wait() for pool in self._pools.values()))

    def listen(self, on_news: Callable[[], None]) -> None:
        """Have ``on_news`` called whenever any pool sent something, or was lost."""
        self._on_news = on_news

    def _news(self) -> None:
        self._on_news()

    def get(self, name: str) -> PoolConnection | None:
        return self._pools.get(name)

    def all(self) -> list[PoolConnection]:
        return list(self._pools.values())

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._news()


def _known(endpoint: str) -> Discover:
    async def discover(url: str) -> str:
        return endpoint

    return discover


def select_endpoint(url: str, answer: object) -> str:
    """Return the endpoint of a ``/v1/pool`` answer: its port, at the host of the URL that we can reach.

    Raises ``ValueError``.
    """
    endpoint = answer.get("select_endpoint") if isinstance(answer, dict) else None
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        raise ValueError(f"asking {url}/v1/pool: the answer names no select_endpoint; is it a pool's router?")
    host = urlsplit(url).hostname or ""
    port = endpoint.rpartition(":")[2]
    reached = f"tcp://{bracketed(host)}:{port}"
    problem = zmq_endpoint_problem(reached)
    if problem is not None:
        raise ValueError(f"asking {url}/v1/pool: the answer's select_endpoint is {endpoint!r}: {reached!r} {problem}")
    return reached


ROLES: dict[Stage, tuple[Role, ...]] = {
    Stage.WHOLE: (Role.AGGREGATED, Role.DECODE),
    Stage.PREFILL: (Role.PREFILL, Role.AGGREGATED),
    Stage.DECODE: (Role.DECODE, Role.AGGREGATED),
    Stage.ENCODE: (Role.ENCODE,),
}


def model_status(status: PoolStatus | None, model: str) -> ModelStatus | None:
    """Return what a pool reports of one model."""
    if status is None:
        return None
    return next((each for each in status.models if each.model == model), None)


def _roles_for(served: ModelStatus, stage: Stage) -> list[RoleStatus]:
    is_whole = stage is Stage.WHOLE
    return [role for role in served.roles if role.role in ROLES[stage] and not (is_whole and role.decodes_only)]


def room_for(status: PoolStatus | None, model: str, stage: Stage) -> int:
    """Return how many requests a pool has room for, as it reports."""
    served = model_status(status, model)
    roles = () if served is None else _roles_for(served, stage)
    return sum(max(0, role.capacity - role.requests) for role in roles if role.ready)


def state_for(status: PoolStatus | None, model: str, stage: Stage) -> PoolStanding:
    """Return whether a pool with a fresh ``status`` takes a request; ``None`` is no fresh status.

    A pool without a fresh status is down. One without a worker for a request but with loading workers is loading, which
    is no better for the request: it is shown to people, and it ends by itself. Workers that do a stage: those of its
    role; an aggregated worker does any but encode, a decode worker also the whole, unless it decodes only. A pool whose
    ready workers are all full is saturated; one that has only draining workers is draining.
    """
    if status is None or not status.ready:
        return PoolStanding.DOWN
    served = model_status(status, model)
    without_worker = PoolStanding.LOADING if status.loading_workers else PoolStanding.DOWN
    if served is None:
        return without_worker
    roles = _roles_for(served, stage)
    usable = [role for role in roles if role.ready]
    if not usable:
        return PoolStanding.DRAINING if any(role.draining for role in roles) else without_worker
    if all(role.requests >= role.capacity for role in usable):
        return PoolStanding.SATURATED
    return PoolStanding.AVAILABLE
