"""What can be set on a simulation."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from router.core.load_ledger import CROWDING_RETRIES
from runtime.settings import Settings


class SimulationSettings(Settings):
    """A trace, a pool, and the policies to compare on them."""

    workers: int = Field(8, ge=1, le=4096, description="Simulated workers.")
    policy: str = Field("kv,round-robin,least-loaded", description="Policies to compare, separated by commas.")
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
    timing_table: Path | None = Field(
        None, description="JSON table of measured step times, instead of the published polynomials."
    )
    json_out: Path | None = Field(None, description="Also write the figures to this file, as JSON.")
