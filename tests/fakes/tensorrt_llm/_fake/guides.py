# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""Guided decoding, by ``llguidance`` as in the simulated engine; grammars are in the form of the chosen backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llguidance import LLMatcher
from pydantic import BaseModel

from poolgrid.kernel.wire.requests import Sampling
from poolgrid.kernel.worker_protocol.refusal import UnsupportedError
from poolgrid.plugins.simulated.core.next_token import TokenGuide, Vocabulary
from poolgrid.plugins.simulated.guides import LazyGuides, _Guide

from ..sampling_params import GuidedDecodingParams


class BackendGuides(LazyGuides):
    """The guides of ``xgrammar``, whose grammars are EBNF, or of ``llguidance``, whose grammars are Lark's."""

    def __init__(self, path: Path, vocabulary: Vocabulary, backend: str) -> None:
        super().__init__(path, vocabulary)
        self._backend = backend

    def open(self, sampling: Sampling) -> TokenGuide:
        if self._backend != "llguidance" or sampling.guided_grammar is None:
            return super().open(sampling)
        tokenizer = self._load("a guide")._tokenizer
        made = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(sampling.guided_grammar), log_level=0)
        if made.is_error():
            raise UnsupportedError(f"Failed to compile the grammar: {made.get_error()[:200]}")
        return _Guide(made)


def guide_of(params: GuidedDecodingParams | None) -> dict[str, Any]:
    """Return a guide as fields of ``Sampling``."""
    if params is None:
        return {}
    if params.json_object:
        return {"guided_json": b'{"type":"object"}'}
    if params.json is not None:
        schema = params.json
        if isinstance(schema, BaseModel):
            schema = schema.model_json_schema()
        return {"guided_json": (schema if isinstance(schema, str) else json.dumps(schema)).encode()}
    if params.regex is not None:
        return {"guided_regex": params.regex}
    if params.grammar is not None:
        return {"guided_grammar": params.grammar}
    return {"structural_tag": params.structural_tag}
