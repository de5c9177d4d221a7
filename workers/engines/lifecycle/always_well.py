"""The health of an engine that runs in its worker's own process and cannot fail without it."""

from __future__ import annotations

from collections.abc import Callable


class AlwaysWell:
    """As much of ``poolgrid.workers.engines.protocol.Engine`` as is about its health."""

    @property
    def unhealthy_reason(self) -> str:
        return ""

    @property
    def is_silent(self) -> bool:
        return False

    def observe_health(self, changed: Callable[[], None]) -> None:
        """Nothing ever changes."""
