# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""The LLM API."""

from __future__ import annotations

from ..bindings.executor import KvCacheRetentionConfig
from ..disaggregated_params import DisaggregatedParams
from ..executor.request import LoRARequest
from ..executor.result import CompletionOutput, RequestOutput
from ..executor.utils import RequestError
from ..sampling_params import GuidedDecodingParams, SamplingParams
from ..scheduling_params import SchedulingParams
from .llm import LLM
from .llm_args import (
    AttentionDpConfig,
    BatchingType,
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    CudaGraphConfig,
    DraftTargetDecodingConfig,
    DynamicBatchConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    KvCacheConnectorConfig,
    LoadFormat,
    LoraConfig,
    MoeConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SchedulerConfig,
    TorchCompileConfig,
    TorchLlmArgs,
)
from .mm_encoder import MultimodalEncoder

__all__ = [
    "LLM",
    "AttentionDpConfig",
    "BatchingType",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CompletionOutput",
    "ContextChunkingPolicy",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleDecodingConfig",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "KvCacheConnectorConfig",
    "KvCacheRetentionConfig",
    "LoRARequest",
    "LoadFormat",
    "LoraConfig",
    "MTPDecodingConfig",
    "MoeConfig",
    "MultimodalEncoder",
    "NGramDecodingConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingParams",
    "TorchCompileConfig",
    "TorchLlmArgs",
]
