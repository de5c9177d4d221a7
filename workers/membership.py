"""Whether a worker is in its pool: it joins with all its ranks, leaves for a while, comes back in another life.

A life has an epoch, the same for all ranks; each coming back has the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from poolgrid.workers.publisher import EventPublisher

GOODBYE_TIMEOUT_S = 2.0
"""How long the end waits for the consolidator's last acknowledgements; without them the lease ends the membership."""


class Membership:
    """The event streams of a worker's ranks, in their order; ``join`` gives them."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.is_away = False
        """It has left, and may come back."""
        self.publishers: Sequence[EventPublisher] = ()

    @property
    def is_registered(self) -> bool:
        return bool(self.publishers) and all(publisher.is_registered for publisher in self.publishers)

    def join(self, publishers: Sequence[EventPublisher]) -> None:
        """Greet the consolidator, for every rank."""
        self.publishers = publishers
        for publisher in publishers:
            publisher.start()

    def leave(self, reason: str) -> None:
        """Leave for the time being."""
        self.is_away = True
        for publisher in self.publishers:
            publisher.leave(reason)

    def rejoin(self) -> None:
        """Join in another life, with all that holds now."""
        self.is_away = False
        self.epoch += 1
        for publisher in self.publishers:
            publisher.rejoin(self.epoch)

    async def say_goodbye(self, reason: str) -> bool:
        """End every rank's stream; say whether all were acknowledged in time."""
        return all(await asyncio.gather(*(each.say_goodbye(reason, GOODBYE_TIMEOUT_S) for each in self.publishers)))
