# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""``MultimodalEncoder``: an ``LLM`` that runs only the encoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..executor.result import RequestOutput
from ..sampling_params import SamplingParams
from .llm import LLM

DEFAULT_MAX_NUM_TOKENS = 16384


class MultimodalEncoder(LLM):
    """Turns media into embedding handles."""

    def __init__(
        self,
        model: str | Path,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        if kwargs.get("max_num_tokens") is None:
            kwargs["max_num_tokens"] = DEFAULT_MAX_NUM_TOKENS
        kwargs["mm_encoder_only"] = True
        super().__init__(
            model,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            **kwargs,
        )

    def generate(self, inputs: Any, use_tqdm: bool = True) -> Any:  # type: ignore[override]
        if isinstance(inputs, Sequence) and not isinstance(inputs, str):
            pending = [self.generate_async(each) for each in inputs]
            return [each.result() for each in pending]
        return self.generate_async(inputs).result()

    def generate_async(  # type: ignore[override]
        self, inputs: Any, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        return super().generate_async(inputs, sampling_params)
