# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""AutoDeploy."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ...llmapi.llm import BaseLLM


class LLM(BaseLLM):
    """``LLM`` with ``backend='_autodeploy'`` already chosen."""

    def _make_args(self, backend: str, given: dict[str, Any], kwargs: dict[str, Any]) -> BaseModel:
        return super()._make_args("_autodeploy", given, kwargs)


__all__ = ["LLM"]
