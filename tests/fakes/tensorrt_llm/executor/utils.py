"""The error of one request."""

from __future__ import annotations


class RequestError(RuntimeError):
    """One request failed; the executor goes on."""
