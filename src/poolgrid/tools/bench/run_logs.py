"""A directory with all that a run leaves: its settings, a line for each request, the report and the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO

import msgspec

from poolgrid.tools.bench.runner import RequestLine


class RunLogs:
    """Writes into one directory, which is made; files of an earlier run in it are replaced.

    ``settings.json``       what was asked for, without the API key
    ``NAME-cN-rR.jsonl``    a line for each request of endpoint NAME at concurrency N in round R
    ``report.json``         as ``--json``
    ``report.txt``          the table
    """

    def __init__(self, directory: Path, settings: bytes) -> None:
        """Raises ``OSError`` when the directory cannot be written."""
        self._directory = directory
        self._open: IO[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.write("settings.json", settings)

    def write(self, name: str, content: bytes) -> None:
        """Write a file; raises ``OSError``."""
        (self._directory / name).write_bytes(content)

    def begin(self, name: str, concurrency: int | None, round_number: int) -> None:
        """Begin the lines of a run; raises ``OSError``."""
        self.end()
        level = "" if concurrency is None else f"-c{concurrency}"
        plain = re.sub(r"[^\w.-]+", "_", name)
        self._open = (self._directory / f"{plain}{level}-r{round_number}.jsonl").open("wb")

    def add(self, line: RequestLine) -> None:
        """Note a request; raises ``OSError``."""
        assert self._open is not None, "a run has begun"
        self._open.write(msgspec.json.encode(line) + b"\n")

    def end(self) -> None:
        """End the lines of a run."""
        if self._open is not None:
            self._open.close()
            self._open = None
