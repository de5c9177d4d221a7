"""Our logits processors as TensorRT-LLM's: one object per request, called once per step with the logits of its beams.

Rules
    1. Everything runs on the engine's CUDA stream: on another one the processors would race with the sampler.
    2. A processor works on a copy. If it raises, the logits stay as they were for it and its failure is reported; the
       processors after it and the request continue.
    3. Each beam is a row of its own, with its own tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.worker_protocol.refusal import UnsupportedError
from poolgrid.plugins.trtllm.logits_registry import (
    FailureReporter,
    LogitsProcessor,
    LogitsProcessorRegistry,
    RequestFacts,
)


class ProcessorsOfRequests:
    """Makes the processors that a worker's requests name."""

    def __init__(
        self, registry: LogitsProcessorRegistry, reporter: FailureReporter, mode: str, arguments: Mapping[str, Any]
    ) -> None:
        self._registry = registry
        self._reporter = reporter
        self._mode = mode
        self._arguments = arguments

    def check(self, request: Generate) -> None:
        """Refuse processors where the engine cannot run any."""
        reason = None
        if request.sampling.logits_processors:
            reason = reason_refused(request.stage, self._mode, self._arguments)
        if reason is not None:
            raise UnsupportedError(reason)

    def make(self, request: Generate, vocabulary_size: int) -> Any:
        """Return a request's processors as one of the engine's, ``None`` without any; raises ``RefusedError``."""
        calls = request.sampling.logits_processors
        if not calls:
            return None
        made = self._registry.make(calls, RequestFacts(len(request.token_ids) // 4, vocabulary_size))
        return engine_processor([(call.name, each) for call, each in zip(calls, made, strict=True)], self._reporter)


def engine_processor(named: Sequence[tuple[str, LogitsProcessor]], reporter: FailureReporter) -> Any:
    """Return a ``tensorrt_llm`` logits processor that runs these one after the other."""
    from tensorrt_llm.sampling_params import LogitsProcessor as EngineLogitsProcessor

    # TensorRT-LLM asks for its own base class; what there is to say is in ours, which can be pickled by name.
    if not issubclass(RequestProcessors, EngineLogitsProcessor):
        EngineLogitsProcessor.register(RequestProcessors)
    return RequestProcessors(list(named), reporter)


class RequestProcessors:
    """The processors of one request."""

    def __init__(self, named: list[tuple[str, LogitsProcessor]], reporter: FailureReporter) -> None:
        self._named = named
        self._reporter = reporter

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None = None
    ) -> None:
        """Change the logits of a request, shaped ``[beams, vocabulary]`` or ``[1, beams, vocabulary]``, in place."""
        with _on_stream(stream_ptr):
            # Indexing gives views; a reshape may give a copy, whose changes would be lost.
            rows = logits[0] if len(logits.shape) == 3 else logits
            for beam, tokens in enumerate(token_ids):
                self._process(tokens, rows[beam])

    def _process(self, token_ids: Sequence[int], row: Any) -> None:
        for name, processor in self._named:
            scratch = row.clone()
            try:
                processor(token_ids, scratch)
            except Exception:  # any exception of the operator's code: the request continues without it
                self._reporter.report(name)
            else:
                row.copy_(scratch)


def _on_stream(stream_ptr: int | None) -> contextlib.AbstractContextManager[object]:
    if stream_ptr is None:
        return contextlib.nullcontext()
    import torch

    context: contextlib.AbstractContextManager[object] = torch.cuda.stream(torch.cuda.ExternalStream(stream_ptr))
    return context


def reason_refused(stage: Stage, disaggregation_mode: str, engine_arguments: Mapping[str, Any]) -> str | None:
    """Return why a request may not have logits processors (1.2.1's feature matrix), or ``None`` when it may."""
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
