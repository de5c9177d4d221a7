"""Every setting of a worker with the simulated engine: the command line, the environment and the documentation come
from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.limits import BLOCKS_PER_EVENT_MAX, LORAS_PER_WORKER_MAX
from poolgrid.kernel.wire.tasks import MODALITIES, TASK_ROLES
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulated.core.kv_groups import parse_groups
from poolgrid.plugins.simulated.core.kv_transfer import (
    KEPT_TRANSFERS_MAX_DEFAULT,
    KV_BYTES_PER_TOKEN_DEFAULT,
    KV_TRANSFER_GIGABYTES_PER_S_DEFAULT,
    KV_TRANSFER_LATENCY_MS_DEFAULT,
    KV_TRANSFER_TIMEOUT_MS_DEFAULT,
    TransferModel,
)
from poolgrid.plugins.simulated.core.next_token import (
    MEAN_DEFAULT,
    STDDEV_DEFAULT,
    TOKENS_MAX,
    AnswerLengths,
    Vocabulary,
)
from poolgrid.server.workers.settings import MODALITY_HELP, MODEL_PATH_HELP, ROLE_HELP, Modality, Name, check_task_role
from poolgrid.server.workers.tensor_transfer.settings import TensorSettings
from poolgrid.server.workers.timing import PUBLISHED, SPEEDUP_MAX, TIMINGS, Timing

VOCABULARY_SIZE_DEFAULT = 32_000
"""What early models of Llama's kind have."""


