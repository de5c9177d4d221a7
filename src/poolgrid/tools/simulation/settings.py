"""What can be set on a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from poolgrid.process.plugins import policy_names
from poolgrid.process.settings import InputFile, Settings
from poolgrid.workers.core.timing import PUBLISHED, TIMING_TEXT, TimingName

SIMULATED_POLICIES = tuple(name for name in policy_names() if name != "approximate")


class EngineSettings(Settings):
    """The simulated engines that recorded traffic is played on."""

    panel: ClassVar[str] = "Workload and engines"

    workers: int | None = Field(
        None, ge=1, le=4096, description="Simulated workers; by default as many as were recorded, or 8 for a trace."
    )
    speed: float = Field(1.0, gt=0, le=10_000, description="How many times faster than recorded requests arrive.")
    engine_speedup: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="How many times faster than these step times the engines are; by default as fast as the "
        "recorded ones were, where those were simulated.",
    )
    timing: TimingName = Field(PUBLISHED, description=TIMING_TEXT)
    timing_table: InputFile | None = Field(
        None, description="JSON table of measured step times of your own, instead of those that timing names."
    )
    blocks_per_worker: int | None = Field(
        None, ge=1, description="KV blocks of each worker; by default as recorded, or enough for everything of a trace."
    )
    requests: int | None = Field(None, ge=1, description="Only the first N requests.")


class SimulationSettings(EngineSettings):
    """A trace, a pool, and the policies to compare on them."""

    panel: ClassVar[str] = "Workload and engines"

    policy: str = Field(
        "kv,round-robin,least-loaded",
        examples=list(SIMULATED_POLICIES),
        description="Policies to compare, separated by commas: known ones, or module:Class of your own.",
    )
    block_size: int = Field(64, ge=1, le=65_536, description="Tokens in a KV block.")
    queue_weight: float = Field(0.25, ge=0, le=1000, description="How much queued prompt tokens count.")
    decode_weight: float = Field(0.02, ge=0, le=1000, description="Cost of one block of active requests.")
    temperature: float = Field(0.0, ge=0, le=1000, description="Above 0, workers are sampled by cost.")
    routers: int = Field(
        1,
        ge=1,
        le=256,
        description="Routers of the pool; requests come to them in turn, each receives the events of all workers.",
    )
    event_delay_ms: float = Field(
        0.0, ge=0.0, le=60_000.0, description="How long a worker's events take to reach the routers."
    )
    retention: Literal["off", "learned"] = Field(
        "off", description="What engines are told of how long blocks should stay: nothing, or what the router learns."
    )
    worker_speeds: str = Field(
        "1",
        description="Speed factors of the workers that their cards do not state, separated by commas, repeated for "
        "further workers; 1,1,1,0.33 makes every fourth three times slower.",
    )
    as_json: bool = Field(False, description="Print the figures to standard output as JSON, and no table.")
    out: Path | None = Field(None, description="Write the figures to this file too, as JSON.")


class WhatIfSettings(EngineSettings):
    """Other settings of the router to try on recorded traffic; several values, separated by commas, make variants."""

    panel: ClassVar[str] = "Comparison"

    decisions: str | None = Field(
        None, description="Where the recorded decisions are, when not in `decisions` below the journal."
    )
    policy: str | None = Field(
        None,
        examples=list(SIMULATED_POLICIES),
        description="Policies; by default the recorded one.",
    )
    overlap_weight: str | None = Field(
        None, description="Credit for reusable blocks, as a multiple of the recorded one; 0 ignores caches."
    )
    prefill_weight: str | None = Field(None, description="Cost of one block that must be computed.")
    queue_weight: str | None = Field(None, description="How much queued prompt tokens count.")
    decode_weight: str | None = Field(None, description="Cost of one block of active requests.")
    temperature: str | None = Field(None, description="Above 0, workers are sampled by cost.")
    retention: str | None = Field(
        None,
        examples=["off", "learned"],
        description="What engines are told of how long blocks should stay: nothing, or what the router learns; by "
        "default as recorded.",
    )
    as_json: bool = Field(False, description="Print the figures to standard output as JSON, and no table.")
    out: Path | None = Field(None, description="Write the figures to this file too, as JSON.")


class TuneSettings(EngineSettings):
    """A search for cost weights."""

    panel: ClassVar[str] = "Search"

    decisions: str | None = Field(
        None, description="Where the recorded decisions are, when not in `decisions` below the journal."
    )
    objective: Literal["ttft-p99", "goodput"] = Field(
        "ttft-p99", description="What to make better: the 99th percentile of TTFT, or requests within both targets."
    )
    ttft_target_ms: float = Field(1000.0, gt=0, description="TTFT that a request of the goodput must not exceed.")
    itl_target_ms: float = Field(50.0, gt=0, description="Mean ITL that a request of the goodput must not exceed.")
    trials: int = Field(40, ge=2, le=100_000, description="Simulations of the search part.")
    seed: int = Field(0, ge=0, description="Seed of the search: the same one finds the same weights.")
    block_size: int = Field(64, ge=1, le=65_536, description="Tokens in a KV block, of a trace.")
    as_json: bool = Field(False, description="Print the figures to standard output as JSON, and no table.")
    out: Path | None = Field(None, description="Write the figures to this file too, as JSON.")
    config_out: Path | None = Field(
        None, description="Write the weights to this file, for poolgrid router --settings-file."
    )
