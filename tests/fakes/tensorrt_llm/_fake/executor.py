# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""The engine behind ``LLM``: one simulated engine per attention-DP rank, stepped by a thread of its own.

Callers talk to the thread through an inbox; it answers through the results' queues. Everything that the simulated
engines and the event recorders know is touched by that thread alone, except between ``pause`` and ``resume``, when a
test may look.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import RequestStarted
from poolgrid.kernel.wire.hashing import block_hashes, hash_seed, pack_tokens, sequence_hashes, unpack_tokens
from poolgrid.kernel.wire.multimodal import MediaItem, MediaKind, MultimodalInput, digest_media, media_hashes_of_blocks
from poolgrid.kernel.wire.requests import FinishReason, Generate, KvRetention, Routing, Sampling, TokenDelta
from poolgrid.kernel.worker_protocol.refusal import RefusedError
from poolgrid.plugins.simulated.core.engine import SimulatedEngine, SimulatedLimits
from poolgrid.plugins.simulated.core.next_token import GeneratedTokens, Vocabulary
from poolgrid.server.workers.timing import PolynomialTiming, ScaledTiming, TimingModel

from ..disaggregated_params import DisaggregatedParams
from ..executor.result import Logprob, Response
from ..llmapi.utils import AsyncQueue
from . import opaque_state
from .behaviour import Behaviour
from .cache_events import EventBuffer, RankEvents, Tenant, groups_of
from .event_publisher import RankPublisher
from .guides import BackendGuides
from .pictures import Picture
from .profile import PROFILE
from .second_cache_manager import BlockNames, spoken
from .world import Proxy

_log = logging.getLogger("tensorrt_llm")

IDENTIFIER_OF_NO_REUSE = "no-reuse"

DISAGGREGATED_FROM = 1 << 42
"""Ids of disaggregated requests are above all ordinary ones."""

Seen = TypeVar("Seen")


