"""The settings of an engine that spans nodes."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from poolgrid.process.settings import Settings
from poolgrid.wire.addresses import host_problem
from poolgrid.wire.limits import IDENTIFIER_BYTES_MAX

RANK_PORT_DEFAULT = 5580


class RankSettings(Settings):
    """What the ranks of one engine know of each other."""

    panel: ClassVar[str] = "Ranks"

    nodes: int = Field(
        1,
        ge=1,
        le=1024,
        description="Nodes that the engine spans. With more than one, the command is started once for each GPU, by "
        "srun or mpirun: rank 0 is the worker, the others serve it.",
    )
    leader_host: str = Field(
        "",
        max_length=IDENTIFIER_BYTES_MAX,
        description="With nodes: host of rank 0, as the other ranks reach it; empty = the first node of Slurm's step. "
        "mpirun does not tell, and needs it.",
    )
    rank_port: int = Field(
        RANK_PORT_DEFAULT,
        ge=1,
        le=65_535,
        description="With nodes: port of rank 0 at which ranks say that they are alive. Two such engines with their "
        "rank 0 on one node need different ones.",
    )
    rank_lease_ms: ClassVar[float] = 10_000.0
    """A rank that is silent this long is lost, and the engine with it; so is a leader. A process that dies is noticed
    at once, so this is for hosts and networks: as long as a router's lease."""
    rank_start_timeout_ms: ClassVar[float] = 600_000.0
    """How long all ranks may take to be there, before the engine is loaded. Nodes that boot or pull an image take
    minutes."""

    @model_validator(mode="after")
    def _check_leader_host(self) -> Self:
        problem = host_problem(self.leader_host) if self.leader_host else None
        if problem is not None:
            raise ValueError(
                f"leader_host is {self.leader_host!r}: what ranks would connect to {problem}; "
                "give a name or an IP address, without scheme, port or brackets"
            )
        return self
