"""The place of a process among those that share an HTTP port (``--http-workers``).

The parent makes a private directory and passes each child its place (``GROUP_VARIABLE``). A child that is started again
gets the same place. The children share the port, and the responses that are kept on disk; all else each has for itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GROUP_VARIABLE = "POOLGRID_PROCESS_GROUP"
"""Set by the parent: ``DIRECTORY:INDEX:SIZE``."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Which process of a group this is."""

    directory: Path
    index: int
    size: int

    @classmethod
    def from_environment(cls) -> GroupPlace | None:
        """Return the place that the parent gave this process; ``None`` when it is alone."""
        value = os.environ.get(GROUP_VARIABLE)
        if not value:
            return None
        directory, index, size = value.rsplit(":", 2)
        return cls(Path(directory), int(index), int(size))

    def to_environment(self) -> str:
        return f"{self.directory}:{self.index}:{self.size}"
