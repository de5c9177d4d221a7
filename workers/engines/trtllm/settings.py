"""Every setting of a TensorRT-LLM worker: the command line, the environment and the documentation come from here.

Which of them become engine arguments, and what overrides them, is
``poolgrid.workers.engines.trtllm.arguments.engine_arguments``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from poolgrid.process.settings import InputFile, Settings
from poolgrid.wire.identifiers import Role
from poolgrid.wire.limits import IDENTIFIER_BYTES_MAX
from poolgrid.workers.settings import StepTimesSettings
from poolgrid.workers.tensor_transfer.settings import TensorSettings

DisaggregationMode = Literal["prefill_and_decode", "prefill", "decode", "encode"]

Name = Annotated[str, StringConstraints(max_length=IDENTIFIER_BYTES_MAX)]

EVENT_BUFFER_MAX_SIZE = 100_000
"""KV events that the engine keeps until they are read. Events are small; TensorRT-LLM's reader may be late by seconds
when a long prefill holds the interpreter, and an overflow costs the whole index of a rank. 1024 overflowed in the field
(dynamo #711)."""

TIMEOUT_MS_MAX = 3_600_000.0
"""An hour: longer than anybody waits for KV."""

DYNAMIC_BATCH_WINDOW = 128
"""Iterations over which TensorRT-LLM averages before it retunes the batch size."""

COMPONENTS: dict[str, str] = {
    "prefill_and_decode": "worker",
    "prefill": "prefill",
    "decode": "decode",
    "encode": "encode",
}
"""Component of the default endpoint name, by disaggregation mode."""

MODES_ELSEWHERE = {"agg": "prefill_and_decode", "pd": "prefill_and_decode"}
"""What Dynamo calls the mode of workers that do the whole of a request."""

ROLES: dict[str, Role] = {
    "prefill_and_decode": Role.AGGREGATED,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "encode": Role.ENCODE,
}


class TrtllmSettings(Settings):
    """What TensorRT-LLM is started with."""

    panel: ClassVar[str] = "TensorRT-LLM"

    model_path: str = Field(
        "", max_length=4096, description="Checkpoint directory or Hugging Face name of the model to load. Required."
    )
    served_model_name: Name = Field("", description="Model name as clients write it; empty = the model path.")
    tensor_parallel_size: int = Field(1, ge=1, le=4096, description="GPUs that share each layer.")
    enable_attention_dp: bool = Field(
        False, description="Attention is data parallel: each rank has its own KV cache and is its own routing target."
    )
    kv_block_size: int = Field(32, ge=1, le=4096, description="Tokens in a KV block; all workers of a pool must agree.")
    free_gpu_memory_fraction: float = Field(
        0.9, ge=0.0, le=1.0, description="Share of the GPU memory that is left after loading which the KV cache takes."
    )
    max_batch_size: int = Field(2048, ge=1, le=65_536, description="Requests in one engine step.")
    max_num_tokens: int = Field(8192, ge=1, le=1_048_576, description="Tokens in one engine step.")
    max_seq_len: int | None = Field(
        None, ge=2, le=16_777_216, description="Prompt and output tokens of one request; empty = the model's own limit."
    )
    disaggregation_mode: DisaggregationMode = Field(
        "prefill_and_decode", description="Which part of a request this worker does."
    )
    kv_transfer_timeout_ms: float = Field(
        60_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description="How long a prefill worker keeps KV that no decode worker is known to have taken. It is the "
        "engine's own time-out too (cache_transceiver_config), unless a file or --override-engine-args has another.",
    )
    modality: Literal["text", "multimodal", "video_diffusion"] = Field(
        "text", description="What requests hold besides text. video_diffusion is not built yet and is refused."
    )
    tokens_per_image: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description="Prompt tokens that the model makes of every picture, where that is a fixed number; 0 = by the "
        "model's files, for the models whose rule is known. Routers find cached pictures by it.",
    )
    publish_events_and_metrics: bool = Field(
        True,
        description="Publish KV cache events and engine statistics; without them a router knows only what it sent.",
    )
    connector: Literal["none", "kvbm"] = Field(
        "none", description="KV cache connector; kvbm offloads blocks to host and disk through Dynamo's block manager."
    )
    encode_endpoint: Name = Field(
        "",
        description="namespace.component.endpoint of the encode workers (dyn:// before it is fine), which the router "
        "finds by their role: with it images are never encoded here, and what comes without their embeddings is "
        "refused; empty = images that come as such are encoded here.",
    )
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = Field(
        "xgrammar", description="Library behind guided decoding (structured output)."
    )
    logits_processors: tuple[str, ...] = Field(
        (),
        max_length=256,
        description="Logits processors that requests may name besides the built-in ones, as "
        "NAME=package.module:factory; the modules are imported at the start.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    namespace: Name = Field(
        "poolgrid", min_length=1, description="First part of the endpoint name; dyn:// before it is fine."
    )
    endpoint: Name = Field(
        "",
        description="namespace.component.endpoint of this worker, by which routers' /health lists it; dyn:// before it "
        "is fine; empty = made of namespace and mode.",
    )
    extra_engine_args: InputFile | None = Field(
        None, description="YAML file of TensorRT-LLM arguments; overrides the options above, key by key."
    )
    override_engine_args: str = Field(
        "", max_length=1_048_576, description="JSON object of TensorRT-LLM arguments; overrides all else."
    )

    @field_validator("disaggregation_mode", mode="before")
    @classmethod
    def _mode_name(cls, mode: object) -> object:
        return MODES_ELSEWHERE.get(mode, mode) if isinstance(mode, str) else mode

    @field_validator("modality")
    @classmethod
    def _refuse_video(cls, modality: str) -> str:
        if modality == "video_diffusion":
            raise ValueError(
                "video_diffusion is not built yet: poolgrid serves text and multimodal models; no worker was started"
            )
        return modality

    @field_validator("namespace", "endpoint", "encode_endpoint", mode="before")
    @classmethod
    def _without_scheme(cls, name: object) -> object:
        return name.removeprefix("dyn://") if isinstance(name, str) else name

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, namespace: str) -> str:
        if "." in namespace or any(each.isspace() for each in namespace):
            raise ValueError(f"namespace is {namespace!r}, allowed is a name without dots and spaces")
        return namespace

    @field_validator("endpoint", "encode_endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        if endpoint:
            split_endpoint(endpoint)
        return endpoint

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.encode_endpoint and self.disaggregation_mode in ("encode", "decode"):
            raise ValueError(
                f"encode_endpoint is {self.encode_endpoint!r} on a worker of mode {self.disaggregation_mode}, "
                "which has no media to send there: allowed on prefill_and_decode and prefill"
            )
        if self.encode_endpoint and self.modality != "multimodal":
            raise ValueError(
                f"encode_endpoint is {self.encode_endpoint!r} with modality {self.modality}, allowed is multimodal"
            )
        if self.disaggregation_mode == "encode" and self.modality != "multimodal":
            raise ValueError(
                f"disaggregation_mode is encode with modality {self.modality}, allowed is multimodal: "
                "an encode worker turns images into embeddings"
            )
        return self

    @property
    def role(self) -> Role:
        return ROLES[self.disaggregation_mode]

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    @property
    def endpoint_name(self) -> str:
        """``namespace.component.endpoint`` of this worker."""
        return self.endpoint or f"{self.namespace}.{COMPONENTS[self.disaggregation_mode]}.generate"


class TrtllmWorkerSettings(TensorSettings, StepTimesSettings, TrtllmSettings):
    """A worker process with TensorRT-LLM."""

    panel: ClassVar[str] = "TensorRT-LLM"

    engine_name: ClassVar[str] = "trtllm"

    tensor_transport: Literal["none", "zmq", "nixl"] = Field(
        "none",
        description="How embeddings come from encode workers: as handles that are good on one machine only (none), as "
        "bytes in messages, or read from their host memory with NIXL (poolgrid[nixl]). Encode workers and the workers "
        "that compute their prompts need the same, except that zmq and nixl go together.",
    )
    kept_transfers_max: ClassVar[int] = 256
    """Prefilled requests whose KV is kept at a time, far more than decode workers are behind by; at the bound prefill
    legs are refused as busy."""
    max_requests: ClassVar[int] = 8192
    """Requests in the engine, waiting ones included: more than any engine runs. One more is refused."""
    health_interval_ms: ClassVar[float] = 30_000.0
    """Time between two one-token generations that prove an idle engine; a busy one proves itself."""
    health_timeout_ms: ClassVar[float] = 30_000.0
    """How long such a generation may take."""
    answer_timeout_ms: float = Field(
        5_000.0,
        ge=10.0,
        le=86_400_000.0,
        description="How long a call of the engine may take before the worker moves its requests elsewhere and leaves "
        "the pool; it comes back when the engine does.",
    )
    progress_timeout_ms: float = Field(
        60_000.0,
        ge=10.0,
        le=86_400_000.0,
        description="How long requests may be in the engine without any progress before the worker is unhealthy.",
    )


def split_endpoint(endpoint: str) -> tuple[str, str, str]:
    """Return namespace, component and endpoint of a dotted name; raise ``ValueError`` when it has not three parts."""
    parts = endpoint.split(".")
    if len(parts) != 3 or not all(parts) or any(each.isspace() for each in endpoint):
        raise ValueError(f"an endpoint is {endpoint!r}, allowed is namespace.component.endpoint")
    return parts[0], parts[1], parts[2]
