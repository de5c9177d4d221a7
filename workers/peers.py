"""What a worker knows of its peers, the connections of routers, and all that it says to them.

Rules:

1. A request belongs to the peer that sent it. A peer is known while it has requests here.
2. A peer that is silent for its lease, cannot be reached or stops reading is given up: each of its requests is ended,
   because no peer would take the tokens, and has no owner until the engine has released it.
3. A peer that was given up and sends again gets the list of its requests that ended without a report, so that it
   continues them elsewhere. At most ``ABANDONED_MAX`` are remembered for that.
4. A router is a peer that sends pings. One that is silent for the lease is not counted any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.requests import RefusalKind, TokenBatch, TokenDelta
from poolgrid.server.process.clock import Clock
from poolgrid.server.workers.adapters.sockets import RequestSocket
from poolgrid.server.workers.endings import refused_delta
from poolgrid.server.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

LEASE_CHECKS = 4
"""Looks at the peers' leases per lease."""

ROUTERS_MAX = 1024
"""Routers that are counted; beyond it they are served, and not known to be several, which they are anyway."""

ABANDONED_MAX = 65_536
"""Requests of silent peers that are remembered until the peer sends again, the oldest forgotten first: what a hundred
routers may have here together. A peer whose connection broke never asks."""


@dataclass(slots=True)
class RouterPeer:
    """A router connection with requests here."""

    heard_ms: float
    requests: dict[str, None] = field(default_factory=dict)
    """Ids in order of arrival."""


