"""Where the consolidator of a worker is, which may move, and who goes along."""

from __future__ import annotations

from poolgrid.workers.publisher import EventPublisher


class ConsolidatorPlace:
    """The endpoint at which the consolidator takes events in; empty while nobody knows it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.publishers: list[EventPublisher] = []
        """Who pushes there; they come once the engine is there."""

    def answers(self) -> bool | None:
        """Return whether the consolidator there has a publisher of this worker as a member; ``None`` without any."""
        if not self.publishers:
            return None
        return any(publisher.is_registered for publisher in self.publishers)

    def move(self, endpoint: str) -> None:
        """Push there from now on."""
        self.endpoint = endpoint
        for publisher in self.publishers:
            publisher.follow(endpoint)
