"""The API key that commands show to a router: from the environment, so that it is in no process list."""

from __future__ import annotations

import os

API_KEY_VARIABLE = "POOLGRID_API_KEY"


def api_key_headers() -> dict[str, str]:
    """Return the headers of a request to a router; none without ``POOLGRID_API_KEY``."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    return {"authorization": f"Bearer {key}"} if key else {}
