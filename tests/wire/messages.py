"""Every message of the wire, as the tests of its page and of its frames go through them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import msgspec

from poolgrid.kernel.wire import events, feed

NAMES = "card events feed ingest multimodal requests selection sessions tasks trace_context"
MODULES = [import_module(f"poolgrid.kernel.wire.{name}") for name in NAMES.split()]

NO_MESSAGES = (events.Event, feed.FeedFrame)


def messages() -> Iterator[type[msgspec.Struct]]:
    """Yield the types that the modules of messages define or name, some of them several times."""
    for module in MODULES:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, msgspec.Struct) and value not in NO_MESSAGES:
                yield value
