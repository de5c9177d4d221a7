"""The worker of an engine that spans nodes, as the engine's launcher starts it at rank 0.

It is told to end by its ranks' keepers and not by signals: Slurm and mpirun signal everything there is, on each node in
its own time, and a second signal would end the worker without waiting for what it has.

When it fails it takes its rank's part of the engine with it. The launcher would leave that behind, holding its GPU.
"""

from __future__ import annotations

import os
import signal
import sys

from poolgrid.workers.ranks.task import task_of


def run() -> None:
    """Run the command that the keeper of this rank was started with."""
    task = task_of(os.environ)
    if task is None:
        sys.stderr.write("poolgrid.cli.rank_task is started by the keeper of an engine's rank, not by hand\n")
        raise SystemExit(2)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from poolgrid.cli.main import run as run_command

    sys.argv = [sys.argv[0], *task.arguments]
    try:
        run_command()
    except SystemExit as end:
        if end.code:
            sys.stdout.flush()
            sys.stderr.flush()
            # The keeper has made the group, and is not in it.
            os.killpg(0, signal.SIGKILL)
        raise


if __name__ == "__main__":
    run()
