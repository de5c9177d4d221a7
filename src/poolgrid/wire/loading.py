"""Reports of a worker that still loads: it is no member of its pool yet, and nothing of it is in the journal.

1. A worker that loads sends ``LoadingWorker`` behind the tag frame ``LOADING_FRAME`` to the consolidator, again and
   again (``TELL_EVERY_S``). There is no answer. With ``Hello`` it becomes a member, and stops sending.
2. The consolidator keeps the last message of each for ``LOADING_TTL_S``, and publishes all of them with the feed, under
   ``LOADING_TOPIC``, whenever one arrives. Readers keep the last list as long.
3. What is lost is sent again. Nothing is decided by it: a worker that loads cannot be chosen.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.wire.feed_frames import FEED_TOPIC
from poolgrid.wire.identifiers import U64, Identifier

LOADING_FRAME = b"L"

LOADING_TOPIC = FEED_TOPIC + b".loading"

TELL_EVERY_S = 1.0
"""People look at it; a load takes minutes."""

LOADING_TTL_S = 5.0
"""Five words in a row are lost before a worker that loads counts as gone."""

LOADING_WORKERS_MAX = 4096
"""Loading at a time in one pool; of more the rest is not shown."""


class LoadingWorker(msgspec.Struct, array_like=True, frozen=True):
    """One worker that loads."""

    worker_id: Identifier
    model: Identifier
    """As far as its settings have it."""
    role: Identifier
    phase: Identifier
    """``wait``, ``fetch``, ``verify``, ``load``, ``warm_up``."""
    done_bytes: U64
    total_bytes: U64
    """Of the phase; 0 = not reported."""


class LoadingWorkers(msgspec.Struct, array_like=True, frozen=True):
    """All that load now."""

    workers: Annotated[list[LoadingWorker], Meta(max_length=LOADING_WORKERS_MAX)]
