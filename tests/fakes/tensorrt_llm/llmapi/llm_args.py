"""The arguments of ``LLM``, as 1.2.1 has them: pydantic models that forbid unknown keys.

Annotations that need torch, MPI or a tokenizer are ``Any`` here. Building the real ones touches the GPU; these do not.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator


class StrictBaseModel(BaseModel):
    """Refuses what it does not know."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, populate_by_name=True)


class CapacitySchedulerPolicy(StrEnum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class ContextChunkingPolicy(StrEnum):
    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class BatchingType(StrEnum):
    STATIC = "STATIC"
    INFLIGHT = "INFLIGHT"


class LoadFormat(Enum):
    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


class SamplerType(StrEnum):
    TRTLLMSampler = "TRTLLMSampler"
    TorchSampler = "TorchSampler"
    auto = "auto"


class KvCacheConfig(StrictBaseModel):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = Field(None, min_length=1)
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = Field(0.9, ge=0, le=1)
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = Field(0, ge=0)
    dtype: str = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    tokens_per_block: int = 32

    @field_validator("max_attention_window")
    @classmethod
    def _positive(cls, windows: list[int] | None) -> list[int] | None:
        if windows is not None and any(each <= 0 for each in windows):
            raise ValueError("kv_cache_config.max_attention_window values must be positive")
        return windows


class DynamicBatchConfig(StrictBaseModel):
    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int


class SchedulerConfig(StrictBaseModel):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


class CacheTransceiverConfig(StrictBaseModel):
    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = Field(None, gt=0)
    kv_transfer_sender_future_timeout_ms: int | None = Field(1000, gt=0)


class CudaGraphConfig(StrictBaseModel):
    batch_sizes: list[int] | None = None
    max_batch_size: int = Field(0, ge=0)
    enable_padding: bool = False

    @model_validator(mode="after")
    def _agree(self) -> CudaGraphConfig:
        if self.batch_sizes is not None:
            self.batch_sizes = sorted(self.batch_sizes)
            if self.max_batch_size and self.batch_sizes != _graph_batches(self.max_batch_size, self.enable_padding):
                raise ValueError(
                    "Please don't set both cuda_graph_config.batch_sizes and cuda_graph_config.max_batch_size."
                )
        return self


def _graph_batches(maximum: int, padding: bool) -> list[int]:
    small = [1, 2, 4] + [8 * each for each in range(1, 17)] if padding else [*range(1, 32), 32, 64, 128]
    sizes = small + [2**each for each in range(8, maximum.bit_length())]
    sizes = [each for each in sizes if each <= maximum]
    return sizes if sizes[-1] == maximum else [*sizes, maximum]


class MoeLoadBalancerConfig(StrictBaseModel):
    num_slots: int | None = None
    initial_global_assignments: dict[int, list[int]] | None = None
    layer_updates_per_iter: Any = None


class MoeConfig(StrictBaseModel):
    backend: Literal["CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = "CUTLASS"
    max_num_tokens: int | None = None
    load_balancer: MoeLoadBalancerConfig | dict[str, Any] | str | None = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class AttentionDpConfig(StrictBaseModel):
    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10


class Nvfp4GemmConfig(StrictBaseModel):
    allowed_backends: list[Literal["cutlass", "cublaslt", "cutedsl", "cuda_core"]] = Field(
        default=["cutlass", "cublaslt", "cuda_core"], min_length=1
    )


class KvCacheConnectorConfig(StrictBaseModel):
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


class PeftCacheConfig(StrictBaseModel):
    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float = 0.02
    host_cache_size: int = 1073741824
    lora_prefetch_dir: str | None = None


class TorchCompileConfig(StrictBaseModel):
    enable_fullgraph: bool = True
    enable_inductor: bool = False
    enable_piecewise_cuda_graph: bool = False
    capture_num_tokens: list[int] | None = None
    enable_userbuffers: bool = True
    max_num_streams: int = Field(1, ge=1)


class LoraConfig(StrictBaseModel):
    lora_dir: list[str] = []
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = []
    trtllm_modules_to_hf_modules: dict[str, str] = {}
    max_loras: int | None = None
    max_cpu_loras: int | None = None


class DecodingBaseConfig(StrictBaseModel):
    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | Path | None = Field(
        None, validation_alias=AliasChoices("speculative_model", "speculative_model_dir")
    )
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_window: int | None = Field(None, ge=0)
    acceptance_length_threshold: float | None = Field(None, ge=0)
    allow_advanced_sampling: bool = False

    @model_validator(mode="after")
    def _schedule(self) -> DecodingBaseConfig:
        if self.draft_len_schedule and self.draft_len_schedule.get(1) != self.max_draft_len:
            raise ValueError("draft_len_schedule must map batch size 1 to max_draft_len")
        return self


class EagleDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["Eagle"] = "Eagle"
    eagle_choices: list[list[int]] | None = None
    greedy_sampling: bool | None = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool | None = False
    dynamic_tree_max_topK: int | None = None  # noqa: N815 - its real name
    num_eagle_layers: int | None = None
    max_non_leaves_per_layer: int | None = None
    eagle3_one_model: bool | None = True
    eagle3_layers_to_capture: set[int] | None = None
    eagle3_model_arch: str = "llama3"

    @model_validator(mode="after")
    def _required(self) -> EagleDecodingConfig:
        if self.max_draft_len is None:
            raise ValueError("max_draft_len is required for Eagle")
        if self.speculative_model is None:
            raise ValueError("Draft model must be provided for Eagle")
        return self


class MTPDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["MTP"] = "MTP"
    num_nextn_predict_layers: int = 1
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True
    num_nextn_predict_layers_from_model_config: int = 1
    begin_thinking_phase_token: int = 128798
    end_thinking_phase_token: int = 128799


class NGramDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["NGram"] = "NGram"
    max_matching_ngram_size: int = 0
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


class DraftTargetDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["DraftTarget"] = "DraftTarget"


SpeculativeConfig = Annotated[
    EagleDecodingConfig | MTPDecodingConfig | NGramDecodingConfig | DraftTargetDecodingConfig,
    Field(discriminator="decoding_type"),
]


class RocketSparseAttentionConfig(StrictBaseModel):
    algorithm: Literal["rocket"] = "rocket"
    window_size: int = 32
    kernel_size: int = 63
    topr: int = 128
    topk: int = 64
    prompt_budget: int = 2048
    page_size: int = 4
    kt_cache_dtype: str = "float8_e5m2"


class DeepSeekSparseAttentionConfig(StrictBaseModel):
    algorithm: Literal["dsa"] = "dsa"
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    index_topk: int | None = None
    indexer_max_chunk_size: int | None = None
    skip_indexer_for_short_seqs: bool = True


class TorchLlmArgs(StrictBaseModel):
    model: str | Path
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    custom_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    enable_lm_head_tp_in_adp: bool = False
    pp_partition: list[int] | None = None
    cp_config: dict[str, Any] | None = Field(default_factory=dict)
    load_format: str | LoadFormat = LoadFormat.AUTO
    fail_fast_on_attention_window_too_large: bool = False
    enable_lora: bool = False
    lora_config: LoraConfig | None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    peft_cache_config: PeftCacheConfig | None = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    cache_transceiver_config: CacheTransceiverConfig | None = None
    sparse_attention_config: RocketSparseAttentionConfig | DeepSeekSparseAttentionConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_beam_width: int | None = None
    max_num_tokens: int | None = 8192
    gather_generation_logits: bool = False
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    decoding_config: Any = None
    mpi_session: Any = Field(None, alias="_mpi_session", exclude=True)
    otlp_traces_endpoint: str | None = None
    backend: str | None = None
    return_perf_metrics: bool = False
    orchestrator_type: Literal["rpc", "ray"] | None = None
    env_overrides: dict[str, str] | None = None
    garbage_collection_gen0_threshold: int = 20000
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    attention_dp_config: AttentionDpConfig | None = None
    disable_overlap_scheduler: bool = False
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    nvfp4_gemm_config: Nvfp4GemmConfig = Field(default_factory=Nvfp4GemmConfig)
    attn_backend: str = "TRTLLM"
    sampler_type: str | SamplerType = SamplerType.auto
    sampler_force_async_worker: bool = False
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    print_iter_log: bool = False
    perf_metrics_max_requests: int = 0
    batch_wait_timeout_ms: float = Field(0, ge=0)
    batch_wait_timeout_iters: int = Field(0, ge=0)
    batch_wait_max_tokens_ratio: float = Field(0, ge=0, le=1)
    torch_compile_config: TorchCompileConfig | None = None
    enable_autotuner: bool = True
    enable_layerwise_nvtx_marker: bool = False
    enable_min_latency: bool = False
    stream_interval: int = Field(1, gt=0)
    force_dynamic_quantization: bool = False
    allreduce_strategy: (
        Literal["AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"]
        | None
    ) = "AUTO"
    checkpoint_loader: Any = None
    checkpoint_format: str | None = None
    kv_connector_config: KvCacheConnectorConfig | None = None
    mm_encoder_only: bool = False
    ray_worker_extension_cls: str | None = None
    ray_placement_config: Any = None
    enable_sleep: bool = False
    disable_flashinfer_sampling: bool = False
    max_stats_len: int = 1000

    @field_validator("env_overrides", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return {key: str(each) for key, each in value.items()} if isinstance(value, dict) else value

    @field_validator("load_format", mode="before")
    @classmethod
    def _load_format(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value.upper() not in LoadFormat.__members__:
                raise ValueError(f"Invalid LoadFormat: {value}")
            return LoadFormat[value.upper()]
        return value

    @model_validator(mode="after")
    def _defaults(self) -> TorchLlmArgs:
        if self.max_batch_size is None:
            self.max_batch_size = 2048
        if self.max_beam_width is None:
            self.max_beam_width = 1
        if self.backend is None:
            self.backend = "pytorch"
        for name in ("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"):
            if getattr(self, name) is None:
                setattr(self, name, -1)
        if self.checkpoint_format is None and self.checkpoint_loader is None:
            self.checkpoint_format = "HF"
        return self


TRTLLM_ENGINE_ONLY = frozenset({"build_config"})
"""Arguments of the TensorRT backend that the PyTorch backend refuses by name."""


class AutoDeployConfig(StrictBaseModel):
    """AutoDeploy's arguments, as a file of the 1.2 era has them."""

    model: str | Path
    model_factory: str = "AutoModelForCausalLM"
    model_kwargs: dict[str, Any] = {}
    skip_loading_weights: bool = False
    tokenizer: str | None = None
    tokenizer_kwargs: dict[str, Any] = {}
    skip_tokenizer_init: bool = False
    disable_overlap_scheduler: bool = False
    world_size: int = Field(1, ge=0)
    runtime: Literal["demollm", "trtllm"] = "trtllm"
    device: str = Field("cuda", frozen=True)
    kv_cache_dtype: str = "auto"
    kv_cache_config: KvCacheConfig = Field(default_factory=lambda: KvCacheConfig(copy_on_partial_reuse=False))
    max_beam_width: int = Field(1, frozen=True)
    enable_chunked_prefill: bool = False
    mode: Literal["graph", "transformers"] = "graph"
    transforms: dict[str, Any] = {}
    attn_backend: str = "flashinfer"
    free_mem_ratio: float = 0.0
    compile_backend: str = "torch-compile"
    cuda_graph_batch_sizes: list[int] | None = None
    max_input_len: int = 1024
    max_num_tokens: int | None = None
    max_seq_len: int = 512
    max_batch_size: int = 8
    attn_page_size: int = 64


_NESTED_MERGED = "kv_cache_config"


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any], extra_llm_api_options: str | None = None
) -> dict[str, Any]:
    """The extra dict wins; only ``kv_cache_config`` is merged key by key."""
    merged = {**llm_args, **llm_args_dict}
    base = llm_args.get(_NESTED_MERGED)
    extra = llm_args_dict.get(_NESTED_MERGED)
    if base is not None and extra is not None:
        known = base.model_dump(exclude_unset=True) if isinstance(base, BaseModel) else dict(base)
        given = extra.model_dump(exclude_unset=True) if isinstance(extra, BaseModel) else dict(extra)
        merged[_NESTED_MERGED] = {**known, **given}
    converters: dict[str, type[BaseModel]] = {
        "kv_cache_config": KvCacheConfig,
        "moe_config": MoeConfig,
        "nvfp4_gemm_config": Nvfp4GemmConfig,
        "attention_dp_config": AttentionDpConfig,
        "lora_config": LoraConfig,
    }
    for name, kind in converters.items():
        if isinstance(merged.get(name), dict):
            merged[name] = kind(**merged[name])
    speculative = merged.get("speculative_config")
    if isinstance(speculative, dict):
        kinds = {
            "Eagle": EagleDecodingConfig,
            "MTP": MTPDecodingConfig,
            "NGram": NGramDecodingConfig,
            "DraftTarget": DraftTargetDecodingConfig,
        }
        if speculative.get("decoding_type") not in kinds:
            raise ValueError(f"Invalid decoding type: {speculative.get('decoding_type')}")
        merged["speculative_config"] = kinds[speculative["decoding_type"]](**speculative)
    return merged


def update_llm_args_with_extra_options(llm_args: dict[str, Any], extra_llm_api_options: str | None) -> dict[str, Any]:
    """The same from a YAML file; no path changes nothing."""
    if extra_llm_api_options is None:
        return llm_args
    with open(extra_llm_api_options, encoding="utf-8") as file:
        loaded = yaml.safe_load(file)
    return update_llm_args_with_extra_dict(llm_args, loaded or {}, extra_llm_api_options)
