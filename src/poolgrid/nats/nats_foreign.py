"""Messages in poolgrid's NATS streams that no poolgrid process wrote: skipped, counted, named in the log."""

from __future__ import annotations

import logging
from collections import OrderedDict
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from poolgrid.process.clock import Clock
from poolgrid.process.complaints import Complaints
from poolgrid.process.instruments import Counter

log = logging.getLogger(__name__)

SEEN_MAX = 4096
"""Messages that are remembered, so that one that is read again is not counted again."""

_counters: WeakKeyDictionary[CollectorRegistry, Counter] = WeakKeyDictionary()
"""A process has several connections to NATS, and one series of this name."""


def foreign_counter(registry: CollectorRegistry) -> Counter:
    """Return the counter of a registry, made with the first call."""
    counter = _counters.get(registry)
    if counter is None:
        counter = _counters[registry] = Counter(
            "poolgrid_nats_foreign_messages_total",
            "Messages in poolgrid's NATS streams that no poolgrid process wrote, by stream. Each is skipped, once for "
            "each process that reads it. The log names its sequence and the command that removes it.",
            ["stream"],
            registry=registry,
        )
    return counter


class ForeignMessages:
    """What one connection found."""

    def __init__(self, clock: Clock) -> None:
        self._complaints = Complaints(log, clock)
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._counter: Counter | None = None

    def count_in(self, registry: CollectorRegistry) -> None:
        self._counter = foreign_counter(registry)

    def skipped(self, stream: str, sequence: int, why: object) -> None:
        """Count a message that is skipped, and log how to remove it."""
        if (stream, sequence) in self._seen:
            return
        self._seen[stream, sequence] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if self._counter is not None:
            self._counter.labels(stream).inc()
        self._complaints.about(
            f"stream {stream}",
            f"message {sequence} is not from poolgrid ({why}); to remove it: nats stream rmm {stream} {sequence}",
        )
