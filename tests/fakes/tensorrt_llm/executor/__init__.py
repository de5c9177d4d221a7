"""Requests and results."""

from __future__ import annotations

from .request import LoRARequest
from .result import CompletionOutput, GenerationResult, Logprob
from .utils import RequestError

__all__ = ["CompletionOutput", "GenerationResult", "LoRARequest", "Logprob", "RequestError"]
