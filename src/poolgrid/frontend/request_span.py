"""The span of a client's request, told at its end: what was asked for and what it got, in OpenTelemetry's words.

Names beginning with ``gen_ai.`` are of its conventions for generative AI. Nothing that a prompt or an answer holds is
among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from poolgrid.frontend.sequence_output import SequenceOutput
from poolgrid.process.tracing.record import TraceRecord
from poolgrid.wire.hashing import TOKEN_BYTES

PROVIDER = "poolgrid"

OPERATIONS = {"completions": "text_completion"}
"""Of endpoints; every other one is a chat."""

SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Fields of a request's sampling that the conventions have a name for, which is the same."""


def tell_request(
    trace: TraceRecord,
    *,
    endpoint: str,
    name: str,
    model: str,
    status: int,
    error: str,
    streaming: bool,
    tenant: str,
    outputs: Sequence[SequenceOutput],
    first_token_ms: float | None,
) -> None:
    """Put what is known of a request that is over on its span, and the spans of waiting and of streaming below it."""
    root = trace.root
    operation = OPERATIONS.get(endpoint, "chat")
    root.name = f"{operation} {model}" if model else operation
    told = root.attributes
    told |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.response.id": name,
        "http.response.status_code": status,
        "poolgrid.endpoint": endpoint,
        "poolgrid.streaming": streaming,
    }
    if model:
        told |= {"gen_ai.request.model": model}
    if tenant:
        told |= {"poolgrid.tenant": tenant}
    if error:
        told |= {"error.type": error}
    if outputs:
        _tell_outputs(trace, outputs)
    if first_token_ms is not None:
        told |= {"gen_ai.response.time_to_first_chunk": (first_token_ms - root.began_ms) / 1000}
        trace.add("first token", root.began_ms, first_token_ms)
        trace.add("stream" if streaming else "rest of the answer", first_token_ms)


def _tell_outputs(trace: TraceRecord, outputs: Sequence[SequenceOutput]) -> None:
    told, first = trace.root.attributes, outputs[0].request
    sampling = first.sampling
    told |= {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.choice.count": len(outputs),
        "gen_ai.response.model": first.model,
        "gen_ai.usage.input_tokens": sum(len(output.request.token_ids) for output in outputs) // TOKEN_BYTES,
        "gen_ai.usage.output_tokens": sum(output.completion_tokens for output in outputs),
        "gen_ai.usage.cache_read.input_tokens": sum(output.cached_tokens or 0 for output in outputs),
        "gen_ai.response.finish_reasons": [str(output.finish_reason or "none") for output in outputs],
        "poolgrid.worker": ",".join(
            dict.fromkeys(output.stream.worker for output in outputs if output.stream is not None)
        ),
    }
    for field in SAMPLING:
        value = getattr(sampling, field)
        if value is not None:
            told[f"gen_ai.request.{field}"] = value
