"""Which machine this is, for what means something on one machine only."""

from __future__ import annotations

import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Drawn by Linux at each start of a machine; the same in all its containers."""


def machine_id() -> str:
    """Return what tells this machine from others, until it is started anew."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
