"""Where in its engine a process is that ``srun`` or ``mpirun`` has started, as their variables say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE")
"""In this order: ``mpirun`` within a job of Slurm hands on variables of Slurm's that are about something else."""

RANKS_MAX = 4096
"""As many as tensor parallelism may have."""

_BRACKETS = re.compile(r"\[(\d+)[^\]]*\]")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One process of several that are one engine."""

    rank: int
    size: int
    group: str
    """Of this start of the engine and no other; empty = nothing says it."""
    leader_host: str
    """Where rank 0 is; empty = nothing says it."""
    said_by: str
    """The variable that told the rank."""


def place_of(environment: Mapping[str, str]) -> RankPlace:
    """Return the place that the environment tells.

    Raises ``ValueError`` when it tells none: the process was not started as one of several.
    """
    for rank_name, size_name in zip(RANK_VARIABLES, SIZE_VARIABLES, strict=True):
        if rank_name not in environment:
            continue
        size = _number(environment, size_name, 1, RANKS_MAX)
        rank = _number(environment, rank_name, 0, size - 1)
        return RankPlace(rank, size, _group(environment), _first_host(environment), rank_name)
    raise ValueError(
        "starting an engine that spans nodes: none of "
        f"{', '.join(RANK_VARIABLES)} is set, which say the rank; start one process for each GPU with srun or mpirun; "
        "nothing was started"
    )


def words_for_launcher(place: RankPlace, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must differ for the engine's launcher to see the same place.

    It believes Slurm's first, which ``mpirun`` within a job of Slurm hands on as they were for its own start.
    """
    own = {"SLURM_PROCID": str(place.rank), "SLURM_NTASKS": str(place.size)}
    return {name: value for name, value in own.items() if environment.get(name, value) != value}


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise ValueError(
            f"starting an engine that spans nodes: {name} is {text!r}, allowed are {least} to {most}; "
            "nothing was started"
        )
    return int(text)


def _group(environment: Mapping[str, str]) -> str:
    if "OMPI_COMM_WORLD_RANK" in environment and environment.get("PMIX_NAMESPACE"):
        return environment["PMIX_NAMESPACE"]
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(environment[name] for name in names if environment.get(name))


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the first of the step's nodes, ``rack1n04`` of ``rack[1-2]n[04-07,9],x3``: rank 0 is there."""
    if "SLURM_PROCID" not in environment or "OMPI_COMM_WORLD_RANK" in environment:
        return ""
    return _BRACKETS.sub(r"\1", environment.get("SLURM_STEP_NODELIST", "")).partition(",")[0]
