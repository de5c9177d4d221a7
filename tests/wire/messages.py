"""Every message of the wire, as the tests of its page and of its frames go through them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from poolgrid.wire import (
    card,
    events,
    feed,
    ingest,
    leadership,
    multimodal,
    requests,
    selection,
    sessions,
    tasks,
    trace_context,
)
from poolgrid.wire import ingest as loading
from poolgrid.wire import multimodal as tensors

MODULES = (
    card,
    events,
    feed,
    ingest,
    leadership,
    loading,
    multimodal,
    requests,
    selection,
    sessions,
    tasks,
    tensors,
    trace_context,
)


def messages() -> Iterator[type[msgspec.Struct]]:
    """Yield the types that the modules of messages define or name, some of them several times."""
    for module in MODULES:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not events.Event:
                yield value
