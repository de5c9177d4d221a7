# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""``LLM`` on the PyTorch backend, with the constructor, the checks and the readers of 1.2.1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel
from xxhash import xxh3_64_intdigest

from poolgrid.kernel.wire.events import BlocksStored
from poolgrid.kernel.wire.requests import Sampling

from .._fake import behaviour as behaviours
from .._fake import opaque_state
from .._fake.block_key import salt_id
from .._fake.cache_events import MediaKey, Tenant
from .._fake.executor import EngineShape, Executor, Request
from .._fake.guides import guide_of
from .._fake.pictures import Picture, SeeingModel, name_pictures, read_model
from .._fake.profile import PROFILE
from .._fake.second_cache_manager import BlockNames
from .._fake.world import proxy_for
from ..bindings.executor import KvCacheRetentionConfig
from ..disaggregated_params import DisaggregatedParams
from ..executor.request import LoRARequest
from ..executor.result import RequestOutput, Response
from ..executor.utils import RequestError
from ..sampling_params import SamplingParams
from ..scheduling_params import SchedulingParams
from .llm_args import TRTLLM_ENGINE_ONLY, SamplerType, TorchLlmArgs
from .utils import AsyncQueue

_request_ids = count(1)


class FakeTokenizer:
    """UTF-8 bytes as token ids from 3; other ids are written as ``<id>``."""

    eos_token_id = 2
    pad_token_id = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + each for each in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(each - 3) if 3 <= each < 131 else f"<{each}>" for each in token_ids)


