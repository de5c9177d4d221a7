"""How much of a path a worker holds, by tier."""

from __future__ import annotations

import msgspec


class TierOverlap(msgspec.Struct, frozen=True):
    """Leading blocks of a path that one worker holds, by the fastest tier that has them."""

    device: int
    host: int = 0
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.disk
