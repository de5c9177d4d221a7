"""The requests that a TensorRT-LLM engine has, in the engine's thread: given in, followed, aborted.

Rules:

1. The results live in the engine's thread. What its results bring waits, as
   values, until it is taken on the worker's loop: one wake-up for all that came meanwhile, and one value for each
   request. The results themselves never leave the thread.
2. A request has one task, which does nothing but notice that its result has grown. ``OutputCursor`` remembers what was
   taken.
3. A leg whose KV comes from another worker is aborted after its first output: an abort during the transfer leaks the
   blocks. What is finished is not aborted: the engine has forgotten it, and would only complain.
4. Preparing media takes long: where the installed version can do so separately (``LLM.preprocess``), it happens outside
   this thread, decoding images always does.
5. Where embeddings travel as bytes (``shared_tensors``), an encode leg's handles are opened when its result is
   complete, and handles of what was fetched for a leg are made before the engine gets it; both in a thread.
6. A request with media that continues from another worker keeps its output only if the engine's own tokens of the
   longer prompt end with it; else it is refused.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from poolgrid.kernel.wire import codec as wire_codec
from poolgrid.kernel.wire.errors import WireError
from poolgrid.kernel.wire.hashing import pack_tokens, unpack_tokens
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import Generate, TokenLogprobs
from poolgrid.kernel.worker_protocol.engine_numbers import count_of
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnableError
from poolgrid.kernel.worker_protocol.tensor_transfer import Tensor
from poolgrid.plugins.trtllm.calls import RequestPlan, TrtllmCalls
from poolgrid.plugins.trtllm.core import disaggregated_params as codec
from poolgrid.plugins.trtllm.core.outputs import GOES_ON, OutputCursor, prompt_logprobs
from poolgrid.plugins.trtllm.library import REQUEST_ERRORS, is_alive
from poolgrid.plugins.trtllm.shared_tensors import HostTensor, SharedHandles, SharedTensors
from poolgrid.server.process.tasks import detached
from poolgrid.server.workers.engines.lifecycle.engine_thread import EngineThread

log = logging.getLogger(__name__)


MediaInputs = Callable[[Generate, bool, int | None], Any]
"""Makes the inputs of ``generate_async`` of a request with media (``media.load_media``); runs in a thread."""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended in the engine."""

    reason: str | None = None
    """The engine's word; ``None`` with an error."""
    error: BaseException | None = None
    at_call: bool = False
    """The error came before the engine had the request."""
    alive: bool = True
    """Whether the engine lived when the error was met."""
    params: bytes | None = None
    """What the next leg needs."""
    embeddings: tuple[HostTensor, ...] = ()
    """What the next leg is to fetch."""
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Growth:
    """What is new of one request."""

    serial: int
    tokens: bytes = b""
    """u32 little-endian."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int | None = None
    """With the first tokens."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """With the first tokens."""
    end: RequestEnd | None = None

    def then(self, later: Growth) -> Growth:
        logprobs = self.logprobs if later.logprobs is None else (self.logprobs or ()) + later.logprobs
        return replace(self, tokens=self.tokens + later.tokens, logprobs=logprobs, end=later.end)


@dataclass(slots=True, eq=False)
class _Leg:
    """A request that the engine has, or is about to get."""

    serial: int
    request: Generate
    plan: RequestPlan | None
    """``None`` of an encode leg."""
    context_only: bool
    cursor: OutputCursor
    fetched: Sequence[Tensor] = ()
    """Its embeddings, where they came as bytes."""
    shared: SharedHandles | None = None
    """Handles of them; kept as long as the engine may open them."""
    copies: tuple[HostTensor, ...] = ()
    """What an encode leg's handles stood for."""
    result: Any = None
    task: asyncio.Task[None] | None = None
    began: bool = False
    ended: bool = False
    error: BaseException | None = None
    aborting: bool = False
    aborted: bool = False

    @property
    def transfers(self) -> bool:
        return self.request.stage is Stage.DECODE


