"""A stand-in for TensorRT-LLM: its Python surface as ``contract_1_2_1.json`` has it, our simulated engine behind.

It pretends to be 1.2.1 unless ``TRTLLM_FAKE`` names another version (``_fake/profile.py``).

No line of it is TensorRT-LLM's. ``CONTRIBUTING.md`` says how to use it.
"""

from __future__ import annotations

from ._fake.profile import PROFILE
from .disaggregated_params import DisaggregatedParams
from .llmapi import LLM, KvCacheRetentionConfig, MultimodalEncoder, RequestOutput
from .sampling_params import GuidedDecodingParams, LogitsProcessor, SamplingParams
from .scheduling_params import SchedulingParams

__version__ = PROFILE.version

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
