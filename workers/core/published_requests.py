"""What the event stream has said of this worker's requests: the fold of its own facts, to be restated when asked."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from poolgrid.wire.events import AnyEvent, PrefillCompleted, RequestFinished, RequestProgressed, RequestStarted
from poolgrid.workers.core.cache_facts import CACHE_EVENTS


class PublishedRequests:
    """Requests that readers of the stream believe to be running; bounded by what the engine accepts."""

    def __init__(self) -> None:
        self._started: dict[str, RequestStarted] = {}
        self._prefilled: set[str] = set()

    def __len__(self) -> int:
        return len(self._started)

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Take in what is about to be published."""
        for event in events:
            if type(event) in CACHE_EVENTS:
                continue
            if isinstance(event, RequestStarted):
                self._started[event.request_id] = event
            elif isinstance(event, PrefillCompleted):
                self._prefilled.add(event.request_id)
            elif isinstance(event, RequestProgressed):
                started = self._started.get(event.request_id)
                if started is not None:
                    self._started[event.request_id] = msgspec.structs.replace(
                        started, active_blocks=event.active_blocks
                    )
            elif isinstance(event, RequestFinished):
                self._started.pop(event.request_id, None)
                self._prefilled.discard(event.request_id)

    def restate(self) -> list[AnyEvent]:
        """Return facts that bring a reader who knows nothing to the same state."""
        facts: list[AnyEvent] = []
        for request_id, started in self._started.items():
            facts.append(started)
            if request_id in self._prefilled:
                facts.append(PrefillCompleted(request_id))
        return facts
