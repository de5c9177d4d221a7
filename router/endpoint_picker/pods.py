"""Who serves where: the workers of a fleet by the addresses at which a gateway reaches their engines' own servers."""

from __future__ import annotations

from collections.abc import Mapping

from poolgrid.router.core.fleet import Fleet
from poolgrid.wire.identifiers import WorkerKey

NO_ENDPOINT = "its engine has no server that gateways reach (serving_endpoint)"
NOT_A_CANDIDATE = "not among the endpoints that the gateway allows"


class Pods:
    """Follows a fleet; looked up with every request, made anew with every change of the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._version = -1
        self._endpoint_of: dict[WorkerKey, str] = {}
        self._at: dict[str, list[WorkerKey]] = {}
        self._without: dict[WorkerKey, str] = {}

    def endpoint_of(self, worker: WorkerKey) -> str:
        """Return where a worker that is not in ``excluded`` serves."""
        return self._current()._endpoint_of[worker]

    def at(self, endpoint: str) -> list[WorkerKey]:
        """Return the workers that serve at an address: several where ranks share a server."""
        return self._current()._at.get(endpoint, [])

    def rank_to_name(self, worker: WorkerKey) -> int | None:
        """Return the rank that a request must name, where the server of several ranks does not see it by its port."""
        return worker.dp_rank if len(self.at(self.endpoint_of(worker))) > 1 else None

    def excluded(self, candidates: frozenset[str] | None) -> Mapping[WorkerKey, str]:
        """Return the workers that a gateway cannot send to, and why; ``candidates`` are all that it allows."""
        self._current()
        if candidates is None:
            return self._without
        others = {key: NOT_A_CANDIDATE for key, place in self._endpoint_of.items() if place not in candidates}
        return {**self._without, **others}

    def _current(self) -> Pods:
        if self._version != self._fleet.version:
            self._endpoint_of, self._at, self._without = {}, {}, {}
            for key, worker in self._fleet.workers.items():
                endpoints = worker.card.serving_endpoints
                if not endpoints:
                    self._without[key] = NO_ENDPOINT
                    continue
                endpoint = endpoints[0] if len(endpoints) == 1 else endpoints[key.dp_rank]
                self._endpoint_of[key] = endpoint
                self._at.setdefault(endpoint, []).append(key)
            self._version = self._fleet.version
        return self
