"""A stand-in for TensorRT-LLM 1.2.1: its Python surface as ``contract_1_2_1.json`` has it, our simulated engine behind.

No line of it is TensorRT-LLM's. What it reproduces, and what it does not, is in ``docs/trtllm.md``.
"""

from __future__ import annotations

from .disaggregated_params import DisaggregatedParams
from .llmapi import LLM, KvCacheRetentionConfig, MultimodalEncoder, RequestOutput
from .sampling_params import GuidedDecodingParams, LogitsProcessor, SamplingParams
from .scheduling_params import SchedulingParams

__version__ = "1.2.1"

__all__ = [
    "LLM",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "KvCacheRetentionConfig",
    "LogitsProcessor",
    "MultimodalEncoder",
    "RequestOutput",
    "SamplingParams",
    "SchedulingParams",
    "__version__",
]
