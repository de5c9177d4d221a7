"""Requests and results."""

from __future__ import annotations

from .request import LoRARequest
from .result import CompletionOutput, GenerationResult, IterationResult, Logprob
from .utils import RequestError

__all__ = ["CompletionOutput", "GenerationResult", "IterationResult", "LoRARequest", "Logprob", "RequestError"]
