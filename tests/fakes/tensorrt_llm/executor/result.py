# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""Results: of one request, and of the engine's own events and statistics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..disaggregated_params import DisaggregatedParams
from ..llmapi.utils import AsyncQueue
from ..sampling_params import SamplingParams
from .utils import RequestError

if TYPE_CHECKING:
    from .._fake.executor import Executor


@dataclass(slots=True)
class Logprob:
    """Log probability of one token."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a result; grows in place."""

    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | list[float] | None = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] | list[float] | None = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: Any = None
    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids or ())

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return (self.token_ids or [])[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[Any]:
        return list((self.logprobs or [])[self._last_logprobs_len :])


@dataclass(slots=True)
class Response:
    """What the executor's thread sends to a result."""

    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] = ()
    prompt_logprobs: tuple[dict[int, Logprob], ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cut_tokens: int = 0
    """Tokens at the end that are a stop word and not part of the output."""
    cached_tokens: int | None = None
    disaggregated_params: DisaggregatedParams | None = None
    mm_embedding_handle: dict[str, Any] | None = None
    error: str | None = None
    decoding_iter: int = 0


class GenerationResult:
    """The result of one request: awaitable, and iterable with and without an event loop; always the same object."""

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        executor: Executor,
        decode: Callable[[list[int]], str] | None,
        trace_headers: Mapping[str, str] | None,
        keep_metrics: bool,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.outputs = [CompletionOutput(index) for index in range(sampling_params.n)]
        self.context_logits: Any = None
        self.mm_embedding_handle: dict[str, Any] | None = None
        self.disaggregated_params: DisaggregatedParams | None = None
        self.cached_tokens = 0
        self.decoding_iter = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[str, float] = {}
        self.trace_headers = trace_headers
        self.queue = AsyncQueue()
        self.queue.bind()
        self._executor = executor
        self._decode = decode
        self._keep_metrics = keep_metrics
        self._arrival = time.monotonic()
        self._first_token: float | None = None
        self._open = sampling_params.n
        self._done = False
        self._aborted = False

    def __repr__(self) -> str:
        names = ("request_id", "prompt", "prompt_token_ids", "outputs", "finished", "mm_embedding_handle")
        return f"RequestOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def request_id(self) -> int:
        return self.id

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        """Ask the executor to cancel; returns before anything happens."""
        self._aborted = True
        self._executor.cancel(self.id)

    def aborted(self) -> bool:
        return self._aborted

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end. The timeout is accepted and, as in 1.2.1, not honoured."""
        while not self._done:
            self._handle(self.queue.get_sync())
        return self

    async def aresult(self) -> GenerationResult:
        while not self._done:
            self._handle(await self.queue.get())
        return self

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[GenerationResult]:
        return self

    def __next__(self) -> GenerationResult:
        if self._done:
            raise StopIteration
        self._handle(self.queue.get_sync())
        return self

    def __aiter__(self) -> AsyncIterator[GenerationResult]:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        self._handle(await self.queue.get())
        return self

    def _handle(self, response: Response) -> None:
        if response.error is not None:
            self._done = True
            raise RequestError(response.error)
        self._take(response)
        # Whoever reads a result meets what befell the engine meanwhile, and shuts it down.
        self._executor.meet_background_errors(self._executor.shutdown)

    def _take(self, response: Response) -> None:
        for output in self.outputs:
            output._last_text_len = len(output.text)
            output._last_token_ids_len = len(output.token_ids or ())
            output._last_logprobs_len = len(output.logprobs or ())
        output = self.outputs[response.index]
        now = time.monotonic()
        if response.token_ids and self._first_token is None:
            self._first_token = now
        assert output.token_ids is not None
        output.token_ids += response.token_ids
        if response.cut_tokens:
            # May take back tokens that were handed out before, as a stop word's first tokens are.
            del output.token_ids[-response.cut_tokens :]
            output._last_token_ids_len = min(output._last_token_ids_len, len(output.token_ids))
        if response.logprobs:
            output.logprobs = [*(output.logprobs or []), *response.logprobs]
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(
                next(iter(each.values())).logprob for each in response.logprobs
            )
        if response.prompt_logprobs:
            output.prompt_logprobs = list(response.prompt_logprobs)
        if self._decode is not None and self.sampling_params.detokenize:
            output.text = self._decode(output.token_ids)
        if response.cached_tokens is not None:
            self.cached_tokens = response.cached_tokens
        if response.mm_embedding_handle is not None:
            self.mm_embedding_handle = response.mm_embedding_handle
        if response.disaggregated_params is not None:
            self.disaggregated_params = output.disaggregated_params = response.disaggregated_params
        self.decoding_iter = max(self.decoding_iter, response.decoding_iter)
        if response.finish_reason is None:
            return
        output.finish_reason = response.finish_reason
        output.stop_reason = response.stop_reason
        self._open -= 1
        if self._open:
            return
        self._done = True
        if self.decoding_iter:
            self.avg_decoded_tokens_per_iter = output.length / self.decoding_iter
        if self._keep_metrics:
            first = self._first_token or now
            self.metrics_dict = {
                "ttft": first - self._arrival,
                "tpot": (now - first) / max(1, output.length - 1),
                "e2e": now - self._arrival,
                "request_queue_time": 0.0,
                "arrival_timestamp": self._arrival,
            }


class RequestOutput(GenerationResult):
    """What ``generate_async`` returns."""
