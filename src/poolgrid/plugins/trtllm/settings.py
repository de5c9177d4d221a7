"""Every setting of a TensorRT-LLM worker: the command line, the environment and the documentation come from here.

Which of them become engine arguments, and what overrides them, is
``poolgrid.plugins.trtllm.arguments.engine_arguments``.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from poolgrid.kernel.wire.identifiers import Role
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX
from poolgrid.kernel.wire.tasks import MODALITIES, TASK_ROLES
from poolgrid.server.process.settings import InputFile, Settings
from poolgrid.server.workers.settings import (
    ENGINE_ARGUMENT_HELP,
    MODALITY_HELP,
    MODEL_PATH_HELP,
    StepTimesSettings,
    check_task_role,
)
from poolgrid.server.workers.tensor_transfer.settings import TensorSettings

DisaggregationMode = Literal["prefill_and_decode", "prefill", "decode", "encode"]

Name = Annotated[str, StringConstraints(max_length=IDENTIFIER_BYTES_MAX)]

EVENT_BUFFER_MAX_SIZE = 100_000
"""KV events that the engine keeps until they are read. Events are small; TensorRT-LLM's reader may be late by seconds
when a long prefill holds the interpreter, and an overflow costs the whole index of a rank. 1024 overflowed in the field
(dynamo #711)."""

ARGUMENT = re.compile(r"\w+(\.\w+)*=.*")
"""An argument of TensorRT-LLM by its dotted name, with a value as YAML writes it on one line."""

TIMEOUT_MS_MAX = 3_600_000.0
"""An hour: longer than any worker waits for KV."""

DYNAMIC_BATCH_WINDOW = 128
"""Iterations over which TensorRT-LLM averages before it retunes the batch size."""

COMPONENTS: dict[str, str] = {
    "prefill_and_decode": "worker",
    "prefill": "prefill",
    "decode": "decode",
    "encode": "encode",
}
"""Component of the default endpoint name, by disaggregation mode."""

MODES_ELSEWHERE = dict.fromkeys(("agg", "aggregated", "pd"), "prefill_and_decode")
"""What Dynamo calls the mode of workers that do the whole of a request."""

ROLES: dict[str, Role] = {
    "prefill_and_decode": Role.AGGREGATED,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "encode": Role.ENCODE,
}


OF_LANGUAGE_MODELS = (
    "tensor_parallel_size",
    "enable_attention_dp",
    "kv_block_size",
    "free_gpu_memory_fraction",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "tokens_per_image",
    "connector",
    "encode_endpoint",
    "logits_processors",
    "engine_argument",
)
"""Settings that mean nothing to a diffusion model."""


class TrtllmSettings(Settings):
    """What TensorRT-LLM is started with."""

    panel: ClassVar[str] = "TensorRT-LLM"

    model_path: str = Field(
        "",
        max_length=4096,
        description=MODEL_PATH_HELP,
    )
    served_model_name: Name = Field(
        "",
        description=(
            "Serve the model under this name. Unset = the model path, or an engine server's first base model."
        ),
    )
    tensor_parallel_size: int = Field(1, ge=1, le=4096, description="Share each layer among this many GPUs.")
    enable_attention_dp: bool = Field(
        False, description="Run attention data parallel: each rank has its own KV cache and is routed to on its own."
    )
    kv_block_size: int = Field(
        32,
        ge=1,
        le=4096,
        description=(
            "Set the tokens in a KV block, equal in all workers of a pool. Unset = as an engine server reports."
        ),
    )
    free_gpu_memory_fraction: float = Field(
        0.9, ge=0.0, le=1.0, description="Give the KV cache this share of the GPU memory that is free after loading."
    )
    max_batch_size: int = Field(2048, ge=1, le=65_536, description="Limit the requests of one engine step.")
    max_num_tokens: int = Field(8192, ge=1, le=1_048_576, description="Limit the tokens of one engine step.")
    max_seq_len: int | None = Field(
        None,
        ge=2,
        le=16_777_216,
        description="Limit the prompt and output tokens of one request. Unset = the model's own limit.",
    )
    disaggregation_mode: DisaggregationMode = Field(
        "prefill_and_decode", description="Choose which part of a request this worker does."
    )
    kv_transfer_timeout_ms: float = Field(
        60_000.0,
        ge=10.0,
        le=TIMEOUT_MS_MAX,
        description=(
            "Keep a prefill's KV for this time until a decode worker takes it; also the engine's own transfer timeout."
        ),
    )
    modality: Literal["text", "multimodal", "image_diffusion", "video_diffusion"] = Field(
        "text", description=MODALITY_HELP
    )
    tokens_per_image: int = Field(
        0,
        ge=0,
        le=1_048_576,
        description=(
            "Count this many prompt tokens per image, for models with a fixed number; 0 = from the model's files."
        ),
    )
    publish_events_and_metrics: bool = Field(
        True,
        description="Publish KV cache events and engine statistics. Without them routers know only what they sent.",
    )
    connector: Literal["none", "kvbm"] = Field(
        "none",
        description=("Choose the KV cache connector: none, or kvbm (Dynamo's block manager with host and disk tiers)."),
    )
    encode_endpoint: Name = Field(
        "",
        description=(
            "Require embeddings from encode workers at namespace.component.endpoint for every image. Unset = "
            "encode images here."
        ),
    )
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = Field(
        "xgrammar", description="Choose the library for structured output."
    )
    logits_processors: tuple[str, ...] = Field(
        (),
        max_length=256,
        description="Offer this logits processor to requests, NAME=package.module:factory. Repeat for more.",
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    namespace: Name = Field(
        "poolgrid", min_length=1, description="Name the pool: the first part of namespace.component.endpoint."
    )
    endpoint: Name = Field(
        "",
        description=(
            "List this worker as namespace.component.endpoint in routers' /health. Unset = from namespace and mode."
        ),
    )
    engine_argument: tuple[Annotated[str, StringConstraints(min_length=1, max_length=65_536)], ...] = Field(
        (), max_length=1024, description=ENGINE_ARGUMENT_HELP
    )
    extra_engine_args: InputFile | None = Field(
        None, description="Read TensorRT-LLM arguments from this YAML file; they override the options above."
    )
    override_engine_args: str = Field(
        "",
        max_length=1_048_576,
        description="Override TensorRT-LLM arguments with this JSON object; it wins over all else.",
    )

    @field_validator("disaggregation_mode", mode="before")
    @classmethod
    def _mode_name(cls, mode: object) -> object:
        return MODES_ELSEWHERE.get(mode, mode) if isinstance(mode, str) else mode

    @field_validator("namespace", "endpoint", "encode_endpoint", mode="before")
    @classmethod
    def _without_scheme(cls, name: object) -> object:
        return name.removeprefix("dyn://") if isinstance(name, str) else name

    @field_validator("engine_argument")
    @classmethod
    def _check_arguments(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for each in arguments:
            if not ARGUMENT.fullmatch(each):
                raise ValueError(f"engine_argument is {each!r}, allowed is NAME=VALUE, as in an engine file")
        return arguments

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
        check_task_role(self.modality, self.disaggregation_mode, "prefill_and_decode")
        stage = MODALITIES.get(self.modality)
        wrong = [name for name in OF_LANGUAGE_MODELS if name in self.model_fields_set]
        if stage is not None and wrong:
            raise ValueError(
                f"{wrong[0]} is set with modality {self.modality}: it is for language models; diffusion models take "
                "the arguments of VisualGenArgs, in extra_engine_args"
            )
        return self

    @property
    def role(self) -> Role:
        stage = MODALITIES.get(self.modality)
        return ROLES[self.disaggregation_mode] if stage is None else TASK_ROLES[stage]

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    @property
    def endpoint_name(self) -> str:
        component = "diffusion" if self.modality in MODALITIES else COMPONENTS[self.disaggregation_mode]
        return self.endpoint or f"{self.namespace}.{component}.generate"


class TrtllmWorkerSettings(TensorSettings, StepTimesSettings, TrtllmSettings):
    """A worker process with TensorRT-LLM."""

    panel: ClassVar[str] = "TensorRT-LLM"

    engine_name: ClassVar[str] = "trtllm"

    tensor_transport: Literal["none", "zmq", "nixl"] = Field(
        "none",
        description=(
            "Receive embeddings as handles on one machine (none, trtllm), in messages (zmq), or with NIXL "
            "(needs poolgrid[nixl])."
        ),
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
    answer_timeout_ms: ClassVar[float] = 5_000.0
    """A worker leaves the pool when a call of its engine takes longer, and returns when it answers: far above steps."""
    progress_timeout_ms: float = Field(
        60_000.0,
        ge=10.0,
        le=86_400_000.0,
        description="Treat the engine as hung when its requests make no progress for this time.",
    )


def split_endpoint(endpoint: str) -> tuple[str, str, str]:
    """Return namespace, component and endpoint of a dotted name; raise ``ValueError`` when it has not three parts."""
    parts = endpoint.split(".")
    if len(parts) != 3 or not all(parts) or any(each.isspace() for each in endpoint):
        raise ValueError(f"an endpoint is {endpoint!r}, allowed is namespace.component.endpoint")
    return parts[0], parts[1], parts[2]
