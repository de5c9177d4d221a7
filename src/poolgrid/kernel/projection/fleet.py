"""The workers of a pool: a fold over membership events.

Rules
    1. A worker exists from ``WorkerJoined`` to ``WorkerLeft``. A second ``WorkerJoined`` is a new epoch
       and replaces the first.
    2. A draining worker keeps what it has and is chosen for nothing new.
    3. ``version`` grows with every change, so that what is derived from the fleet can be cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from poolgrid.kernel.wire.card import NO_CHAT_SPEC, ChatSpec, Inability, MediaSpec, WorkerCard, common
from poolgrid.kernel.wire.events import LoadReported
from poolgrid.kernel.wire.feed import SourceStream
from poolgrid.kernel.wire.identifiers import Role, Stage, StreamState, WorkerKey
from poolgrid.kernel.wire.tasks import TASK_ROLES


@dataclass(slots=True)
class Worker:
    """One routing target and its latest facts in the stream."""

    key: WorkerKey
    epoch: int
    card: WorkerCard
    draining: bool = False
    load: LoadReported | None = None
    last_event_ms: int = 0
    """Wall clock of the worker when it made its last batch."""
    last_recorded_ms: int = 0
    """Wall clock of the consolidator when it accepted that batch."""
    requests_total: int = 0
    stored_blocks: int = 0
    """Blocks that its events have stored, of full attention."""
    streams: dict[str, SourceStream] = field(default_factory=dict)
    """Of each source, how far its stream can be trusted."""

    @property
    def events_fault(self) -> str:
        """Return in what the events of its engine do not fit it, so that they are of no use; empty = they fit."""
        live = (each.reason for each in self.streams.values() if each.state is StreamState.LIVE)
        return self.card.cache_events_fault or next(filter(None, live), "")


@dataclass(slots=True)
class Fleet:
    """All workers of the pool."""

    workers: dict[WorkerKey, Worker] = field(default_factory=dict)
    version: int = 0
    _by_model: dict[str, list[Worker]] = field(default_factory=dict)
    _by_model_version: int = -1

    def join(self, key: WorkerKey, epoch: int, card: WorkerCard) -> Worker:
        """Add a worker, or replace its previous life."""
        worker = Worker(key, epoch, card)
        self.workers[key] = worker
        self.version += 1
        return worker

    def drain(self, key: WorkerKey) -> None:
        worker = self.workers.get(key)
        if worker is not None and not worker.draining:
            worker.draining = True
            self.version += 1

    def leave(self, key: WorkerKey) -> None:
        if self.workers.pop(key, None) is not None:
            self.version += 1

    def models(self) -> Mapping[str, Sequence[Worker]]:
        """Return the workers by served model name, in order of their keys; sorted once per change of the fleet."""
        if self._by_model_version != self.version:
            by_model: dict[str, list[Worker]] = {}
            for key in sorted(self.workers):
                worker = self.workers[key]
                by_model.setdefault(worker.card.model, []).append(worker)
            self._by_model = by_model
            self._by_model_version = self.version
        return self._by_model

    def serving(self, model: str, roles: tuple[Role, ...] = (Role.AGGREGATED,)) -> list[Worker]:
        """Return the workers of one model and of any of ``roles``, in order of their keys, draining ones included.

        A worker that decodes only serves decode legs alone: where another role may serve too, a prompt is computed.
        """
        computes = roles != (Role.DECODE,)
        return [
            worker
            for worker in self.models().get(model, ())
            if worker.card.role in roles and not (computes and worker.card.decodes_only)
        ]


def media_of(workers: Iterable[Worker]) -> MediaSpec:
    """Return which media a model takes: those of its first worker that computes prompts and takes any.

    The bound of one medium is that of the first worker that names one: no two of a pool name different ones.
    """
    found = MediaSpec()
    largest = 0
    for worker in workers:
        media = worker.card.media
        largest = largest or media.item_bytes_max
        if not found.kinds and media.kinds and worker.card.role is not Role.ENCODE:
            found = media
    return found if found.item_bytes_max == largest else msgspec.structs.replace(found, item_bytes_max=largest)


def inabilities_of(workers: Iterable[Worker]) -> tuple[Inability, ...]:
    """Return what no worker of a model can do that makes tokens."""
    cards = [worker.card.inabilities for worker in workers if worker.card.role is not Role.ENCODE]
    return common(cards) if cards else ()


def tasks_of(workers: Iterable[Worker]) -> tuple[Stage, ...]:
    """Return the kinds of tasks that a model's workers serve."""
    roles = {worker.card.role for worker in workers}
    return tuple(stage for stage, role in TASK_ROLES.items() if role in roles)


def chat_of(workers: Iterable[Worker]) -> ChatSpec:
    """Return how chats with a model are written and read, as far as any of its workers was configured."""
    found = NO_CHAT_SPEC
    for worker in workers:
        found = found.filled(worker.card.chat)
    return found
