"""Whether a server that refused a request for lack of room is asked again. Pure: times are arguments."""

from __future__ import annotations

import math

PAUSE_MIN_MS = 250
PAUSE_MAX_MS = 1_000
"""Pauses after a refusal without a time to come back: they double up to here."""

PROBE_MS = 250
"""How long one request is alone in finding out whether there is room again; a full server answers at once."""


class ServerRoom:
    """What is known of one server's room. One that has refused is left alone for the time that it asked for."""

    def __init__(self) -> None:
        self._until_ms = 0.0
        """When it is asked again; 0 = it takes requests."""
        self._pause_ms = 0
        self._probing = False

    def wait_ms(self, now_ms: float) -> int:
        """Return for how long the server is not asked; 0 = the request that asks now goes to it."""
        if not self._until_ms:
            return 0
        if now_ms < self._until_ms:
            return math.ceil(self._until_ms - now_ms)
        if self._probing:
            self._probing = False
            self._until_ms, self._pause_ms = 0.0, 0
        else:
            self._probing = True
            self._until_ms = now_ms + PROBE_MS
        return 0

    def refused(self, now_ms: float, retry_after_ms: int | None) -> int:
        """Note that the server refused a request; return for how long it is left alone."""
        if retry_after_ms is None and (self._probing or not self._until_ms):
            self._pause_ms = min(PAUSE_MAX_MS, max(PAUSE_MIN_MS, 2 * self._pause_ms))
        pause_ms = self._pause_ms if retry_after_ms is None else retry_after_ms
        self._probing = False
        self._until_ms = max(self._until_ms, now_ms + max(PAUSE_MIN_MS, pause_ms))
        return math.ceil(self._until_ms - now_ms)
