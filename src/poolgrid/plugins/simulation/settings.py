"""What can be set on a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from poolgrid.server.process.plugins import policy_names
from poolgrid.server.process.settings import Settings
from poolgrid.server.workers.timing import PUBLISHED, TIMINGS, Timing

SIMULATED_POLICIES = tuple(name for name in policy_names() if name != "approximate")


class EngineSettings(Settings):
    """The simulated engines that recorded traffic is played on."""

    panel: ClassVar[str] = "Workload and engines"

    workers: int | None = Field(
        None, ge=1, le=4096, description="Simulate this many workers. Unset = as recorded, or 8 for a trace."
    )
    speed: float = Field(1.0, gt=0, le=10_000, description="Replay arrivals this many times faster than recorded.")
    speedup: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Run engines this many times faster than their step times. Unset = as recorded.",
    )
    timing: Timing = Field(
        PUBLISHED,
        examples=list(TIMINGS),
        description=(
            "Choose the step times: published (formulas), h100-qwen3-8b or h200-qwen3-8b (measured), or your own "
            "JSON file."
        ),
    )
    total_kv_blocks: int | None = Field(
        None,
        ge=1,
        description="Give each worker this many KV blocks. Unset = as recorded, or enough for the whole trace.",
    )
    requests: int | None = Field(None, ge=1, description="Use only the first requests, this many.")


class SimulationSettings(EngineSettings):
    """A trace, a pool, and the policies to compare on them."""

    panel: ClassVar[str] = "Workload and engines"

    agents: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Simulate this many open agent sessions instead of a trace.",
    )
    mixed: bool = Field(
        False, description="With --agents: add people in chats, retrieval, batches and single requests."
    )
    policy: str | None = Field(
        None,
        examples=[*SIMULATED_POLICIES, "sticky", "affinity", "kv+sessions"],
        description=(
            "Compare these policies, separated by commas: built-in ones, your module:Class, or a policy with "
            "+sessions. Unset = some of them."
        ),
    )
    kv_block_size: int = Field(64, ge=1, le=65_536, description="Set the number of tokens in a KV block.")
    routers: int = Field(
        1,
        ge=1,
        le=256,
        description="Simulate this many routers; requests go to them round robin, each receives all events.",
    )
    worker_speeds: str = Field(
        "1",
        description=(
            "Set the workers' speed factors, separated by commas and repeated; 1,1,1,0.33 makes every fourth "
            "worker three times slower."
        ),
    )
    as_json: bool = Field(False, description="Print the figures to standard output as JSON instead of a table.")
    out: Path | None = Field(None, description="Write the figures to this file too, as JSON.")


class WhatIfSettings(EngineSettings):
    """Other settings of the router to try on recorded traffic; several values, separated by commas, make variants."""

    panel: ClassVar[str] = "Comparison"

    decisions: str | None = Field(
        None, description="Read recorded decisions from here. Unset = `decisions` below the journal."
    )
    policy: str | None = Field(
        None,
        examples=[*SIMULATED_POLICIES, "kv+sessions"],
        description="Replay with these policies, or with session admission (+sessions). Unset = the recorded one.",
    )
    as_json: bool = Field(False, description="Print the figures to standard output as JSON instead of a table.")
    out: Path | None = Field(None, description="Write the figures to this file too, as JSON.")
