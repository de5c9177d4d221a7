"""What can be set on a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from poolgrid.process.plugins import policy_names
from poolgrid.process.settings import Settings
from poolgrid.router.core.load_ledger import CROWDING_RETRIES
from poolgrid.router.core.policy import HOLD_LIMIT_MS
from poolgrid.workers.core.shipped_timing import PUBLISHED, TIMING_TEXT, TimingName

SIMULATED_POLICIES = tuple(name for name in policy_names() if name != "approximate")


class SimulationSettings(Settings):
    """A trace, a pool, and the policies to compare on them."""

    workers: int = Field(8, ge=1, le=4096, description="Simulated workers.")
    policy: str = Field(
        "kv,round-robin,least-loaded",
        examples=list(SIMULATED_POLICIES),
        description="Policies to compare, separated by commas: known ones, or module:Class of your own.",
    )
    speed: float = Field(1.0, gt=0, le=10_000, description="How many times faster than recorded the trace arrives.")
    requests: int | None = Field(None, ge=1, description="Only the first N requests of the trace.")
    block_size: int = Field(64, ge=1, le=65_536, description="Tokens in a KV block.")
    blocks_per_worker: int | None = Field(
        None, ge=1, description="KV blocks of each worker; by default enough that nothing is ever evicted."
    )
    host_blocks_per_worker: int = Field(0, ge=0, description="Blocks of each worker's host tier.")
    max_batch_size: int = Field(256, ge=1, description="Requests that one worker runs at a time.")
    max_num_tokens: int = Field(8192, ge=1, description="Tokens of one engine step, prefill chunks included.")
    prefill_weight: float = Field(1.0, ge=0, le=1000, description="Cost of one block that must be computed.")
    queue_weight: float = Field(0.25, ge=0, le=1000, description="How much queued prompt tokens count.")
    decode_weight: float = Field(0.02, ge=0, le=1000, description="Cost of one block of active requests.")
    device_weight: float = Field(1.0, ge=0, le=1000, description="Credit for one block in device memory.")
    routers: int = Field(
        1,
        ge=1,
        le=256,
        description="Routers of the pool; requests come to them in turn, each knows what all workers say.",
    )
    separate_routers: bool = Field(
        False, description="The routers know nothing but their own choices: what a shared stream is compared with."
    )
    crowding_retries: int = Field(
        CROWDING_RETRIES,
        ge=0,
        le=100,
        description="How often a worker may refuse a request because other routers were quicker.",
    )
    event_delay_ms: float = Field(
        0.0, ge=0.0, le=60_000.0, description="How long a worker's events take to reach the routers."
    )
    temperature: float = Field(0.0, ge=0, le=1000, description="Above 0, workers are sampled by cost.")
    hold_limit_ms: float = Field(
        HOLD_LIMIT_MS,
        ge=0,
        le=600_000,
        description="With the policy predicted: how long a request may wait at its router for the worker that is best "
        "for it to have no prompt to compute. 0 = none waits.",
    )
    retention: Literal["off", "learned"] = Field(
        "off", description="What engines are told of how long blocks should stay: nothing, or what the router learns."
    )
    timing: TimingName = Field(PUBLISHED, description=TIMING_TEXT)
    timing_table: Path | None = Field(
        None, description="JSON table of measured step times of your own, instead of those that timing names."
    )
    worker_speeds: str = Field(
        "1",
        description="How fast workers are beside what their cards say: speeds of the first ones, separated by commas, "
        "after which it begins again; 1,1,1,0.33 makes every fourth three times slower.",
    )
    slowdowns: str = Field(
        "",
        description="WORKER:FROM_S:TO_S:SPEED, separated by commas: that worker (from 0) has that speed from then to "
        "then, in seconds of the simulated time.",
    )
    ttft_targets_ms: str = Field(
        "",
        description="TTFT targets in milliseconds, separated by commas; each request gets one of them by its id, says "
        "it to the router, and the report says how many met theirs.",
    )
    hide_targets: bool = Field(
        False, description="The router is not told the targets: what a router that uses them is compared with."
    )
    as_json: bool = Field(False, description="Print the figures to standard output as JSON, and no table.")
    out: Path | None = Field(None, description="Write the figures to this file too, as JSON.")


class EngineSettings(Settings):
    """The simulated engines that recorded traffic is played on."""

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
    timing_table: Path | None = Field(
        None, description="JSON table of measured step times of your own, instead of those that timing names."
    )
    blocks_per_worker: int | None = Field(
        None, ge=1, description="KV blocks of each worker; by default as recorded, or enough for everything of a trace."
    )
    requests: int | None = Field(None, ge=1, description="Only the first N requests.")


class WhatIfSettings(EngineSettings):
    """Other settings of the router to try on recorded traffic; several values, separated by commas, make variants."""

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
    plot: Path | None = Field(
        None, description="Also draw them: .html needs nothing, .png the extra `plots` (matplotlib)."
    )


class TuneSettings(EngineSettings):
    """A search for cost weights."""

    objective: Literal["ttft-p99", "goodput"] = Field(
        "ttft-p99", description="What to make better: the 99th percentile of TTFT, or requests within both targets."
    )
    ttft_target_ms: float = Field(1000.0, gt=0, description="TTFT that a request of the goodput must not exceed.")
    itl_target_ms: float = Field(50.0, gt=0, description="Mean ITL that a request of the goodput must not exceed.")
    trials: int = Field(40, ge=2, le=100_000, description="Simulations of the search part.")
    seed: int = Field(0, ge=0, description="Seed of the search: the same one finds the same weights.")
    search_share: float = Field(
        0.6, gt=0.05, lt=0.95, description="Share of the requests, the earliest, to search on; the rest is held back."
    )
    block_size: int = Field(64, ge=1, le=65_536, description="Tokens in a KV block, of a trace.")
    as_json: bool = Field(False, description="Print the figures to standard output as JSON, and no table.")
    out: Path | None = Field(None, description="Write the figures to this file too, as JSON.")
    config_out: Path | None = Field(
        None, description="Write the weights to this file, for poolgrid router --settings-file."
    )
