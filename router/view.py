"""What others are shown of a router: operators, metrics, global routers. Asking changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from poolgrid.inference.ports import ServedModel
from poolgrid.process.clock import Clock
from poolgrid.router.books import RequestBooks
from poolgrid.router.choosing import Chooser
from poolgrid.router.core.decision import Decision, DecisionLog
from poolgrid.router.core.fleet import chat_of, media_of
from poolgrid.router.core.projection import Projection
from poolgrid.router.fleet_links import FleetLinks
from poolgrid.router.waiting import WaitingLine
from poolgrid.serving.admission.queue_view import QueueView
from poolgrid.serving.reuse_sketch import ReuseSketch
from poolgrid.serving.tenant_paths import TenantPaths
from poolgrid.wire.identifiers import WorkerKey


class Shown(Protocol):
    """What a view reads of its router."""

    projection: Projection
    ready: bool
    books: RequestBooks
    links: FleetLinks
    chooser: Chooser
    line: WaitingLine

    @property
    def trouble(self) -> str:
        """Return why the router's state may not be current, in words; empty when all is well."""
        ...

    @property
    def behind_records(self) -> int:
        """Return how many records the pool's journal is known to hold beyond those applied."""
        ...

    def counts(self) -> tuple[int, int]:
        """Return how many requests are active and how many wait."""
        ...


class RouterView:
    """Implements ``poolgrid.router.select_plane.PoolView`` and ``poolgrid.router.metrics.Viewed``."""

    def __init__(self, service: Shown, clock: Clock) -> None:
        self._service = service
        self._created_s = clock.wall_ms() // 1000
        self._served: list[ServedModel] = []
        self._served_version = -1

    @property
    def ready(self) -> bool:
        """Tell whether the router's state is that of the pool."""
        return self._service.ready

    @property
    def projection(self) -> Projection:
        """Return the router's state."""
        return self._service.projection

    @property
    def decisions(self) -> DecisionLog:
        return self._service.books.decisions

    @property
    def paths(self) -> TenantPaths:
        return self._service.chooser.paths

    @property
    def sketch(self) -> ReuseSketch:
        return self._service.books.sketch

    @property
    def trouble(self) -> str:
        """Return why the router's state may not be current, in words; empty when all is well."""
        return self._service.trouble

    @property
    def behind_records(self) -> int:
        """Return how many records the pool's journal is known to hold beyond those applied."""
        return self._service.behind_records

    @property
    def unreachable(self) -> Mapping[WorkerKey, str]:
        return self._service.links.unreachable

    def is_reachable(self, key: WorkerKey) -> bool:
        return key in self.projection.fleet.workers and key not in self.unreachable

    def models(self) -> Sequence[ServedModel]:
        """Return the models that some worker serves now; the front end asks with every request."""
        fleet = self._service.projection.fleet
        if self._served_version != fleet.version:
            self._served = [
                ServedModel(
                    name,
                    self._created_s,
                    max(worker.card.limits.max_sequence_length for worker in workers),
                    tuple(sorted({lora for worker in workers for lora in worker.card.loras})),
                    media_of(workers),
                    chat_of(workers),
                    tuple(sorted({alias for worker in workers for alias in worker.card.aliases})),
                )
                for name, workers in fleet.models().items()
            ]
            self._served_version = fleet.version
        return self._served

    def counts(self) -> tuple[int, int]:
        return self._service.counts()

    @property
    def queued_prompt_tokens(self) -> int:
        return self._service.line.prompt_tokens

    @property
    def queue_fill(self) -> float:
        """Return how full the queue is, from 0 to 1."""
        return self._service.line.view().fill

    @property
    def backlog_s(self) -> float:
        return self._service.line.backlog_s()

    def queue(self) -> QueueView:
        return self._service.line.view()

    def retry_after_s(self) -> float:
        """Return when a refused asker should come back."""
        return self._service.line.retry_after_s()

    def reserved(self, decision: Decision, path: Sequence[int]) -> None:
        self._service.books.reserved(decision, path)

    def load_changed(self) -> None:
        """Look whether waiting requests have room now; for whoever changed the ledger beside the router."""
        self._service.line.pump()
