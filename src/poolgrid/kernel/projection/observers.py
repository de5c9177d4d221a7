"""Observers of a projection: state that follows events, choices and releases, such as what a policy learns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import IndexArray
from poolgrid.kernel.projection.fleet import Worker
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import TurnBegan
from poolgrid.kernel.wire.identifiers import WorkerKey

IsOpen = Callable[[WorkerKey, str], bool]
"""Tells whether the ledger still has a request on a worker."""


class Observer:
    """Base of observers, which does nothing.

    An observer is a fold like the projection: only its inputs, with their times, decide.
    """

    name: ClassVar[str]
    """A projection has one observer of a name; its state is under this name in checkpoints."""
    report_ttft: Callable[[str, float, float], None] | None = None
    """Told the dispatch, the expected and the real time to its first token in milliseconds, where that is predicted;
    changes nothing."""

    # -- choices ---------------------------------------------------------------------------------------------------

    def describe(self, workers: Sequence[Worker], rows: IndexArray, now_ms: float) -> object:
        """Return what its policy finds in ``Candidates.engines``, for the ``rows`` of some workers."""

    def describe_few(self, workers: Sequence[Worker], rows: Sequence[int] | None, now_ms: float) -> object:
        """Return the same for a few workers and a policy that compares plain numbers; ``None`` = all rows."""

    def on_chosen(
        self, decision: Decision, card: WorkerCard, dispatch_id: str, path: Sequence[int], now_ms: float
    ) -> None:
        """A decision was booked."""

    # -- requests --------------------------------------------------------------------------------------------------

    def on_turn_began(self, worker: Worker, event: TurnBegan, now_ms: float) -> None:
        """A worker accepted a turn of a session, of any router."""

    def on_started(self, worker: WorkerKey, request_id: str, cached_tokens: int) -> None:
        """A worker began a request, of any router, and reuses so many tokens."""

    def on_first_token(self, worker: WorkerKey, request_id: str, now_ms: float) -> None:
        """A prompt was computed."""

    def on_untimed_token(self, worker: WorkerKey, request_id: str) -> None:
        """A prompt was computed; the report of it waited, so when is not known."""

    def on_finished(self, worker: WorkerKey, request_id: str, blocks: int | None, now_ms: float) -> None:
        """A request ended that had so many blocks; ``None`` where that is not known."""

    def on_released(self, worker: WorkerKey, request_id: str, blocks: int | None) -> None:
        """The router took a request off a worker."""

    def on_expired(self, is_open: IsOpen) -> None:
        """Reservations expired: no further message comes about requests that are not open."""

    # -- workers ---------------------------------------------------------------------------------------------------

    def on_cleared(self, worker: WorkerKey) -> None:
        """A worker's cache was emptied, or its blocks will be reported again."""

    def on_left(self, worker: WorkerKey) -> None:
        """A worker left, or begins a new epoch."""

    def on_snapshot(self, workers: Collection[WorkerKey], is_open: IsOpen) -> None:
        """A snapshot replaced the projection; these are its workers."""

    # -- for a state that is resumed elsewhere ---------------------------------------------------------------------

    def checkpoint(self) -> Any:
        """Return a copy of its state for a checkpoint, as msgpack can have it; ``None`` without any."""

    def restore(self, state: Any) -> None:
        """Resume from what ``checkpoint`` returned, as msgpack decodes it."""