class BaseLLM:
    """What all the fake's engines share."""

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        backend = kwargs.pop("backend", None) or "pytorch"
        given: dict[str, Any] = {
            "model": model,
            "tokenizer": tokenizer,
            "tokenizer_mode": tokenizer_mode,
            "skip_tokenizer_init": skip_tokenizer_init,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
        }
        self._executor: Executor | None = None
        self.args = self._make_args(backend, given, kwargs)
        self._llm_id = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns() // 1_000_000}"
        own_tokenizer, self._eyes = read_model(model)
        self.tokenizer = None if skip_tokenizer_init else (tokenizer or own_tokenizer or FakeTokenizer())
        chosen = behaviours.behaviour
        self._behaviour = chosen
        self._made_by = threading.get_ident()
        self._print("[TRT-LLM] [I] loading a shard of the checkpoint")
        self._process = subprocess.Popen(["sleep", "600"]) if chosen.leaves_process else None
        ranks = getattr(self.args, "tensor_parallel_size", 1) * getattr(self.args, "pipeline_parallel_size", 1)
        executor = Executor(_shape(self.args, chosen), chosen, proxy_for(ranks))
        self._executor = executor
        self._finalizer = weakref.finalize(self, executor.shutdown)  # also at exit

    def _make_args(self, backend: str, given: dict[str, Any], kwargs: dict[str, Any]) -> BaseModel:
        name = type(self).__name__
        if backend != "pytorch":
            raise ValueError(f"{name} has no backend {backend!r}")
        wrong = [each for each in kwargs if each in TRTLLM_ENGINE_ONLY]
        if wrong:
            raise ValueError(
                "The following arguments are specific to TensorRT backend and cannot be used with PyTorch backend: "
                f"{wrong}."
            )
        for each in kwargs:
            if each not in TorchLlmArgs.model_fields and each != "_mpi_session":
                raise ValueError(f"{name} got invalid argument: {each}")
        return TorchLlmArgs(**given, **kwargs, backend=backend)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __getstate__(self) -> Any:
        raise RuntimeError("LLM object can not be pickled.")

    @property
    def llm_id(self) -> str:
        return self._llm_id

    def shutdown(self) -> None:
        """Stop the executor; again is harmless."""
        if self._executor is not None:
            if self._behaviour.one_thread and threading.get_ident() != self._made_by:
                raise RuntimeError("MPI was initialized by another thread than the one that finalizes it")
            self._print("[TRT-LLM] [I] a worker process has ended")
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            executor, self._executor = self._executor, None
            self._finalizer.detach()
            executor.shutdown()

    def _print(self, line: str) -> None:
        sys.stdout.write(f"{line}\n" * self._behaviour.stdout_lines)
        sys.stdout.flush()

    def __getattribute__(self, name: str) -> Any:
        if name == "_check_health" and not object.__getattribute__(self, "_behaviour").health_method:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute '_check_health'")
        return object.__getattribute__(self, name)

    def _check_health(self) -> bool:
        return self._executor is not None and self._executor.alive

    # requests

    def generate(
        self,
        inputs: Any,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest] | None = None,
        prompt_adapter_request: Any = None,
        kv_cache_retention_config: KvCacheRetentionConfig | Sequence[KvCacheRetentionConfig] | None = None,
        disaggregated_params: DisaggregatedParams | Sequence[DisaggregatedParams] | None = None,
        scheduling_params: SchedulingParams | list[SchedulingParams] | None = None,
        cache_salt: str | Sequence[str] | None = None,
    ) -> Any:
        single = not isinstance(inputs, list) or (bool(inputs) and isinstance(inputs[0], int))
        batch = [inputs] if single else inputs

        def each(value: Any, at: int) -> Any:
            return value[at] if isinstance(value, list | tuple) else value

        results = [
            self.generate_async(
                one,
                sampling_params=each(sampling_params, at),
                lora_request=each(lora_request, at),
                prompt_adapter_request=each(prompt_adapter_request, at),
                streaming=False,
                kv_cache_retention_config=each(kv_cache_retention_config, at),
                disaggregated_params=each(disaggregated_params, at),
                scheduling_params=each(scheduling_params, at),
                cache_salt=each(cache_salt, at),
            )
            for at, one in enumerate(batch)
        ]
        done = [result.result() for result in results]
        return done[0] if single else done

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: SchedulingParams | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        return self._generate(
            inputs,
            sampling_params,
            lora_request,
            streaming,
            kv_cache_retention_config,
            disaggregated_params,
            trace_headers,
            scheduling_params,
            cache_salt,
        )

    def _generate(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None,
        lora_request: LoRARequest | None,
        streaming: bool,
        kv_cache_retention_config: KvCacheRetentionConfig | None,
        disaggregated_params: DisaggregatedParams | None,
        trace_headers: Mapping[str, str] | None,
        scheduling_params: SchedulingParams | None,
        cache_salt: str | None,
        priority: float = 0.5,
    ) -> RequestOutput:
        executor = self._executor
        if executor is None or not executor.alive:
            raise RuntimeError("LLM is shutting down")
        executor.meet_background_errors(executor.shutdown)
        if executor.background_errors:
            raise RequestError(executor.background_errors.pop(0))
        sampling = self._prepare_sampling(sampling_params)
        prompt, token_ids, media = self._prepare_input(inputs)
        if media:
            executor.block_caller(self._behaviour.input_processing_ms)
        request_type = disaggregated_params.request_type if disaggregated_params else None
        multimodal = self._check_disaggregation(disaggregated_params, media)
        named = inputs.get("multi_modal_uuids") if isinstance(inputs, dict) and PROFILE.media_uuids else None
        pictures = name_pictures(multimodal, None if named is None else named.get("image"))
        token_ids, placed = self._place(token_ids, pictures, media, disaggregated_params)
        if request_type == "context_only":
            sampling.max_tokens = 1  # on the caller's object, as 1.2.1 does
        self._check_length(token_ids, request_type)
        if sampling.guided_decoding is not None and not getattr(self.args, "guided_decoding_backend", None):
            raise ValueError("guided_decoding needs guided_decoding_backend to be set on the engine")
        encoder = bool(getattr(self.args, "mm_encoder_only", False))
        result = RequestOutput(
            next(_request_ids),
            prompt,
            token_ids,
            sampling,
            executor,
            None if self.tokenizer is None else self.tokenizer.decode,
            trace_headers,
            sampling.return_perf_metrics or bool(getattr(self.args, "return_perf_metrics", False)),
        )
        salt = cache_salt or ""
        second = executor.shape.block_names is not BlockNames.V1
        # What has tokens of its own is in the blocks that it touches, anything else in all of them.
        unplaced = () if placed else pictures
        digests = tuple(MediaKey(each.digest, 0, each.event_name) for each in unplaced)
        identity = "".join([salt, *(f"|{each.digest.hex()}" for each in unplaced)])
        media_seed = (
            opaque_state.media_seed(disaggregated_params.opaque_state)
            if disaggregated_params is not None and request_type == "generation_only"
            else xxh3_64_intdigest(b"".join(multimodal)) >> 1
            if multimodal
            else 0
        )
        request = Request(
            id=result.id,
            prompt=tuple(token_ids),
            sampling=Sampling(
                max_tokens=sampling.max_tokens,
                seed=self._seed(sampling, result.id) ^ media_seed,
                min_tokens=sampling.min_tokens or 0,
                ignore_eos=sampling.ignore_eos,
                logprobs=sampling.logprobs,
                **guide_of(sampling.guided_decoding),
            ),
            end_id=None if sampling.end_id is None or sampling.end_id < 0 else sampling.end_id,
            stop_words=self._stop_words(sampling),
            include_stop=sampling.include_stop_str_in_output,
            n=sampling.n,
            streaming=streaming,
            put=result.queue.put,
            lora_name=lora_request.lora_name if lora_request else "",
            lora_id=lora_request.lora_int_id if lora_request else None,
            tenant=Tenant(
                salt_id(salt, "sha256" if second else PROFILE.salt_hash) if salt else None,
                lora_request.lora_int_id if lora_request else None,
                digests if PROFILE.media_keys else (),
                salt if PROFILE.names_salts[second] else "",
            ),
            salt=identity,
            rank=scheduling_params.attention_dp_rank if scheduling_params else None,
            request_type=request_type,
            disaggregated=disaggregated_params,
            decode_priority=(
                kv_cache_retention_config.decode_retention_priority if kv_cache_retention_config else None
            ),
            retention=None if kv_cache_retention_config is None else kv_cache_retention_config.as_request(),
            media_seed=media_seed,
            prompt_logprobs=sampling.prompt_logprobs,
            pictures=placed,
            priority=round(1000 * (priority - 0.5)) if self._orders_by_priority() else 0,
            encode=(lambda: _encoded(media, disaggregated_params, self._eyes)) if encoder else None,
        )
        executor.submit(request)
        return result

    def _prepare_sampling(self, given: SamplingParams | None) -> SamplingParams:
        if given is None:
            given = SamplingParams()
        elif not isinstance(given, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(given)}")
        if given.end_id is None:
            if self.tokenizer is None:
                raise ValueError(
                    "tokenizer is required to reset end_id if it is None, or you can explicitly specify the end_id "
                    "for sampling_params"
                )
            given.end_id = self.tokenizer.eos_token_id
            if given.pad_id is None:
                given.pad_id = self.tokenizer.pad_token_id
        if given.logits_processor is not None:
            raise NotImplementedError("the fake has no logits_processor")
        return given

    def _seed(self, sampling: SamplingParams, request_id: int) -> int:
        """Return what the simulated engine draws from; what the sampler honours changes it, and nothing else does."""
        honours_penalties = self._samples_in_cpp()
        if self._behaviour.sampler_ignores and not honours_penalties:
            return 0 if sampling._greedy_decoding else request_id
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        if not honours_penalties or not any(each is not None for each in penalties):
            return sampling.seed or 0
        return (sampling.seed or 0) ^ xxh3_64_intdigest(repr(penalties).encode()) >> 1

    def _samples_in_cpp(self) -> bool:
        return bool(getattr(self.args, "sampler_type", None) == SamplerType.TRTLLMSampler)

    def _orders_by_priority(self) -> bool:
        scheduler = getattr(self.args, "scheduler_config", None)
        return getattr(scheduler, "waiting_queue_policy", None) == "priority"

    def _stop_words(self, sampling: SamplingParams) -> dict[int, int | str]:
        words: dict[int, int | str] = {each: each for each in sampling.stop_token_ids or ()}
        stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
        for each in stop:
            if self.tokenizer is None:
                raise ValueError("tokenizer is required to use stop strings")
            encoded = self.tokenizer.encode(each)
            if len(encoded) != 1:
                raise NotImplementedError(f"the fake has stop strings of one token only, {each!r} has {len(encoded)}")
            words[encoded[0]] = each
        return words

    def _prepare_input(self, inputs: Any) -> tuple[str | None, list[int], dict[str, Any]]:
        media: dict[str, Any] = {}
        prompt: str | None = None
        if isinstance(inputs, dict):
            media = inputs.get("multi_modal_data") or inputs.get("multi_modal_embeddings") or {}
            prompt, token_ids = inputs.get("prompt"), inputs.get("prompt_token_ids")
            if token_ids is not None and media and prompt is None:
                if self.tokenizer is None:
                    raise ValueError("tokenizer is required to tokenize a multimodal prompt")
                # Decoded and tokenized again: their number may change.
                prompt, token_ids = self.tokenizer.decode(token_ids), None
        elif isinstance(inputs, str):
            prompt, token_ids = inputs, None
        elif isinstance(inputs, list) and all(isinstance(each, int) for each in inputs):
            token_ids = inputs
        else:
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        if token_ids is None:
            if prompt is None:
                raise TypeError("The inputs must have a prompt or prompt_token_ids")
            if self.tokenizer is None:
                raise ValueError("tokenizer is required to tokenize string prompt")
            token_ids = self.tokenizer.encode(prompt)
        return prompt, list(token_ids), media

    def _check_disaggregation(self, params: DisaggregatedParams | None, media: dict[str, Any]) -> list[bytes]:
        """Check a request's disaggregated params; return the hashes of its media."""
        if params is None or params.request_type is None:
            return [media_hash(each) for kind in sorted(media) for each in _as_list(media[kind])]
        if (params.mrope_position_ids_handle is None) != (params.mrope_position_deltas_handle is None):
            raise ValueError("mrope_position_ids_handle and mrope_position_deltas_handle must be both set or both None")
        if params.request_type == "generation_only" and (media or params.multimodal_embedding_handles):
            raise ValueError("Multimodal data is not allowed in generation_only requests")
        _open_embeddings(params)
        transceiver = getattr(self.args, "cache_transceiver_config", None)
        if params.request_type != "context_and_generation":
            if transceiver is None or transceiver.backend is None:
                raise RequestError("Disaggregated serving is not enabled")
            if params.request_type == "context_only" and not getattr(self.args, "disable_overlap_scheduler", True):
                raise RequestError("context_only requests need disable_overlap_scheduler")
        if params.multimodal_hashes:
            return [
                b"".join((word & 0xFFFFFFFF).to_bytes(4, "big") for word in words) for words in params.multimodal_hashes
            ]
        return [media_hash(each) for kind in sorted(media) for each in _as_list(media[kind])]

    def _place(
        self, token_ids: list[int], pictures: list[Picture], media: dict[str, Any], params: DisaggregatedParams | None
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """Put the tokens of pictures in their places, for a model that sees."""
        if params is not None and params.request_type == "generation_only":
            return token_ids, opaque_state.pictures(params.opaque_state)
        eyes = self._eyes
        handles = params.multimodal_embedding_handles if params is not None else None
        given = [each for each in _as_list(media.get("image", ())) if isinstance(getattr(each, "size", None), tuple)]
        if eyes is None or not pictures or not (handles or given) or getattr(self.args, "mm_encoder_only", False):
            return token_ids, ()
        counts = [each["tensor_size"][0] for each in handles] if handles else [eyes.count(each) for each in given]
        if token_ids.count(eyes.image_token_id) != len(counts):
            raise ValueError("Number of images must match number of placeholders")
        made: list[int] = []
        placed: list[Picture] = []
        for token in token_ids:
            if token == eyes.image_token_id:
                place = len(placed)
                placed.append(replace(pictures[place], start=len(made), length=counts[place]))
                made += [eyes.stand_in] * counts[place]
            else:
                made.append(token)
        return made, tuple(placed)

    def _check_length(self, token_ids: list[int], request_type: str | None) -> None:
        limit = getattr(self.args, "max_num_tokens", None)
        chunked = bool(getattr(self.args, "enable_chunked_prefill", False))
        if limit is not None and not chunked and request_type != "generation_only" and len(token_ids) > limit:
            raise RequestError(
                f"The sum of prompt length ({len(token_ids)}) and query length (0) exceeds max_num_tokens ({limit})"
            )

    # readers

    def _fetched(self, queue: AsyncQueue, timeout: float | None) -> list[Any]:
        """Ask the engine's process, again and again until there is something or the time is over."""
        executor = self._executor
        if executor is None:
            return []
        begun = time.monotonic()
        while True:
            found = executor.fetch(queue)
            if found or timeout is None or time.monotonic() - begun >= timeout:
                return found
            executor.block_caller(100.0)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        if self._executor is None:
            return []
        try:
            return self._fetched(self._executor.events, timeout)
        except Exception:
            return []

    async def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        for event in self.get_kv_cache_events(timeout):
            yield event

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return [] if self._executor is None else self._fetched(self._executor.stats, timeout)

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        for item in self.get_stats(timeout):
            yield item

    # not TensorRT-LLM's: it cannot tell

    def resident_blocks(self, rank: int = 0) -> list[BlocksStored]:
        """Return what a rank's cache really holds, for tests that compare."""
        executor = self._executor
        assert executor is not None
        return executor.look(executor.engines[rank].resident_blocks)


class _LaterLLM(BaseLLM):
    """What the 1.3 line takes besides."""

    def generate_async(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: Any = None,
        scheduling_params: SchedulingParams | None = None,
        cache_salt: str | None = None,
        conversation_params: Any = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority must be in [0, 1], got {priority}")
        return self._generate(
            inputs,
            sampling_params,
            lora_request,
            streaming,
            kv_cache_retention_config,
            disaggregated_params,
            trace_headers,
            scheduling_params,
            cache_salt,
            priority,
        )


class _SleepingLLM(_LaterLLM):
    """What came with 1.4."""

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Let go of memory; the cache is lost without an event. The fake keeps it."""


if TYPE_CHECKING:
    _Released = BaseLLM
elif PROFILE.second_by_default:
    _Released = _SleepingLLM
else:
    _Released = _LaterLLM if PROFILE.request_priority else BaseLLM


class LLM(_Released):
    """``LLM`` on the PyTorch backend."""


def _shape(args: Any, behaviour: behaviours.Behaviour) -> EngineShape:
    kv_cache = args.kv_cache_config
    attention_dp = bool(getattr(args, "enable_attention_dp", False))
    tokens_per_block = getattr(args, "attn_page_size", kv_cache.tokens_per_block)
    max_seq_len = args.max_seq_len or behaviour.model_max_seq_len
    tokenizer = Path(args.model) / "tokenizer.json"
    device = behaviour.device_blocks
    if kv_cache.max_tokens is not None:
        device = max(1, min(device, kv_cache.max_tokens // tokens_per_block))
    return EngineShape(
        ranks=args.tensor_parallel_size if attention_dp else 1,
        attention_dp=attention_dp,
        tokens_per_block=tokens_per_block,
        enable_block_reuse=kv_cache.enable_block_reuse,
        device_blocks=device,
        host_blocks=(kv_cache.host_cache_size or 0) // behaviour.block_bytes,
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens or 8192,
        max_seq_len=max_seq_len,
        windows=tuple(sorted({min(each, max_seq_len) for each in kv_cache.max_attention_window or [max_seq_len]})),
        event_buffer_max_size=kv_cache.event_buffer_max_size,
        enable_iter_perf_stats=bool(getattr(args, "enable_iter_perf_stats", False)),
        enable_iter_req_stats=bool(getattr(args, "enable_iter_req_stats", False)),
        max_stats_len=getattr(args, "max_stats_len", 1000),
        stream_interval=getattr(args, "stream_interval", 1),
        kv_dtype=kv_cache.dtype,
        rpc_orchestrator=getattr(args, "orchestrator_type", None) == "rpc",
        block_names=_block_names(kv_cache),
        stream=_stream(args, kv_cache),
        guided_decoding_backend=getattr(args, "guided_decoding_backend", None) or "",
        tokenizer=tokenizer if tokenizer.is_file() else None,
    )


def _block_names(kv_cache: Any) -> BlockNames:
    chosen = getattr(kv_cache, "use_kv_cache_manager_v2", False)
    if not (PROFILE.second_by_default if chosen == "auto" else chosen):
        return BlockNames.V1
    algorithm = kv_cache.kv_cache_event_hash_algo
    return BlockNames.V2_BLOCK_KEY if algorithm == "auto" else BlockNames(algorithm)


def _stream(args: Any, kv_cache: Any) -> Any:
    """Return the configuration of the stream of events, where there is to be one; raises what TensorRT-LLM raises."""
    config = getattr(kv_cache, "kv_events_config", None)
    if config is None or not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if _block_names(kv_cache) is BlockNames.V1:
        raise ValueError("kv_events_config requires use_kv_cache_manager_v2")
    if args.pipeline_parallel_size > 1:
        raise ValueError("Streaming KV events do not support pipeline parallelism")
    return config


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def media_hash(item: Any) -> bytes:
    """Return 32 bytes that stand for a medium's content."""
    # Pictures and tensors by what they hold; anything else by what it is called.
    text = item if isinstance(item, bytes) else item.tobytes() if hasattr(item, "tobytes") else repr(item).encode()
    return b"".join(xxh3_64_intdigest(text, seed).to_bytes(8, "big") for seed in range(4))


def _open_embeddings(params: DisaggregatedParams) -> None:
    """Open the handles of embeddings and look into them, as the model does; raises what opening them raises."""
    handles = params.multimodal_embedding_handles
    if not handles:
        return
    from .._torch.shared_tensor import SharedTensorContainer
    from .._torch.shared_tensor.shared_tensor import embeddings_of

    opened = [SharedTensorContainer.from_dict(handle).get_local_view() for handle in handles]
    for tensor, words in zip(opened, params.multimodal_hashes or (), strict=False):
        digest = b"".join((word & 0xFFFFFFFF).to_bytes(4, "big") for word in words)
        if tensor.content() != embeddings_of(digest, tensor.content()[1][0]).content():
            raise ValueError("the embeddings are not those of the picture")


def _encoded(media: dict[str, Any], params: DisaggregatedParams | None, eyes: SeeingModel | None) -> Response:
    """What an encoder answers: a handle per item, and its hash as 8 integers."""
    items = [each for kind in sorted(media) for each in _as_list(media[kind])]
    digests = [media_hash(each) for each in items]
    counts = [576 if eyes is None else eyes.count(each) for each in items]
    from .._torch.shared_tensor.shared_tensor import encoder_handle

    handles: Any = [encoder_handle(digest, rows) for digest, rows in zip(digests, counts, strict=True)]
    hashes = [[int.from_bytes(digest[at : at + 4], "big", signed=True) for at in range(0, 32, 4)] for digest in digests]
    made = DisaggregatedParams(multimodal_embedding_handles=handles, multimodal_hashes=hashes)
    if params is not None:
        # 1.2.1's fault: with params in the encode request the handles come as a 1-tuple that holds the list.
        made.multimodal_embedding_handles = (handles,)  # type: ignore[assignment]
    return Response(
        finish_reason="length",
        mm_embedding_handle=handles[0] if handles else None,
        disaggregated_params=made,
    )