class _NoTime:
    """Steps take no time at all."""

    def prefill_ms(self, new_tokens: int) -> float:
        return 0.0

    def decode_ms(self, used_share: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of ``LLM``'s arguments decides about the simulated engine."""

    ranks: int
    attention_dp: bool
    tokens_per_block: int
    enable_block_reuse: bool
    device_blocks: int
    host_blocks: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    windows: tuple[int, ...]
    event_buffer_max_size: int
    enable_iter_perf_stats: bool
    enable_iter_req_stats: bool
    max_stats_len: int
    stream_interval: int
    kv_dtype: str
    rpc_orchestrator: bool = False
    """Requests are given in and aborted by synchronous calls too."""
    block_names: BlockNames = BlockNames.V1
    stream: Any = None
    """``KVEventsConfig`` of an engine that publishes its events by itself."""
    guided_decoding_backend: str = ""
    tokenizer: Path | None = None
    """Of the model, without which nothing can be guided."""


@dataclass(slots=True)
class Request:
    """One request as the executor sees it."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    end_id: int | None
    stop_words: dict[int, int | str]
    """Stop reason by the token that causes it."""
    include_stop: bool
    n: int
    streaming: bool
    put: Callable[[Response], Any]
    lora_name: str = ""
    lora_id: int | None = None
    tenant: Tenant = Tenant()
    salt: str = ""
    rank: int | None = None
    request_type: str | None = None
    disaggregated: DisaggregatedParams | None = None
    decode_priority: int | None = None
    retention: KvRetention | None = None
    encode: Callable[[], Response] | None = None
    media_seed: int = 0
    """Part of the sampling seed: an answer is right only if the right media took the right way."""
    prompt_logprobs: int | None = None
    priority: int = 0
    pictures: tuple[Picture, ...] = ()
    """Its media that have tokens of their own."""

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """Return its pictures as the simulated engine takes media."""
        return tuple(
            MediaItem(MediaKind.EMBEDDINGS, each.digest, "fake", digest_media(each.digest), each.start, each.length)
            for each in self.pictures
        )


@dataclass(slots=True)
class _Sequence:
    """One sequence of a request inside a simulated engine."""

    request: Request
    index: int
    rank: int
    seed: int
    prompt: tuple[int, ...]
    held: list[int] = field(default_factory=list)
    """Tokens that were not sent yet."""
    held_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    steps: int = 0
    cached_tokens: int | None = None
    told_prompt: bool = False


class Executor:
    """Runs the requests of one ``LLM``."""

    def __init__(self, shape: EngineShape, behaviour: Behaviour, proxy: Proxy | None = None) -> None:
        """``proxy``: other processes are the ranks, and take part in every iteration."""
        self.shape = shape
        self._proxy = proxy
        if proxy is not None:
            proxy.step()
        self._behaviour = behaviour
        self.events = AsyncQueue()
        self.stats = AsyncQueue()
        self.buffer = EventBuffer(
            shape.event_buffer_max_size * (shape.ranks if shape.attention_dp else 1),
            self.events.put_nowait,
            self.events.drop_oldest,
        )
        timing: TimingModel = _NoTime()
        if behaviour.speedup > 0:
            timing = ScaledTiming(PolynomialTiming(), behaviour.speedup)
        self.recorders = [
            RankEvents(
                shape.tokens_per_block,
                shape.device_blocks,
                shape.host_blocks,
                shape.windows,
                behaviour.partial_blocks_max,
                rank if shape.attention_dp else None,
            )
            for rank in range(shape.ranks)
        ]
        limits = SimulatedLimits(
            block_size=shape.tokens_per_block,
            total_kv_blocks=shape.device_blocks,
            host_kv_blocks=shape.host_blocks,
            max_batch_size=min(shape.max_batch_size, shape.max_num_tokens),
            max_num_tokens=shape.max_num_tokens,
            max_sequence_length=shape.max_seq_len,
            max_waiting_requests=1_000_000,
            kv_groups=groups_of(shape.windows),
        )
        vocabulary = Vocabulary(behaviour.vocabulary_size, 3, 2, behaviour.eos_probability)
        guides = None
        if shape.guided_decoding_backend and shape.tokenizer is not None:
            guides = BackendGuides(shape.tokenizer, vocabulary, shape.guided_decoding_backend)
        self.engines = [
            SimulatedEngine(limits, vocabulary, timing, recorder, takes_media=True, guides=guides)
            for recorder in self.recorders
        ]
        self._open: dict[int, Request] = {}
        """Requests that were given in and have not ended; guarded by ``_changed``."""
        self._sequences: list[dict[str, _Sequence]] = [{} for _ in range(shape.ranks)]
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._stopping = False
        self._running = threading.Event()
        self._running.set()
        self._idle = threading.Event()
        self.transfers_open = threading.Event()
        """While clear, KV transfers do not finish: generation requests wait, and their cancellation with them."""
        self.transfers_open.set()
        self._transferring: dict[int, Request] = {}
        self._cancelled_transfers: list[int] = []
        self._breaks_transfer = False
        """A request was cancelled, and the next transfer fails for it."""
        self._next_rank = 0
        self._iteration = 0
        self._completed = 0
        self._reused = self._missed = 0
        self._now_ms = 0.0
        self.failure: BaseException | None = None
        self.background_errors: list[str] = []
        """Faults of the threads that carry events; the next request is refused with them."""
        self.late_aborts = 0
        """Abortions of requests that had their final response, or that were never here."""
        self.lost: BaseException | None = None
        """Why a rank is dead; whoever comes to know of it shuts the executor down, and waits for the other ranks."""
        self._ranks_returned = threading.Event()
        self._ranks_returned.set()
        self._out_of_memory = False
        self._process_stopped = threading.Event()
        self._ended = threading.Event()
        self.rpc_calls = 0
        self.rpc_failures = 0
        """So many of the next calls to the engine's process fail."""
        self._wedged = False
        """Requests wait for blocks that nobody will free."""
        self.publishers: list[RankPublisher] = []
        if shape.stream is not None:
            for rank in range(shape.ranks):
                scope_of = self.recorders[rank].scope_of
                made = RankPublisher(rank, shape.stream, shape.tokens_per_block, max(shape.windows), scope_of)
                self.publishers.append(made)
        self._publish()
        self._thread = threading.Thread(target=self._run, name="fake-tensorrt-llm", daemon=True)
        self._thread.start()

    # for callers

    def submit(self, request: Request) -> None:
        with self._changed:
            over = self._stopping or self.failure is not None
            if not over:
                self._open[request.id] = request
        if over:
            request.put(Response(error="LLM is shutting down"))
            return
        self._post(lambda: self._accept(request))

    def cancel(self, request_id: int) -> None:
        if self.shape.rpc_orchestrator:
            self._wait_for_the_process()
        with self._changed:
            known = request_id in self._open
            self.late_aborts += not known
        if not known:
            # The final response took it out of the executor's books: nothing happens.
            _log.warning("Request of client_id %d is finished, cannot abort it.", request_id)
            return
        self._post(lambda: self._cancel(request_id))

    def fetch(self, queue: AsyncQueue) -> list[Any]:
        """Ask the engine's process for all items of a queue, and wait for the answer as long as it takes."""
        self._wait_for_the_process()
        self.rpc_calls += 1
        self.block_caller(self._behaviour.rpc_call_ms)
        if self.rpc_failures:
            self.rpc_failures -= 1
            raise RuntimeError("the engine's process answered the call with an error")
        return queue.take_all()

    def _wait_for_the_process(self) -> None:
        while self._process_stopped.is_set() or self._is_there(self._behaviour.stop_file):
            if self._ended.is_set():
                return
            self.block_caller(5.0)

    def block_caller(self, duration_ms: float) -> None:
        """Keep the calling thread, whichever it is, at most until the shutdown."""
        if duration_ms > 0:
            self._ended.wait(duration_ms / 1e3)

    @staticmethod
    def _is_there(path: str) -> bool:
        return bool(path) and os.path.exists(path)

    def meet_background_errors(self, shut_down: Callable[[], None]) -> None:
        """Raise what befell the engine's process since the last look, after shutting everything down.

        That is done by whoever looks, in its own thread, and waits until every rank has returned.
        """
        if self.lost is None and self._is_there(self._behaviour.lost_rank_file):
            self.lose_rank(RuntimeError("MPI worker 1 has died"), stuck=True)
        if self.lost is None:
            return
        error, self.lost = self.lost, None
        shut_down()
        raise error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping and self.failure is None

    def shutdown(self) -> None:
        self._ranks_returned.wait()
        self._ended.set()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._running.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            while self.publishers:
                self.publishers.pop().close()

    # for tests

    def pause(self) -> None:
        """Stop before the next iteration, and return once nothing runs."""
        self._running.clear()
        with self._changed:
            self._changed.notify_all()
        self._idle.wait()

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._running.set()

    def flush(self) -> None:
        """Return once everything that was posted before has been taken in."""
        taken = threading.Event()
        self._post(taken.set)
        taken.wait()

    def leak(self, blocks: int, rank: int = 0) -> None:
        """Take blocks out of use for ever, as a failed KV transfer does; what is idle is evicted for them."""
        self._post(lambda: self._leak(blocks, rank))

    def look(self, call: Callable[[], Seen]) -> Seen:
        """Return what ``call`` sees between two iterations."""
        if not self._running.is_set() or not self._thread.is_alive():
            return call()  # paused by the caller, or over
        self.pause()
        try:
            return call()
        finally:
            self.resume()

    def open_transfers(self) -> None:
        """Let KV transfers finish that ``transfers_open.clear()`` held up."""
        self.transfers_open.set()
        self._post(lambda: None)

    def run_out_of_memory(self) -> None:
        """Let the next iteration that has work run out of memory: every request is answered with an error."""

        def next_one() -> None:
            self._out_of_memory = True

        self._post(next_one)

    def stop_process(self) -> None:
        """Stop the engine's process, as a signal does: no iteration, and no call is answered, until it goes on."""
        self._process_stopped.set()
        self.pause()

    def continue_process(self) -> None:
        """Go on after ``stop_process``."""
        self._process_stopped.clear()
        self.resume()

    def lose_rank(self, error: BaseException, stuck: bool = False) -> None:
        """Let a rank die: nothing is computed any more, and nobody is told before he asks.

        With ``stuck`` the other ranks never return from their last collective call, so that a shutdown waits for ever;
        ``release_ranks`` ends that.
        """
        if stuck:
            self._ranks_returned.clear()
        self.lost = error
        self._running.clear()

    def release_ranks(self) -> None:
        """Let the ranks return that ``lose_rank`` left behind."""
        self._ranks_returned.set()

    def fail(self, error: BaseException) -> None:
        """Break the engine as a CUDA error does: every request fails, and no further one is taken."""

        def break_down() -> None:
            raise error

        self._post(break_down)

    # the thread

    def _post(self, action: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(action)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                if not self._running.is_set():
                    self._idle.set()
                    self._running.wait()
                self._idle.clear()
                with self._changed:
                    self._changed.wait_for(lambda: self._inbox or self._stopping or self._busy() or self._held())
                    if self._stopping:
                        break
                    actions, self._inbox = self._inbox, []
                if not self._running.is_set():
                    with self._changed:
                        self._inbox = actions + self._inbox
                    continue
                if self._is_there(self._behaviour.stop_file):
                    with self._changed:
                        self._inbox = actions + self._inbox
                        self._changed.wait_for(lambda: self._stopping, 0.005)
                    continue
                for action in actions:
                    action()
                self._finish_transfers()
                if self._runs_out_of_memory():
                    self._answer_all_with("CUDA out of memory. Tried to allocate 2.00 GiB.")
                    continue
                if self._proxy is not None and self._busy():
                    self._proxy.step()
                self._wedged = not self._iterate()
        except BaseException as error:
            with self._changed:
                self.failure = error
            self._end_all(f"the engine broke: {error}")
            return
        self._end_all("LLM is shutting down")

    def _held(self) -> bool:
        return not self._running.is_set()

    def _busy(self) -> bool:
        return (not self._wedged and any(engine.active_requests for engine in self.engines)) or (
            bool(self._transferring) and self.transfers_open.is_set()
        )

    def _end_all(self, reason: str) -> None:
        self._idle.set()
        with self._changed:
            requests, self._open = self._open, {}
        for request in requests.values():
            request.put(Response(error=reason))

    def _runs_out_of_memory(self) -> bool:
        if not any(self._sequences) and not self._transferring:
            return False
        due = self._out_of_memory or self._iteration + 1 in self._behaviour.out_of_memory_at
        self._out_of_memory = False
        return due

    def _answer_all_with(self, error: str) -> None:
        """End every request with an error, whoever it was that needed too much, and go on."""
        self._iteration += 1
        failed = {request.id: request for request in self._transferring.values()}
        failed |= {each.request.id: each.request for sequences in self._sequences for each in sequences.values()}
        self._transferring = {}
        self._cancelled_transfers = []
        for engine, sequences in zip(self.engines, self._sequences, strict=True):
            for name in list(sequences):
                engine.cancel(name)
            sequences.clear()
            engine.step(self._now_ms)  # what was cancelled leaves
        self._publish()
        for request in failed.values():
            self._close(request, Response(error=error))

    def _close(self, request: Request, response: Response) -> None:
        """Send a request its last response."""
        with self._changed:
            self._open.pop(request.id, None)
        request.put(response)

    def _accept(self, request: Request) -> None:
        if request.encode is not None:
            self._close(request, request.encode())
            return
        if request.request_type == "generation_only":
            found = request.disaggregated
            assert found is not None
            wrong = opaque_state.fault(
                found.opaque_state,
                found.ctx_request_id,
                pack_tokens(request.prompt),
                tuple(found.first_gen_tokens or ()),
                self.shape.kv_dtype,
                self.shape.tokens_per_block,
            )
            if wrong:
                self._close(request, Response(error=f"generation_only request {request.id}: {wrong}"))
                return
            self._transferring[request.id] = request
            return
        self._start(request)

    def _finish_transfers(self) -> None:
        if not self.transfers_open.is_set():
            return
        transferring, self._transferring = self._transferring, {}
        for request in transferring.values():
            if self._breaks_transfer:
                self._breaks_transfer = False
                self._close(request, Response(error=f"KV cache transfer of request {request.id} failed"))
            else:
                self._start(request)
        cancelled, self._cancelled_transfers = self._cancelled_transfers, []
        for request_id in cancelled:
            self._cancel(request_id)

    def _start(self, request: Request) -> None:
        rank = request.rank
        if rank is None:
            rank, self._next_rank = self._next_rank, (self._next_rank + 1) % self.shape.ranks
        if not 0 <= rank < self.shape.ranks:
            self._close(
                request, Response(error=f"attention_dp_rank is {rank}, this engine has {self.shape.ranks} ranks")
            )
            return
        salt = request.salt if self.shape.enable_block_reuse else f"{IDENTIFIER_OF_NO_REUSE}-{request.id}"
        seed = hash_seed(request.lora_name, salt)
        self.recorders[rank].register(seed, request.tenant)
        for picture in request.pictures:
            self.recorders[rank].register_picture(picture)
        multimodal = codec.multimodal.encode(MultimodalInput("", request.items)) if request.pictures else None
        started: list[str] = []
        for index in range(request.n):
            name = f"{request.id}.{index}"
            sampling = request.sampling
            if index:
                sampling = _reseeded(sampling, (sampling.seed or 0) + index)
            generate = Generate(
                name,
                pack_tokens(request.prompt),
                sampling,
                stop_token_ids=tuple(
                    dict.fromkeys([*request.stop_words, *(() if request.end_id is None else (request.end_id,))])
                )
                if not sampling.ignore_eos
                else tuple(request.stop_words),
                routing=Routing(lora_name=request.lora_name, cache_salt=salt, priority=request.priority),
                multimodal=multimodal,
                retention=request.retention,
            )
            try:
                self.engines[rank].submit(generate, self._now_ms)
            except RefusedError as error:
                for each in started:
                    self.engines[rank].cancel(each)
                    del self._sequences[rank][each]
                self._close(request, Response(error=str(error)))
                return
            started.append(name)
            self._sequences[rank][name] = _Sequence(request, index, rank, seed, request.prompt)

    def _cancel(self, request_id: int) -> None:
        if request_id in self._transferring:
            if self._behaviour.leak_failed_transfers:
                request = self._transferring.pop(request_id)
                self._leak(-(-len(request.prompt) // self.shape.tokens_per_block), request.rank or 0)
                self._close(request, Response(finish_reason=FinishReason.CANCELLED))
                return
            # The KV is on its way: it must arrive before it can be given up.
            self._cancelled_transfers.append(request_id)
            return
        for rank, sequences in enumerate(self._sequences):
            for name, sequence in list(sequences.items()):
                if sequence.request.id == request_id:
                    self.engines[rank].cancel(name)
                    is_generation = sequence.request.request_type == "generation_only"
                    self._breaks_transfer |= self._behaviour.cancel_breaks_transfer and is_generation

    def _leak(self, blocks: int, rank: int) -> None:
        pool = self.engines[rank]._pool
        for _ in range(blocks):
            if not pool.reserve():
                break

    def _iterate(self) -> bool:
        """Step every rank; say whether any had something that it could do."""
        duration = 0.0
        worked = False
        scheduled = 0
        latency = 0.0
        prefill_tokens = 0
        first_rank_steps = 0
        context_requests = 0
        for rank, engine in enumerate(self.engines):
            outcome = engine.step(self._now_ms)
            if outcome is None:
                continue
            worked = True
            duration = max(duration, outcome.duration_ms)
            for fact in outcome.facts:
                if isinstance(fact, RequestStarted):
                    self._reused += fact.cached_tokens // self.shape.tokens_per_block
                    self._missed += (fact.isl - fact.cached_tokens) // self.shape.tokens_per_block
            for delta in outcome.deltas:
                self._deliver(rank, delta)
            if rank == 0:
                scheduled = len(outcome.deltas)
                latency = outcome.duration_ms
                prefill_tokens = outcome.prefill_tokens
                first_rank_steps = outcome.steps
                context_requests = sum(1 for delta in outcome.deltas if delta.position == 0)
        if not worked:
            return False
        self._publish()
        if first_rank_steps:
            self._iteration += 1
            self._report(scheduled, latency, prefill_tokens, context_requests)
        self._now_ms += duration
        if duration and self._behaviour.speedup > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, duration / 1e3)
        return True

    def _publish(self) -> None:
        for rank, recorder in enumerate(self.recorders):
            events = recorder.drain()
            if not ((self.shape.event_buffer_max_size or self.publishers) and self.shape.enable_block_reuse):
                continue
            if self._behaviour.null_diff_crash and any(_has_null_diff(event["data"]) for event in events):
                self.background_errors.append("'NoneType' object has no attribute 'new_value'")
                continue
            names = BlockNames.V2_BLOCK_KEY if self.publishers else self.shape.block_names
            told = [spoken(event, names, self.shape.windows, self._behaviour.vocabulary_size) for event in events]
            if self.publishers:
                self.publishers[rank].publish(told)
                continue
            for event in told:
                self.buffer.append(event)
            if events:
                self.events.notify()

    def _deliver(self, rank: int, delta: TokenDelta) -> None:
        sequence = self._sequences[rank].get(delta.request_id)
        if sequence is None:
            return
        request = sequence.request
        fresh = unpack_tokens(delta.token_ids)
        sequence.output += fresh
        sequence.held += fresh
        sequence.steps += bool(fresh)
        if delta.logprobs is not None:
            sequence.held_logprobs += [
                {token.token_id: Logprob(token.logprob, 1)}
                | {other: Logprob(value, place) for place, (other, value) in enumerate(token.alternatives, 1)}
                for token in delta.logprobs
            ]
        if delta.cached_tokens is not None:
            sequence.cached_tokens = delta.cached_tokens
        reason = delta.finish_reason
        if reason is None and not (request.streaming and len(sequence.held) >= self.shape.stream_interval):
            return
        response = Response(
            index=sequence.index,
            token_ids=tuple(sequence.held),
            logprobs=tuple(sequence.held_logprobs),
            cached_tokens=sequence.cached_tokens,
            finish_reason=reason,
            decoding_iter=sequence.steps,
        )
        if request.prompt_logprobs is not None and not sequence.told_prompt:
            sequence.told_prompt = True
            response.prompt_logprobs = self._prompt_logprobs(sequence, request.prompt_logprobs)
        sequence.held = []
        sequence.held_logprobs = []
        if reason is not None:
            del self._sequences[rank][delta.request_id]
            self._completed += 1
            if reason != "cancelled":
                self._keep(sequence)
            self._finish(request, sequence, response)
            if not any(each.request is request for each in self._sequences[rank].values()):
                self._close(request, response)
                return
        request.put(response)

    def _prompt_logprobs(self, sequence: _Sequence, alternatives: int) -> tuple[dict[int, Logprob], ...]:
        """Return a row for each prompt token that was computed: row t has the likeliest tokens at t + 1.

        So the last row is about the first generated token, and the tokens that were reused have none. The tokens that
        the prompt really has are in a row only where they are among its likeliest.
        """
        rows = []
        vocabulary = self.engines[sequence.rank].vocabulary
        for end in range((sequence.cached_tokens or 0) + 1, len(sequence.prompt) + 1):
            stream = GeneratedTokens(
                vocabulary,
                pack_tokens(sequence.prompt[:end]),
                Sampling(1, seed=sequence.request.sampling.seed, logprobs=alternatives),
            )
            stream.generate_to(1)
            (predicted,) = stream.logprobs(0, 1, alternatives)
            rows.append({token: Logprob(value, at) for at, (token, value) in enumerate(predicted.alternatives, 1)})
        return tuple(rows)

    def _finish(self, request: Request, sequence: _Sequence, response: Response) -> None:
        last = sequence.output[-1] if sequence.output else None
        if response.finish_reason == "stop" and last != request.end_id and last in request.stop_words:
            response.stop_reason = request.stop_words[last]
            if not request.include_stop:
                response.cut_tokens = 1
        if request.request_type == "context_only":
            if response.finish_reason == "length":
                response.finish_reason = "not_finished"
            given = request.disaggregated
            first = tuple(sequence.output)
            response.disaggregated_params = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=list(first),
                ctx_request_id=request.id,
                opaque_state=opaque_state.make(
                    request.id,
                    pack_tokens(request.prompt),
                    first,
                    self.shape.kv_dtype,
                    self.shape.tokens_per_block,
                    request.media_seed,
                    request.pictures,
                ),
                multimodal_hashes=given.multimodal_hashes if given else None,
                mrope_position_ids_handle=given.mrope_position_ids_handle if given else None,
                mrope_position_deltas_handle=given.mrope_position_deltas_handle if given else None,
            )
            if PROFILE.later_disaggregation:
                made = response.disaggregated_params
                made.disagg_request_id = DISAGGREGATED_FROM + request.id
                made.ctx_dp_rank = sequence.rank
                made.ctx_usage = {"prompt_tokens": len(request.prompt), "completion_tokens": len(first)}
                made.first_gen_log_probs = list(response.logprobs) or None

    def _keep(self, sequence: _Sequence) -> None:
        """Tell the recorder of a finished sequence: all tokens but the last have KV."""
        tokens = [*sequence.prompt, *sequence.output][:-1]
        whole = pack_tokens(tokens)
        size = self.shape.tokens_per_block
        touched = media_hashes_of_blocks(sequence.request.items, size)
        named = sequence_hashes(block_hashes(whole, size, sequence.seed, touched))
        self.recorders[sequence.rank].request_ended(named, tokens, sequence.seed, sequence.request.decode_priority)

    def _report(self, scheduled: int, latency_ms: float, prefill_tokens: int, context_requests: int) -> None:
        """Add one iteration's statistics: of rank 0 only, as in 1.2."""
        if not self.shape.enable_iter_perf_stats:
            return
        load = self.engines[0].load()
        looked_up = self._reused + self._missed
        stats: dict[str, Any] = {
            "timestamp": datetime.datetime.now(datetime.UTC).strftime("%m-%d-%Y %H:%M:%S.%f"),
            "iter": self._iteration,
            "iterLatencyMS": latency_ms,
            "newActiveRequestsQueueLatencyMS": 0.0,
            "numNewActiveRequests": context_requests,
            "numActiveRequests": load.running_requests,
            "numQueuedRequests": load.waiting_requests,
            "numCompletedRequests": self._completed,
            "maxNumActiveRequests": self.shape.max_batch_size,
            "maxBatchSizeStatic": 0,
            "maxBatchSizeTunerRecommended": 0,
            "maxBatchSizeRuntime": 0,
            "maxNumTokensStatic": 0,
            "maxNumTokensTunerRecommended": 0,
            "maxNumTokensRuntime": 0,
            "gpuMemUsage": load.total_blocks * self._behaviour.block_bytes,
            "cpuMemUsage": 0,
            "pinnedMemUsage": 0,
            "kvCacheStats": {
                "maxNumBlocks": load.total_blocks,
                "freeNumBlocks": load.total_blocks - load.active_blocks,
                "usedNumBlocks": load.active_blocks,
                "tokensPerBlock": self.shape.tokens_per_block,
                "allocTotalBlocks": looked_up,
                "allocNewBlocks": self._missed,
                "reusedBlocks": self._reused,
                "missedBlocks": self._missed,
                "cacheHitRate": self._reused / looked_up if looked_up else 0.0,
            },
            "staticBatchingStats": None,
            "inflightBatchingStats": {
                "numScheduledRequests": scheduled,
                "numContextRequests": context_requests,
                "numGenRequests": scheduled - context_requests,
                "numPausedRequests": 0,
                "numCtxTokens": prefill_tokens,
                "microBatchId": 0,
                "avgNumDecodedTokensPerIter": 0.0,
            },
            "specDecodingStats": None,
        }
        if self.shape.enable_iter_req_stats and self._sequences[0]:
            stats["requestStats"] = [_request_stats(each) for each in self._sequences[0].values()]
        if self.stats.put(stats) > self.shape.max_stats_len:
            self.stats.drop_oldest()


def _has_null_diff(data: dict[str, Any]) -> bool:
    return data["type"] == "updated" and (data["cache_level"] is None or data["priority"] is None)


def _reseeded(sampling: Sampling, seed: int) -> Sampling:
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**{**values, "seed": seed})


def _request_stats(sequence: _Sequence) -> dict[str, Any]:
    return {
        "id": sequence.request.id,
        "stage": "GENERATION_IN_PROGRESS" if sequence.output else "QUEUED",
        "contextPrefillPosition": len(sequence.prompt) if sequence.output else 0,
        "numGeneratedTokens": len(sequence.output),
        "avgNumDecodedTokensPerIter": 0.0,
        "scheduled": bool(sequence.output),
        "paused": False,
        "disServingStats": None,
        "allocTotalBlocksPerRequest": 0,
        "allocNewBlocksPerRequest": 0,
        "reusedBlocksPerRequest": 0,
        "missedBlocksPerRequest": 0,
        "kvCacheHitRatePerRequest": 0.0,
    }