class Generations:
    """The requests of one engine."""

    def __init__(
        self,
        thread: EngineThread,
        calls: TrtllmCalls,
        load_media: MediaInputs | None,
        miscounted: Callable[[int, int], None],
        shared_tensors: SharedTensors | None = None,
    ) -> None:
        """``miscounted`` is told of prompts with media: the tokens that a router counted, and the engine's.

        ``shared_tensors``: embeddings travel as bytes, not as handles.
        """
        self._shared_tensors = shared_tensors
        self._thread = thread
        self._calls = calls
        self._grown: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._untaken: dict[int, Growth] = {}
        """What was not taken yet, by serial; guarded by the lock."""
        self._load_media = load_media
        self._miscounted = miscounted
        self._preprocess = getattr(calls.llm, "preprocess", None)
        self._legs: dict[int, _Leg] = {}
        self._touched: dict[_Leg, None] = {}
        self._flushing = False

    # -- from the worker's loop ----------------------------------------------------------------------------------------

    @property
    def takes_media(self) -> bool:
        return self._load_media is not None

    def observe(self, grown: Callable[[], None]) -> None:
        """Call ``grown`` on the worker's loop when there is something to take."""
        self._grown = grown

    def submit(
        self,
        serial: int,
        request: Generate,
        plan: RequestPlan | None,
        context_only: bool,
        fetched: Sequence[Tensor] = (),
    ) -> None:
        """Give a request to the engine; its growth and its end are told under ``serial``."""
        self._thread.post(self._begin, serial, request, plan, context_only, fetched)

    def abort(self, serial: int) -> None:
        """Stop a request as soon as the engine allows it; its end is told. What has ended is left alone."""
        self._thread.post(self._abort_leg, serial)

    async def close(self) -> None:
        await self._thread.run(self._close, "end of the requests")

    def take(self) -> list[Growth]:
        """Return what is new since the last call; from any thread."""
        with self._lock:
            untaken, self._untaken = self._untaken, {}
        return list(untaken.values())

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    def _begin(
        self, serial: int, request: Generate, plan: RequestPlan | None, context_only: bool, fetched: Sequence[Tensor]
    ) -> None:
        leg = _Leg(serial, request, plan, context_only, OutputCursor(request.sampling.logprobs), fetched)
        self._legs[serial] = leg
        if request.multimodal is not None:
            leg.task = detached(self._prepare(leg), f"request {request.request_id}")
            return
        try:
            self._start(leg, list(unpack_tokens(request.token_ids)))
        except Exception as error:
            self._end(leg, error)
        else:
            leg.task = detached(self._follow(leg), f"request {request.request_id}")

    def _abort_leg(self, serial: int) -> None:
        leg = self._legs.get(serial)
        if leg is None or leg.aborting:
            return
        leg.aborting = True
        if leg.result is None:
            assert leg.task is not None, "what is being prepared has a task"
            leg.task.cancel()
            self._end(leg, None)
        elif leg.began or not leg.transfers:
            self._abort(leg)

    async def _close(self) -> None:
        tasks = [leg.task for leg in self._legs.values() if leg.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- one request ---------------------------------------------------------------------------------------------------

    def _start(self, leg: _Leg, inputs: Any) -> None:
        """Call the engine; raises what it raises."""
        handles = () if leg.shared is None else leg.shared.handles
        try:
            leg.result = self._calls.generate(leg.request, leg.plan, inputs, leg.context_only, handles)
        except self._calls.library.request_error:
            # A fault of the engine's own threads is raised at the next request of any kind; one that is the request's
            # own is raised again.
            leg.result = self._calls.generate(leg.request, leg.plan, inputs, leg.context_only, handles)

    async def _prepare(self, leg: _Leg) -> None:
        """Load a request's media outside the loop, give it to the engine, follow it."""
        assert self._load_media is not None
        request = leg.request
        emitted = _emitted(request)
        try:
            has_handles = request.disaggregated_params is not None and request.stage is not Stage.ENCODE
            seed = None if leg.plan is None else leg.plan.hash_seed
            inputs = await asyncio.to_thread(self._load_media, request, has_handles, seed)
            if leg.fetched:
                leg.shared = await asyncio.to_thread(self._share, leg)
            if emitted:
                inputs["prompt"] += self._calls.text_of(emitted)
            if self._preprocess is not None and leg.plan is not None and not has_handles:
                sampling = self._calls.sampling_params(request, leg.plan)
                inputs = await asyncio.to_thread(self._preprocess, inputs, sampling)
            self._start(leg, inputs)
            self._compare_length(leg)
            if emitted and pack_tokens(leg.result.prompt_token_ids[-(len(emitted) // 4) :]) != emitted:
                self._abort(leg)
                raise UnableError(
                    f"the output has begun on another worker ({len(emitted) // 4} tokens), and behind media "
                    "TensorRT-LLM takes text, which it reads as other tokens: it would not continue from there"
                )
        except Exception as error:
            self._end(leg, error)
        else:
            await self._follow(leg)

    def _share(self, leg: _Leg) -> SharedHandles:
        assert self._shared_tensors is not None, "set where it fetches"
        fetched, leg.fetched = leg.fetched, ()
        return self._shared_tensors.share(codec.carried_tensors(leg.request.disaggregated_params or b""), fetched)

    def _compare_length(self, leg: _Leg) -> None:
        """Count a prompt that the engine made longer or shorter than its router assumed."""
        request = leg.request
        if request.stage is Stage.ENCODE or request.multimodal is None:
            return
        believed, made = len(request.token_ids) // 4, len(leg.result.prompt_token_ids)
        if believed == made:
            return
        if all(item.token_count for item in wire_codec.multimodal.decode(request.multimodal).items):
            self._miscounted(believed, made)

    async def _follow(self, leg: _Leg) -> None:
        try:
            async for _ in leg.result:
                self._touch(leg)
            if leg.request.stage is Stage.ENCODE and self._shared_tensors is not None and not leg.aborting:
                made = leg.result.disaggregated_params
                leg.copies = await asyncio.to_thread(self._shared_tensors.copy_out, made)
        except Exception as error:
            self._end(leg, error)
        else:
            self._end(leg, None)

    def _abort(self, leg: _Leg) -> None:
        if leg.aborted or leg.result is None or leg.result.finished:
            return
        leg.aborted = True
        try:
            leg.result.abort()
        except Exception as error:
            log.warning("request %s could not be aborted: %r", leg.request.request_id, error)

    # -- what is new ---------------------------------------------------------------------------------------------------

    def _end(self, leg: _Leg, error: BaseException | None) -> None:
        leg.error = leg.error or error
        leg.ended = True
        self._touch(leg)

    def _touch(self, leg: _Leg) -> None:
        self._touched[leg] = None
        if not self._flushing:
            # In the next turn: whatever else this turn brings is told with it.
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        touched, self._touched = self._touched, {}
        grown: list[Growth] = []
        for leg in touched:
            if self._legs.get(leg.serial) is not leg:
                continue
            try:
                growth = self._read(leg)
            except Exception as error:
                log.exception("request %s: its output could not be read", leg.request.request_id)
                self._abort(leg)
                growth = Growth(
                    leg.serial, end=RequestEnd(error=UnreadableError(f"its output could not be read: {error!r}"))
                )
            if growth.end is not None:
                del self._legs[leg.serial]
            if growth.end is not None or growth.tokens:
                grown.append(growth)
        if not grown:
            return
        with self._lock:
            told = bool(self._untaken)
            for growth in grown:
                before = self._untaken.get(growth.serial)
                self._untaken[growth.serial] = growth if before is None else before.then(growth)
        if not told:
            self._thread.tell(self._grown)

    def _read(self, leg: _Leg) -> Growth:
        result = leg.result
        tokens = b""
        logprobs: tuple[TokenLogprobs, ...] | None = None
        cached_tokens: int | None = None
        of_prompt: tuple[TokenLogprobs, ...] | None = None
        output = result.outputs[0] if result is not None and result.outputs else None
        if output is not None and leg.request.stage is not Stage.ENCODE:
            tokens, logprobs = leg.cursor.take(output)
        if tokens and not leg.began:
            leg.began = True
            prompt_tokens = len(leg.request.token_ids) // 4
            said = None if leg.transfers else count_of(result.cached_tokens)
            cached_tokens = 0 if said is None else min(said, prompt_tokens)
            of_prompt = self._prompt_logprobs(leg, output)
        if leg.aborting and leg.began and not leg.ended:
            self._abort(leg)  # its KV is here now
        end = self._ending(leg, output) if leg.ended else None
        return Growth(leg.serial, tokens, logprobs, cached_tokens, of_prompt, end)

    def _ending(self, leg: _Leg, output: Any) -> RequestEnd:
        if leg.error is not None:
            request_error = isinstance(leg.error, (RefusedError, self._calls.library.request_error, *REQUEST_ERRORS))
            alive = True if isinstance(leg.error, RefusedError) else is_alive(self._calls.llm)
            return RequestEnd(error=leg.error, at_call=leg.result is None and request_error, alive=alive)
        reason = None if output is None else output.finish_reason
        metrics = dict(getattr(leg.result, "metrics_dict", None) or {})
        if leg.aborting:
            return RequestEnd("cancelled", metrics=metrics)
        params: bytes | None = None
        if leg.request.stage is Stage.ENCODE or (leg.context_only and reason in GOES_ON):
            made = leg.result.disaggregated_params
            if made is None:
                return RequestEnd(error=UnreadableError("the engine returned no disaggregated params"))
            try:
                without = codec.HANDLE_FIELDS if leg.copies else ()
                machine = self._calls.machine if made.multimodal_embedding_handles and not without else ""
                params = codec.encode(made, self._engine_prompt(leg), machine, without)
            except (TypeError, WireError) as error:
                return RequestEnd(error=UnableError(f"what the next leg needs cannot travel: {error}"))
        return RequestEnd(reason, params=params, embeddings=leg.copies, metrics=metrics)

    @staticmethod
    def _engine_prompt(leg: _Leg) -> bytes | None:
        """Return the token ids that the engine made of a prompt with media."""
        if leg.request.multimodal is None or leg.request.stage is Stage.ENCODE:
            return None
        return pack_tokens(leg.result.prompt_token_ids)

    @staticmethod
    def _prompt_logprobs(leg: _Leg, output: Any) -> tuple[TokenLogprobs, ...] | None:
        alternatives = leg.request.sampling.prompt_logprobs
        if alternatives is None or leg.transfers:
            return None  # the prefill leg told them
        return prompt_logprobs(unpack_tokens(leg.request.token_ids), output.prompt_logprobs or (), alternatives)


class UnreadableError(RuntimeError):
    """What the engine gave is not what it should have given."""


def _emitted(request: Generate) -> bytes:
    """Return the tokens of a request with media that the client has already."""
    count = request.routing.emitted_tokens
    return request.token_ids[-4 * count :] if count and request.stage is not Stage.ENCODE else b""
