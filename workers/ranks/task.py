"""What the keeper of rank 0 hands to the worker that the engine's launcher starts, in one variable.

The launcher passes on no variables of MPI or Slurm, and divides its words at spaces.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

TASK_VARIABLE = "POOLGRID_RANK_TASK"


class RankTask(msgspec.Struct, frozen=True):
    """The worker's command."""

    group: str
    """Of this start of the engine and no other."""
    arguments: list[str]
    """Of the command line, after the name of the program."""


def written(task: RankTask) -> str:
    """Return the variable's value."""
    return msgspec.json.encode(task).decode()


def task_of(environment: Mapping[str, str]) -> RankTask | None:
    """Return the task that the environment has; ``None`` = none. Raises ``ValueError`` for one that is broken."""
    text = environment.get(TASK_VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=RankTask)
    except msgspec.MsgspecError as error:
        raise ValueError(f"reading {TASK_VARIABLE}: {error}; it is set by poolgrid itself, leave it out") from None
