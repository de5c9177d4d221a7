"""Where TensorRT-LLM 1.2.1 can run logits processors, and where it says it cannot.

Source: the feature combination matrix of 1.2.1: not with disaggregated serving, not with MTP or EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poolgrid.wire.identifiers import Stage


def reason_refused(stage: Stage, disaggregation_mode: str, engine_arguments: Mapping[str, Any]) -> str | None:
    """Return why a request may not have logits processors, or ``None`` when it may."""
    if disaggregation_mode != "prefill_and_decode" or stage is not Stage.WHOLE:
        return (
            "logits processors do not work with disaggregated serving in TensorRT-LLM 1.2.1: send the request to an "
            "aggregated pool"
        )
    speculative = engine_arguments.get("speculative_config")
    if speculative is not None:
        kind = speculative.get("decoding_type") if isinstance(speculative, Mapping) else None
        return (
            f"logits processors do not work with speculative decoding ({kind or type(speculative).__name__}) in "
            "TensorRT-LLM 1.2.1: send the request to a pool without it"
        )
    return None
