"""The health of a source's event stream, and what each event of the journal means for it.

    state          the source ...
    -------------  ------------------------------------------------------------------------------------------
    SYNCING        has joined; nothing of it was taken in yet
    LIVE           is followed without a hole
    REPLAYING      has a hole that it was asked to fill
    SNAPSHOTTING   restates its whole cache
    STALE          has a hole that is not filled, or is not connected: what is known of its cache is not trusted
    ABSENT         is a further source and has been silent for the lease: nothing that it reported is held
    FORMER         is a further source and belongs to an epoch of the worker that has ended: nothing of it is taken in

A worker's own stream (``WORKER_SOURCE``) decides how far the worker can be trusted. What a further source reports is
true or taken away, so one that fails makes the worker's view smaller and not wrong.

The consolidator decides (``poolgrid.consolidator.core``) and writes ``StreamStateChanged``; what other events
imply is not written twice. Every reader uses ``fold``, so all of them see the same state at the same offset.
"""

from __future__ import annotations

from collections.abc import Iterable

from poolgrid.wire.events import AnyEvent, SnapshotBegan, SnapshotEnded, StreamStateChanged
from poolgrid.wire.feed import SourceStream
from poolgrid.wire.identifiers import StreamState

WORKER_SOURCE = "worker"
"""Source of what a worker reports itself: what it pushes, or what an engine publishes that is listed with its card."""

CONSOLIDATOR_SOURCE = "consolidator"
"""Source of the records that the consolidator writes on its own account."""


OWN_STATES = (
    StreamState.SYNCING,
    StreamState.LIVE,
    StreamState.REPLAYING,
    StreamState.SNAPSHOTTING,
    StreamState.STALE,
)
"""States of a worker's own stream; one that is absent is no member of the pool."""


def fold(streams: dict[str, SourceStream], source: str, events: Iterable[AnyEvent]) -> bool:
    """Fold the events of one record into the streams of its worker, by source; return whether any changed.

    Any batch of a source ends its ``SYNCING``, an empty one too. What the consolidator writes on its own account says
    something of a stream only by ``StreamStateChanged``.
    """
    known = streams.get(source)
    before: StreamState = StreamState.SYNCING if known is None else known.state
    state: StreamState = StreamState.LIVE if before is StreamState.SYNCING else before
    changed = False
    for event in events:
        if type(event) is SnapshotBegan:
            state = StreamState.SNAPSHOTTING
        elif type(event) is SnapshotEnded:
            state = StreamState.LIVE
        elif type(event) is StreamStateChanged:
            streams[event.source] = SourceStream(event.source, event.state, event.reason)
            changed = True
            if event.source == source:
                before = state = event.state
    if source != CONSOLIDATOR_SOURCE and state is not before:
        streams[source] = SourceStream(source, state)
        changed = True
    return changed


def own_stream(streams: Iterable[SourceStream]) -> SourceStream:
    """Return the stream that decides how far a worker can be trusted: its own."""
    return next((one for one in streams if one.source == WORKER_SOURCE), _UNHEARD)


_UNHEARD = SourceStream(WORKER_SOURCE, StreamState.SYNCING)
