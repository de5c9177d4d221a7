"""The health of a source's event stream, and what each event of the journal says about it.

    state          the source ...
    -------------  ------------------------------------------------------------------------------------------
    SYNCING        has joined; nothing of it was taken in yet
    LIVE           is followed without a hole
    REPLAYING      has a hole that it was asked to fill
    SNAPSHOTTING   restates its whole cache
    STALE          has a hole that nobody fills, or cannot be heard: what is known of its cache is not trusted
    GONE           has left the pool

The consolidator decides (``router.consolidator.core``) and writes ``StreamStateChanged``; what other events imply is
not written twice. Every reader folds with ``after``, so all of them see the same state at the same offset.
"""

from __future__ import annotations

from wire.events import AnyEvent, SnapshotBegan, SnapshotEnded, StreamStateChanged, WorkerLeft
from wire.identifiers import StreamState

CONSOLIDATOR_SOURCE = "consolidator"
"""Source of the records that the consolidator writes on its own account."""


def after(state: StreamState, source: str, event: AnyEvent) -> StreamState:
    """Return the state of a source's stream after an event of one of its own batches."""
    if isinstance(event, StreamStateChanged):
        return event.state if event.source == source else state
    if isinstance(event, SnapshotBegan):
        return StreamState.SNAPSHOTTING
    if isinstance(event, SnapshotEnded):
        return StreamState.LIVE
    if isinstance(event, WorkerLeft):
        return StreamState.GONE
    return after_batch(state)


def after_batch(state: StreamState) -> StreamState:
    """Return the state after any batch was taken in, an empty one included: the first one ends ``SYNCING``."""
    return StreamState.LIVE if state is StreamState.SYNCING else state


def worst(states: list[StreamState]) -> StreamState:
    """Return the state that counts for a worker with several sources."""
    return max(states, key=_SEVERITY.index, default=StreamState.SYNCING)


_SEVERITY = (
    StreamState.LIVE,
    StreamState.SYNCING,
    StreamState.SNAPSHOTTING,
    StreamState.REPLAYING,
    StreamState.STALE,
    StreamState.GONE,
)
