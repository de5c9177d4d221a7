"""Every setting of a worker process, once: the command line, the environment and the documentation come from here.

``WorkerProcessSettings`` are those of any worker. Each engine adds its own: ``WorkerSettings`` the simulated one,
``TrtllmWorkerSettings`` TensorRT-LLM. ``EngineChoice`` says which of the two a command line means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from poolgrid.runtime.http_settings import HttpSettings
from poolgrid.runtime.settings import Settings, ZmqEndpoint
from poolgrid.wire.addresses import host_problem
from poolgrid.wire.card import MediaSpec, WorkerLimits
from poolgrid.wire.identifiers import Role
from poolgrid.wire.limits import BLOCKS_PER_EVENT_MAX, IDENTIFIER_BYTES_MAX, LORAS_PER_WORKER_MAX
from poolgrid.workers.core.outbox import OUTBOX_BYTES_DEFAULT, OUTBOX_BYTES_MIN
from poolgrid.workers.simulated.engine import EngineLimits
from poolgrid.workers.simulated.kv_transfer import (
    KEPT_TRANSFERS_MAX_DEFAULT,
    KV_BYTES_PER_TOKEN_DEFAULT,
    KV_TRANSFER_GIGABYTES_PER_S_DEFAULT,
    KV_TRANSFER_LATENCY_MS_DEFAULT,
    KV_TRANSFER_TIMEOUT_MS_DEFAULT,
    TIMEOUT_MS_MAX,
    TransferModel,
)
from poolgrid.workers.simulated.next_token import Vocabulary
from poolgrid.workers.simulated.timing import SPEEDUP_MAX
from poolgrid.workers.trtllm.settings import TrtllmSettings

Name = Annotated[str, StringConstraints(min_length=1, max_length=IDENTIFIER_BYTES_MAX)]


class EngineChoice(Settings):
    """Which engine a worker drives; the other settings depend on it."""

    engine: Literal["simulated", "trtllm"] = Field(
        "simulated", description="Engine of the worker: simulated needs nothing, trtllm needs TensorRT-LLM and GPUs."
    )


class WorkerProcessSettings(HttpSettings):
    """What every worker process has, whatever its engine."""

    worker_id: Name = Field("worker-0", description="Name of this worker in its pool; stable over restarts.")
    consolidator: ZmqEndpoint = Field(
        "tcp://127.0.0.1:5557", description="ZMQ endpoint at which the consolidator takes events in."
    )
    host: Name = Field("127.0.0.1", description="Address to bind; loopback unless told otherwise.")
    advertise_host: str = Field(
        "",
        max_length=IDENTIFIER_BYTES_MAX,
        description="Host that routers connect to; empty = the bound one. Needed when host is 0.0.0.0 or ::.",
    )
    request_port: int = Field(0, ge=0, le=65535, description="Port of the request plane; 0 = any free one.")
    http_port: int = Field(0, ge=0, le=65535, description="Port of health and metrics; 0 = any free one.")
    peer_lease_ms: int = Field(
        10_000, ge=100, le=3_600_000, description="A router that is silent this long has its requests cancelled."
    )
    drain_timeout_ms: int = Field(
        30_000, ge=0, le=86_400_000, description="How long running requests may take to finish after SIGTERM."
    )
    load_interval_ms: int = Field(
        100, ge=0, le=60_000, description="Least time between two load reports while busy; one more when idle."
    )
    heartbeat_ms: int = Field(1000, ge=10, le=60_000, description="Time between two signs of life to the consolidator.")
    outbox_bytes: int = Field(
        OUTBOX_BYTES_DEFAULT,
        ge=OUTBOX_BYTES_MIN,
        le=2**32,
        description="Unacknowledged events that are kept; beyond it all are dropped and the cache is restated.",
    )

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if self.host in ("0.0.0.0", "::", "*") and not self.advertise_host:
            raise ValueError(
                f"host is {self.host!r}, which no router can connect to: set advertise_host to this machine's address"
            )
        # It stands in the card, from which every router of the pool connects: wrong, it would be found out there only.
        field = "advertise_host" if self.advertise_host else "host"
        problem = host_problem(self.advertise_host or self.host)
        if problem is not None:
            raise ValueError(
                f"{field} is {self.advertise_host or self.host!r}: what routers would connect to {problem}; "
                "give a name or an IP address, without scheme, port or brackets"
            )
        return self

    @property
    def advertised_host(self) -> str:
        """The host in the endpoints that others connect to, in brackets where it is an IPv6 address."""
        host = self.advertise_host or self.host
        return f"[{host}]" if ":" in host else host

    @property
    def http_scheme(self) -> str:
        """``https`` where there is a certificate."""
        return "http" if self.tls_certificate is None else "https"


class WorkerSettings(WorkerProcessSettings):
    """A worker process with the simulated engine."""

    model: Name = Field("simulated", description="Served model name, as clients write it.")
    role: Literal["aggregated", "prefill", "decode", "encode"] = Field(
        "aggregated",
        description="What the worker does: whole requests and any leg, the prefill leg only, or the decode leg and "
        "whole requests, or the embeddings of images for the others (encode).",
    )
    block_size: int = Field(32, ge=1, le=4096, description="Tokens in a KV block.")
    total_kv_blocks: int = Field(16_384, ge=1, le=BLOCKS_PER_EVENT_MAX, description="KV blocks on the device.")
    host_kv_blocks: int = Field(
        0,
        ge=0,
        le=BLOCKS_PER_EVENT_MAX,
        description="KV blocks on the host, which take what the device evicts; 0 = none.",
    )
    max_batch_size: int = Field(256, ge=1, le=65_536, description="Requests that run at a time.")
    max_num_tokens: int = Field(
        8192, ge=1, le=1_048_576, description="Tokens in one engine step; at least max_batch_size."
    )
    max_sequence_length: int = Field(
        131_072, ge=2, le=4_194_304, description="Prompt and output tokens of one request; a longer one is refused."
    )
    max_waiting_requests: int = Field(
        4096, ge=1, le=65_536, description="Requests that may wait for a place; one more is refused as busy."
    )
    vocabulary_size: int = Field(32_000, ge=1, le=2**32, description="Generated token ids are below this.")
    first_token_id: int = Field(3, ge=0, le=2**32 - 1, description="Lowest token id that is generated.")
    eos_token_id: int = Field(2, ge=0, le=2**32 - 1, description="Token id that ends an output.")
    eos_probability: float = Field(
        0.0, ge=0.0, le=1.0, description="Chance of the end-of-sequence token at each position."
    )
    tokenizer_path: Path | None = Field(
        None,
        description="Model directory (or its tokenizer.json) whose tokens the engine knows, to keep to guides "
        "(response_format, forced tool calls); empty = such requests are refused.",
    )
    speedup: float = Field(1.0, gt=0.0, le=SPEEDUP_MAX, description="Divides all simulated step times.")
    timing_table: Path | None = Field(
        None, description="JSON file of measured step times, instead of the built-in formulas."
    )
    kv_bytes_per_token: int = Field(
        KV_BYTES_PER_TOKEN_DEFAULT,
        ge=1,
        le=2**30,
        description="KV of one token, for the time a transfer takes; the default is Llama-3.1-8B's in 16 bit.",
    )
    kv_transfer_gigabytes_per_s: float = Field(
        KV_TRANSFER_GIGABYTES_PER_S_DEFAULT,
        gt=0.0,
        le=1e6,
        description="Bandwidth of a KV transfer, in 10^9 bytes per second; multiplied by speedup.",
    )
    kv_transfer_latency_ms: float = Field(
        KV_TRANSFER_LATENCY_MS_DEFAULT,
        ge=0.0,
        le=60_000.0,
        description="Set-up time of a KV transfer, whatever its size; divided by speedup.",
    )
    kv_transfer_timeout_ms: float = Field(
        KV_TRANSFER_TIMEOUT_MS_DEFAULT,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long a prefill worker keeps KV that no decode worker asks for; real time, whatever speedup.",
    )
    kept_transfers_max: int = Field(
        KEPT_TRANSFERS_MAX_DEFAULT,
        ge=1,
        le=65_536,
        description="Prefilled requests whose KV is kept at a time; at the bound prefill legs are refused as busy.",
    )
    kv_fetch_timeout_ms: float = Field(
        2000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long a decode worker waits for a prefill worker's answer before the leg ends as broken and "
        "the request is placed anew.",
    )
    modality: Literal["text", "multimodal"] = Field(
        "text", description="What requests may carry: text only, or images and embeddings too."
    )
    tokens_per_image: int = Field(
        16, ge=1, le=65_536, description="Prompt tokens that stand for an image, with modality multimodal."
    )
    encode_ms_per_image: float = Field(
        20.0, ge=0.0, le=60_000.0, description="Time that an encode worker takes for an image; divided by speedup."
    )
    tensor_transport: Literal["zmq", "nixl"] = Field(
        "zmq",
        description="How embeddings come from encode workers: in messages, or read from their memory with NIXL "
        "(poolgrid[nixl]). poolgrid_worker_tensor_transport shows it.",
    )
    tensor_port: int = Field(
        0, ge=0, le=65535, description="Port at which tensors are asked for and let go of; 0 = any free one."
    )
    tensor_store_mb: int = Field(
        256,
        ge=1,
        le=1_048_576,
        description="Embeddings kept for other workers, in 2^20 bytes; beyond it encode legs are refused as busy.",
    )
    tensor_lease_ms: float = Field(
        10_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long embeddings are kept that nobody asks for; as long as a silent router keeps its lease.",
    )
    tensor_fetch_timeout_ms: float = Field(
        2000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="Silence of an encode worker after which a fetch of embeddings ends as broken.",
    )
    tensor_chunk_kb: int = Field(
        1024, ge=1, le=4096, description="Piece of a tensor in one message, in 2^10 bytes, without NIXL."
    )
    loras: tuple[Name, ...] = Field((), max_length=LORAS_PER_WORKER_MAX, description="LoRA adapters that are served.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.engine_limits()
        self.vocabulary()
        if self.role == "encode" and self.modality != "multimodal":
            raise ValueError("role is 'encode' and modality is 'text': an encode worker needs modality multimodal")
        path = self.tokenizer_path
        if path is not None and not (path / "tokenizer.json").is_file() and not path.is_file():
            raise ValueError(
                f"tokenizer_path is {str(path)!r}: allowed is a directory with a tokenizer.json, or that file"
            )
        return self

    def engine_limits(self) -> EngineLimits:
        """Return the limits of the simulated engine."""
        return EngineLimits(
            block_size=self.block_size,
            total_kv_blocks=self.total_kv_blocks,
            host_kv_blocks=self.host_kv_blocks,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_sequence_length=self.max_sequence_length,
            max_waiting_requests=self.max_waiting_requests,
        )

    def media_spec(self) -> MediaSpec:
        """Return what the worker's card says of media."""
        if self.modality == "text":
            return MediaSpec()
        # The simulated engine's own placeholder and filler: no tokenizer needs to know them.
        return MediaSpec(("image", "embeddings"), "<image>", None, self.tokens_per_image, 0)

    def card_limits(self) -> WorkerLimits:
        """Return the limits as the worker's card states them."""
        return WorkerLimits(
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            total_kv_blocks=self.total_kv_blocks,
            max_sequence_length=self.max_sequence_length,
            host_kv_blocks=self.host_kv_blocks,
        )

    def vocabulary(self) -> Vocabulary:
        """Return the token ids that the simulated engine produces."""
        return Vocabulary(self.vocabulary_size, self.first_token_id, self.eos_token_id, self.eos_probability)

    def transfer_model(self) -> TransferModel:
        """Return how the simulated engine hands KV over."""
        return TransferModel(
            latency_ms=self.kv_transfer_latency_ms / self.speedup,
            gigabytes_per_s=self.kv_transfer_gigabytes_per_s * self.speedup,
            bytes_per_token=self.kv_bytes_per_token,
            timeout_ms=self.kv_transfer_timeout_ms,
            kept_max=self.kept_transfers_max,
        )

    @property
    def card_role(self) -> Role:
        """The role as the worker's card states it."""
        return Role[self.role.upper()]


class TrtllmWorkerSettings(WorkerProcessSettings, TrtllmSettings):
    """A worker process with TensorRT-LLM."""

    kept_transfers_max: int = Field(
        KEPT_TRANSFERS_MAX_DEFAULT,
        ge=1,
        le=65_536,
        description="Prefilled requests whose KV is kept at a time; at the bound prefill legs are refused as busy.",
    )
    kv_transfer_timeout_ms: float = Field(
        60_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long a prefill worker waits to hear that a decode worker has the KV; then the engine is asked "
        "to give it up.",
    )
    max_requests: int = Field(
        8192, ge=1, le=1_048_576, description="Requests in the engine, waiting ones included; one more is refused."
    )
    health_interval_ms: float = Field(
        30_000.0,
        ge=10.0,
        le=86_400_000.0,
        description="Time between two one-token generations that prove an idle engine; a busy one proves itself.",
    )
    health_timeout_ms: float = Field(
        30_000.0, ge=10.0, le=86_400_000.0, description="How long such a generation may take."
    )
    progress_timeout_ms: float = Field(
        60_000.0,
        ge=10.0,
        le=86_400_000.0,
        description="How long requests may be in the engine without any progress before the worker is unhealthy.",
    )