class Peers:
    """The peers of one worker, on its event loop."""

    def __init__(
        self,
        worker_id: str,
        socket: RequestSocket,
        lease_ms: float,
        clock: Clock,
        metrics: WorkerMetrics,
        end: Callable[[str], bool],
        broken: Callable[[str, Exception], TokenDelta],
    ) -> None:
        """``end`` ends a request whose peer was given up; it returns whether that peer has not heard of an end yet.

        ``broken`` ends a request with a delta that no message can carry, and returns its last delta.
        """
        self.owners: dict[str, bytes | None] = {}
        """Whom each request that the engine has belongs to; ``None`` when its tokens are not taken any more."""
        self.steps = 0
        """Steps of the engine so far, which go with every batch of tokens."""
        self._worker_id = worker_id
        self._socket = socket
        self._lease_ms = lease_ms
        self._clock = clock
        self._metrics = metrics
        self._end = end
        self._broken = broken
        self._peers: dict[bytes, RouterPeer] = {}
        self._abandoned: dict[str, bytes] = {}
        """Requests that were ended because their peer was silent, and the peer; oldest first."""
        self._silent: dict[bytes, dict[str, None]] = {}
        """The same by peer."""
        self._routers: dict[bytes, float] = {}
        """When each router was last heard of; a lone one knows what is here."""
        self._lease_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._peers)

    def close(self) -> None:
        if self._lease_timer is not None:
            self._lease_timer.cancel()

    # -- what they have here -------------------------------------------------------------------------------------------

    def add(self, peer_id: bytes, request_id: str) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            peer = self._peers[peer_id] = RouterPeer(self._clock.monotonic_ms())
            self._watch_leases()
        peer.requests[request_id] = None
        self.owners[request_id] = peer_id

    def forget(self, request_id: str) -> None:
        owner = self.owners.pop(request_id, None)
        if owner is not None:
            peer = self._peers.get(owner)
            if peer is not None:
                peer.requests.pop(request_id, None)
                if not peer.requests:
                    del self._peers[owner]

    # -- hearing them --------------------------------------------------------------------------------------------------

    def heard(self, peer_id: bytes) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.heard_ms = self._clock.monotonic_ms()
        if self._silent and peer_id in self._silent:
            self._own_up(peer_id)

    def pinged(self, peer_id: bytes) -> None:
        if peer_id in self._routers or len(self._routers) < ROUTERS_MAX:
            self._routers[peer_id] = self._clock.monotonic_ms()

    def several_routers(self) -> bool:
        """Return whether more than one router sends requests here."""
        routers = self._routers
        if len(routers) < 2:
            return False
        silent_since = self._clock.monotonic_ms() - self._lease_ms
        for router in [router for router, heard_ms in routers.items() if heard_ms < silent_since]:
            del routers[router]
        return len(routers) > 1

    # -- speaking to them ----------------------------------------------------------------------------------------------

    def send(self, peer_id: bytes, frame: bytes) -> None:
        if not self._socket.send(peer_id, frame) and peer_id in self._peers:
            self._metrics.lost_peers.inc()
            self._abandon(peer_id, "it cannot be reached or reads nothing")

    def send_tokens(self, peer_id: bytes, deltas: list[TokenDelta]) -> None:
        """Send what one step brought to a peer's requests. A delta that no message can carry ends its own request."""
        try:
            frame = codec.from_worker.encode(TokenBatch(self.steps, deltas))
        except Exception as error:
            if len(deltas) == 1:
                deltas = [self._broken(deltas[0].request_id, error)]
                self.send(peer_id, codec.from_worker.encode(TokenBatch(self.steps, deltas)))
                return
            for delta in deltas:
                self.send_tokens(peer_id, [delta])
            return
        self.send(peer_id, frame)

    def refuse_all(self, reason: str, kind: RefusalKind, but: Collection[str]) -> None:
        """Tell every peer that its requests continue elsewhere, except those that have had their last delta."""
        # A peer that cannot be reached loses its requests meanwhile.
        for request_id, owner in list(self.owners.items()):
            if owner is not None and request_id not in but:
                self.send_tokens(owner, [refused_delta(request_id, reason, kind)])

    # -- the silent ----------------------------------------------------------------------------------------------------

    def _abandon(self, peer_id: bytes, why: str) -> None:
        peer = self._peers.pop(peer_id)
        log.warning("a router with %d requests is gone (%s): cancelling them", len(peer.requests), why)
        for request_id in peer.requests:
            self.owners[request_id] = None
            if self._end(request_id):
                self._remember_abandoned(peer_id, request_id)

    def _remember_abandoned(self, peer_id: bytes, request_id: str) -> None:
        while len(self._abandoned) >= ABANDONED_MAX:
            self._forget_abandoned(next(iter(self._abandoned)))
        self._forget_abandoned(request_id)
        self._abandoned[request_id] = peer_id
        self._silent.setdefault(peer_id, {})[request_id] = None

    def _forget_abandoned(self, request_id: str) -> None:
        peer_id = self._abandoned.pop(request_id, None)
        if peer_id is not None:
            of_peer = self._silent[peer_id]
            del of_peer[request_id]
            if not of_peer:
                del self._silent[peer_id]

    def _own_up(self, peer_id: bytes) -> None:
        """Tell a peer that was silent, and is there again, which of its requests have ended here."""
        request_ids = list(self._silent[peer_id])
        log.warning("a router that was silent is back: %d ended requests are reported to it", len(request_ids))
        for request_id in request_ids:
            self._forget_abandoned(request_id)
            error = f"worker {self._worker_id} let it go: its router was silent"
            self.send_tokens(peer_id, [refused_delta(request_id, error, RefusalKind.BUSY)])

    def _watch_leases(self) -> None:
        if self._lease_timer is None:
            interval_s = self._lease_ms / LEASE_CHECKS / 1e3
            self._lease_timer = asyncio.get_running_loop().call_later(interval_s, self._check_leases)

    def _check_leases(self) -> None:
        self._lease_timer = None
        silent_since = self._clock.monotonic_ms() - self._lease_ms
        for peer_id in [peer_id for peer_id, peer in self._peers.items() if peer.heard_ms < silent_since]:
            self._metrics.lease_expiries.inc()
            self._abandon(peer_id, f"silent for more than {self._lease_ms:.0f} ms")
        if self._peers:
            self._watch_leases()
