"""The environment of a process of ours, and that which it was given: engines that it starts get the latter."""

from __future__ import annotations

import os
from typing import Final

FOR_IMPORTS: Final = {
    # For its plug-ins, pydantic reads the metadata of every installed distribution: 6 % of the CPU of a start.
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
    # No command multiplies matrices; numpy's OpenBLAS starts a thread for each core, and they spin for 50 to 100 ms.
    "OPENBLAS_NUM_THREADS": "1",
}
"""What libraries look at when they are imported."""

_ours: Final[set[str]] = set()


def prepare_imports() -> None:
    """Set what is not set already."""
    _ours.update(FOR_IMPORTS.keys() - os.environ.keys())
    os.environ.update({name: FOR_IMPORTS[name] for name in _ours})


def given_environment() -> dict[str, str]:
    """Return the environment without what ``prepare_imports`` has set."""
    return {name: value for name, value in os.environ.items() if name not in _ours}
