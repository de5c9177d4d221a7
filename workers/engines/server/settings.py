"""Every setting of a worker in front of an engine server: the command line, the environment and the documentation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from poolgrid.runtime.http_target import Target
from poolgrid.runtime.settings import ZmqEndpoint
from poolgrid.wire.identifiers import Role
from poolgrid.workers.settings import WorkerProcessSettings

ROLES = {"aggregated": Role.AGGREGATED, "prefill": Role.PREFILL, "decode": Role.DECODE}

TIMEOUT_MS_MAX = 86_400_000.0
"""A day: beyond it a time-out is a mistake in the unit."""


class EngineServerSettings(WorkerProcessSettings):
    """A worker process in front of an engine server."""

    gpu_interval_ms: int = Field(
        0,
        ge=0,
        le=3_600_000,
        description="Time between two readings of this machine's GPUs (poolgrid_worker_gpu_*); at least 100, 0 = none. "
        "By default none: the engine's server may be on another machine. Where it is on this one, set it and "
        "CUDA_VISIBLE_DEVICES.",
    )
    engine_url: str = Field(
        "",
        max_length=2048,
        description="URL of the engine's own HTTP server, as http://gpu1:8000; needed.",
    )
    engine_api_key: str = Field(
        "", max_length=4096, description="API key that the engine's server asks for; better given in the environment."
    )
    served_model_name: str = Field(
        "", max_length=256, description="Which of the server's models; empty = the first that is no adapter."
    )
    role: Literal["aggregated", "prefill", "decode"] = Field(
        "aggregated",
        description="What the worker does: whole requests and any leg, the prefill leg only, or the decode leg and "
        "whole requests.",
    )
    kv_block_size: int | None = Field(
        None, ge=1, le=4096, description="Tokens in a KV block; empty = as the server says."
    )
    max_seq_len: int | None = Field(
        None, ge=2, le=16_777_216, description="Prompt and output tokens of one request; empty = as the server says."
    )
    max_batch_size: int = Field(
        256, ge=1, le=65_536, description="Requests in one engine step of a rank, where the server does not say."
    )
    max_num_tokens: int = Field(
        8192, ge=1, le=1_048_576, description="Tokens in one engine step of a rank, where the server does not say."
    )
    data_parallel_size: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Data-parallel ranks behind the URL, each a target of its own; empty = as the server says.",
    )
    kv_events_endpoint: tuple[ZmqEndpoint, ...] = Field(
        (),
        max_length=1024,
        description="ZMQ endpoint at which the server publishes its cache events, once for each rank in their order; "
        "empty = as the server says.",
    )
    kv_events_replay_endpoint: tuple[ZmqEndpoint, ...] = Field(
        (), max_length=1024, description="ZMQ endpoint of each rank's replay socket; with kv_events_endpoint."
    )
    kv_events_topic: str = Field(
        "", max_length=256, description="What the messages of these publishers begin with; with kv_events_endpoint."
    )
    follow_events: bool = Field(
        True,
        description="Follow the server's cache events. Without them routers know of it what they sent: give them "
        "--policy approximate.",
    )
    engine_priorities: bool = Field(
        False,
        description="Give requests' priorities to the server, which must schedule by them; others refuse such "
        "requests. Routers order by priority in either case.",
    )
    kv_transfer_timeout_ms: float = Field(
        60_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long a prefill leg is counted whose KV no decode worker is known to have taken; the server "
        "frees it by its own time-out.",
    )
    kept_transfers_max: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Prefilled requests whose KV is kept at a time; at the bound prefill legs are refused as busy.",
    )
    max_requests: int = Field(
        8192, ge=1, le=1_048_576, description="Requests in the server, waiting ones included; one more is refused."
    )
    health_interval_ms: float = Field(
        2_000.0, ge=10.0, le=TIMEOUT_MS_MAX, description="Time between two questions to the server how it is."
    )
    health_timeout_ms: float = Field(
        10_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long its answer may take before the worker moves its requests elsewhere and leaves the pool; "
        "it comes back when the server does.",
    )
    progress_timeout_ms: float = Field(
        120_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long requests may be in the server without any progress before it counts as silent.",
    )

    @field_validator("engine_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if url:
            Target(url)
        return url

    @model_validator(mode="after")
    def _check_that_there_is_a_server(self) -> Self:
        if not self.engine_url:
            raise ValueError(
                f"engine_url is not given: a worker with the engine {self.engine_name} goes in front of a server that "
                "runs, as http://gpu1:8000"
            )
        return self

    @model_validator(mode="after")
    def _check_events(self) -> Self:
        replays, endpoints = len(self.kv_events_replay_endpoint), len(self.kv_events_endpoint)
        if replays not in (0, endpoints):
            raise ValueError(
                f"kv_events_replay_endpoint is given {replays} times and kv_events_endpoint {endpoints} times: allowed "
                "are as many, or none"
            )
        if self.data_parallel_size is not None and endpoints not in (0, self.data_parallel_size):
            raise ValueError(
                f"kv_events_endpoint is given {endpoints} times, data_parallel_size is {self.data_parallel_size}: one "
                "for each rank"
            )
        return self
