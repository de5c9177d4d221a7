"""One rank's part of an engine: the launcher's process and all below it, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

GUARD = """
trap '' TERM INT
exec 3<&0 </dev/null
(read -r _ <&3; kill -KILL 0) &
exec 3<&-
exec "$@"
"""
"""Slurm and mpirun signal every process that they know of. The engine's would end amid the requests that the worker
still finishes, so they ignore it, and their keeper alone is told. The subshell ends all of them when the keeper is
gone, in whatever way: they hold GPUs, and hang in a collective call."""


class EnginePart:
    """A running launcher in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> EnginePart:
        """Start the launcher; raises ``OSError`` when there is no shell."""
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", GUARD, "poolgrid-rank", *command),
            stdin=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        return cls(process)

    async def ended(self) -> str:
        """Wait for the end of the launcher; return how it ended."""
        status = await self._process.wait()
        if status < 0:
            return f"its process was killed by {signal.Signals(-status).name}"
        return f"its process ended with status {status}"

    async def kill(self) -> None:
        """End what there still is of it, and wait for the launcher."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