class SimulatedWorkerSettings(TensorSettings):
    """A worker process with the simulated engine."""

    panel: ClassVar[str] = "Simulated engine"

    engine_name: ClassVar[str] = "simulated"

    served_model_name: Name = Field(
        "simulated",
        description=(
            "Serve the model under this name. Unset = the model path, or an engine server's first base model."
        ),
    )
    role: Literal["aggregated", "prefill", "decode", "encode"] = Field(
        "aggregated",
        description=ROLE_HELP,
    )
    kv_block_size: int = Field(
        32,
        ge=1,
        le=4096,
        description=(
            "Set the tokens in a KV block, equal in all workers of a pool. Unset = as an engine server reports."
        ),
    )
    total_kv_blocks: int = Field(
        16_384, ge=1, le=BLOCKS_PER_EVENT_MAX, description="Set the number of KV blocks on the device."
    )
    kv_groups: str = Field(
        "",
        max_length=256,
        examples=["window:1024", "state:512"],
        description=(
            "Simulate a hybrid model with these KV groups besides full attention: window:TOKENS, state:TOKENS, "
            "separated by spaces. Unset = full attention alone."
        ),
    )
    host_kv_blocks: ClassVar[int] = 0
    """KV blocks in host memory, which receive evicted blocks: none."""
    max_batch_size: int = Field(256, ge=1, le=65_536, description="Limit the requests of one engine step.")
    max_num_tokens: int = Field(
        8192, ge=1, le=1_048_576, description="Limit the tokens of one engine step; at least max_batch_size."
    )
    max_seq_len: int = Field(
        131_072,
        ge=2,
        le=4_194_304,
        description="Limit the prompt and output tokens of one request. Unset = the model's own limit.",
    )
    max_waiting_requests: ClassVar[int] = 4096
    """Requests that may wait for a place; one more is refused as busy."""
    vocabulary_size: int | None = Field(
        None,
        ge=1,
        le=2**32,
        description=(
            "Generate token ids below this number. Unset = the size of the tokenizer at model_path, else 32,000."
        ),
    )
    first_token_id: ClassVar[int] = 3
    """The lowest token id that is generated, without a tokenizer: those below are mostly special ones."""
    eos_token_id: ClassVar[int] = 2
    """The token id that ends an output, without a tokenizer that has one of its own."""
    output_tokens_mean: float = Field(
        MEAN_DEFAULT,
        ge=0.0,
        le=TOKENS_MAX,
        description="Set the mean length of outputs that end by themselves, in tokens; 0 = none does.",
    )
    output_tokens_stddev: ClassVar[float] = STDDEV_DEFAULT
    """Standard deviation of the lengths of outputs."""
    eos_probability: ClassVar[float] = 0.0
    """Chance of the end-of-sequence token at each position, in addition to the lengths of answers."""
    model_path: str = Field(
        "",
        max_length=4096,
        description=MODEL_PATH_HELP,
    )
    speedup: float = Field(
        1.0, gt=0.0, le=SPEEDUP_MAX, description="Run the engine this many times faster than its step times."
    )
    timing: Timing = Field(
        PUBLISHED,
        examples=list(TIMINGS),
        description=(
            "Choose the step times: published, h100-qwen3-8b, h200-qwen3-8b, or your own JSON file. Policy "
            "kv starts from them."
        ),
    )
    kv_bytes_per_token: ClassVar[int] = KV_BYTES_PER_TOKEN_DEFAULT
    """KV of one token, for the time that a transfer takes."""
    kv_transfer_gigabytes_per_s: ClassVar[float] = KV_TRANSFER_GIGABYTES_PER_S_DEFAULT
    """Bandwidth of a KV transfer, in 10^9 bytes per second; ``speedup`` multiplies it."""
    kv_transfer_latency_ms: ClassVar[float] = KV_TRANSFER_LATENCY_MS_DEFAULT
    """Set-up time of a KV transfer, whatever its size; divided by ``speedup``."""
    kv_transfer_timeout_ms: ClassVar[float] = KV_TRANSFER_TIMEOUT_MS_DEFAULT
    """How long a prefill worker keeps KV that no decode worker asks for; real time, whatever ``speedup``."""
    kept_transfers_max: ClassVar[int] = KEPT_TRANSFERS_MAX_DEFAULT
    """Prefilled requests whose KV is kept at a time; at the bound prefill legs are refused as busy."""
    kv_fetch_timeout_ms: ClassVar[float] = 2000.0
    """How long a decode worker waits for a prefill worker's answer before the leg ends as broken."""
    modality: Modality = Field("text", description=MODALITY_HELP)
    tokens_per_image: ClassVar[int] = 16
    """Prompt tokens that stand for an image."""
    encode_ms_per_image: ClassVar[float] = 20.0
    """Time that an encode worker takes for an image; divided by ``speedup``."""
    tensor_transport: Literal["zmq", "nixl"] = Field(
        "zmq",
        description=(
            "Receive embeddings as handles on one machine (none, trtllm), in messages (zmq), or with NIXL "
            "(needs poolgrid[nixl])."
        ),
    )
    load_ms: float = Field(
        0.0,
        ge=0.0,
        le=86_400_000.0,
        description="Delay the start by this time, as loading weights does.",
    )
    load_bytes: ClassVar[int] = 16_000_000_000
    """Bytes of the weights, for what the worker reports while it loads: an 8B model's in 16 bit."""
    lora: tuple[Name, ...] = Field(
        (), max_length=LORAS_PER_WORKER_MAX, description="Serve this LoRA adapter. Repeat for more."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.engine_limits()
        self.vocabulary()
        if self.role == "encode" and self.modality != "multimodal":
            raise ValueError(
                f"role is 'encode' and modality is {self.modality!r}: an encode worker needs modality multimodal"
            )
        check_task_role(self.modality, self.role)
        path = self.tokenizer_path
        if path is not None and not (path / "tokenizer.json").is_file() and not path.is_file():
            raise ValueError(f"model_path is {self.model_path!r}: give a directory with a tokenizer.json, or that file")
        return self

    @property
    def tokenizer_path(self) -> Path | None:
        """Return the directory whose tokenizer answers are written with; ``None`` without one."""
        return Path(self.model_path) if self.model_path else None

    def engine_limits(self) -> SimulatedLimits:
        return SimulatedLimits(
            block_size=self.kv_block_size,
            total_kv_blocks=self.total_kv_blocks,
            host_kv_blocks=self.host_kv_blocks,
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            max_sequence_length=self.max_seq_len,
            max_waiting_requests=self.max_waiting_requests,
            kv_groups=parse_groups(self.kv_groups),
        )

    @property
    def token_ids(self) -> int:
        return self.vocabulary_size or VOCABULARY_SIZE_DEFAULT

    def vocabulary(self, words: tuple[int, ...] = (), end: int | None = None) -> Vocabulary:
        """Return the token ids that the engine produces; of ``words`` those it may produce; ``end`` ends outputs."""
        mean = self.output_tokens_mean
        return Vocabulary(
            self.token_ids,
            self.first_token_id,
            self.eos_token_id if end is None else end,
            self.eos_probability,
            AnswerLengths(mean, self.output_tokens_stddev) if mean else None,
            tuple(word for word in words if word < self.token_ids),
        )

    def transfer_model(self) -> TransferModel:
        return TransferModel(
            latency_ms=self.kv_transfer_latency_ms / self.speedup,
            gigabytes_per_s=self.kv_transfer_gigabytes_per_s * self.speedup,
            bytes_per_token=self.kv_bytes_per_token,
            timeout_ms=self.kv_transfer_timeout_ms,
            kept_max=self.kept_transfers_max,
        )

    @property
    def card_role(self) -> Role:
        stage = MODALITIES.get(self.modality)
        return Role[self.role.upper()] if stage is None else TASK_ROLES[stage]
