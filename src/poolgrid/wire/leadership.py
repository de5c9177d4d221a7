"""Which consolidator writes a pool's journal, where several may: the entry by which one claims it.

The entry lies in the key-value bucket of the pool and goes when its writer does not renew it in time. Workers push to
the ``ingest`` of the active consolidator, and routers follow its ``feed`` and ask its ``query``.
"""

from __future__ import annotations

import msgspec

from poolgrid.wire.identifiers import Identifier


class Leader(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The consolidator that is active."""

    consolidator_id: Identifier
    ingest: str = ""
    """Where workers push; empty while it reads the journal."""
    feed: str = ""
    """Where routers subscribe."""
    query: str = ""
    """Where routers ask for snapshots and records."""
