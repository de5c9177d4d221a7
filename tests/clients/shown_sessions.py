"""What `poolgrid top --sessions` shows of a client's session."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

SETTLED_S = 30
"""Footprint and state come with the workers' events, after the answer. Each look takes half a second of its own."""


def shown_session(url: str, session: str, turns: int) -> dict[str, Any]:
    """Return the row of a session once it is idle; raise where it never shows that many turns and a footprint.

    An engine server alone (``CLIENTS_WITHOUT_POOL``), with which a pool is compared, shows none.
    """
    if "CLIENTS_WITHOUT_POOL" in os.environ:
        return {"gaps_ms": {"tool": 0}}
    command = [os.environ["POOLGRID_PYTHON"], "-m", "poolgrid", "top", "--url", url, "--sessions", "--once", "--json"]
    deadline = time.monotonic() + SETTLED_S
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-300:]
        rows: dict[str, dict[str, Any]] = {row["session"]: row for row in json.loads(done.stdout)["sessions"]["data"]}
        row = rows.get(session)
        if row is not None and row["state"] == "idle" and row["turns"] == turns and row["footprint_blocks"] > 0:
            return row
        assert time.monotonic() < deadline, f"{session} with {turns} turns is not shown: {row or list(rows)}"
