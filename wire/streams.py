"""The health of a source's event stream, and what each event of the journal says about it.

    state          the source ...
    -------------  ------------------------------------------------------------------------------------------
    SYNCING        has joined; nothing of it was taken in yet
    LIVE           is followed without a hole
    REPLAYING      has a hole that it was asked to fill
    SNAPSHOTTING   restates its whole cache
    STALE          has a hole that nobody fills, or cannot be heard: what is known of its cache is not trusted

The consolidator decides (``router.consolidator.core``) and writes ``StreamStateChanged``; what other events imply is
not written twice. Every reader uses ``fold``, so all of them see the same state at the same offset.
"""

from __future__ import annotations

from collections.abc import Iterable

from wire.events import AnyEvent, SnapshotBegan, SnapshotEnded, StreamStateChanged
from wire.feed import SourceStream
from wire.identifiers import StreamState

CONSOLIDATOR_SOURCE = "consolidator"
"""Source of the records that the consolidator writes on its own account."""


def fold(streams: dict[str, SourceStream], source: str, events: Iterable[AnyEvent]) -> bool:
    """Fold the events of one record into the streams of its worker, by source; return whether any changed.

    Any batch of a source ends its ``SYNCING``, an empty one too. What the consolidator writes on its own account says
    something of a stream only by ``StreamStateChanged``.
    """
    known = streams.get(source)
    before = StreamState.SYNCING if known is None else known.state
    state = StreamState.LIVE if before is StreamState.SYNCING else before
    changed = False
    for event in events:
        if type(event) is SnapshotBegan:
            state = StreamState.SNAPSHOTTING
        elif type(event) is SnapshotEnded:
            state = StreamState.LIVE
        elif type(event) is StreamStateChanged:
            streams[event.source] = SourceStream(event.source, event.state, event.reason)
            changed = True
    if source != CONSOLIDATOR_SOURCE and state is not before:
        streams[source] = SourceStream(source, state)
        changed = True
    return changed


def worst(states: list[StreamState]) -> StreamState:
    """Return the state that counts for a worker with several sources."""
    return max(states, key=_SEVERITY.index, default=StreamState.SYNCING)


_SEVERITY = (
    StreamState.LIVE,
    StreamState.SYNCING,
    StreamState.SNAPSHOTTING,
    StreamState.REPLAYING,
    StreamState.STALE,
)
