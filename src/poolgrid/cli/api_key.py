"""The API key that commands show to a router: from the environment, so that it is in no process list."""

from __future__ import annotations

import os

API_KEY_VARIABLE = "POOLGRID_API_KEY"

KEY_NOTE = f"A router that takes API keys asks for one here too: put an operator's key into {API_KEY_VARIABLE}."
"""What the help of commands says that ask a router."""


def api_key_headers() -> dict[str, str]:
    """Return the headers of a request to a router; none without ``POOLGRID_API_KEY``."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    return {"authorization": f"Bearer {key}"} if key else {}


def key_hint(status: int) -> str:
    """Return what to do about a refusal with ``status``, to be added to it; empty when no key would help."""
    if status == 401:
        had = "the key in it is not one of the router's" if api_key_headers() else "it is not set"
        return f": the router takes API keys; put an operator's key into {API_KEY_VARIABLE} ({had})"
    if status == 403:
        return (
            f": the key in {API_KEY_VARIABLE} is no operator's (poolgrid keys create FILE TENANT --operator makes one)"
        )
    return ""
