"""From a request on the wire to one call of ``LLM.generate_async``.

Rules:

1. ``SamplingParams`` are made per request: a context request changes the object that it is given.
2. Each rank of attention data parallelism is addressed by its number, always, and the engine is told not to choose
   another one: a router's choice is meant, and the default has changed between versions.
3. A decode leg gets the prompt as token ids and never media. An encode leg gets no disaggregated params: 1.2.1 would
   wrap its handles into a tuple.
4. What only later versions take (``priority``) is given where the installed one has it and honours it.
5. How long blocks stay (``KvCacheRetentionConfig``) and the request's span (``trace_headers``) are given as they came.
6. A request that asks for log probabilities of its prompt reuses no blocks: the engine has them only of what it
   computes.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from poolgrid.kernel.wire import codec as wire_codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.hashing import hash_seed, unpack_tokens
from poolgrid.kernel.wire.identifiers import Stage
from poolgrid.kernel.wire.requests import Generate, KvRetention, unit_priority
from poolgrid.kernel.worker_protocol.cache_facts import retention_of
from poolgrid.kernel.worker_protocol.refusal import RefusedError, UnableError, UnsupportedError
from poolgrid.plugins.trtllm.arguments.engine_arguments import EngineArguments
from poolgrid.plugins.trtllm.arguments.engine_rules import BY_TOKENS, uses_kvbm
from poolgrid.plugins.trtllm.core import disaggregated_params as codec
from poolgrid.plugins.trtllm.core.model_facts import Adapter, ModelFacts, adapters
from poolgrid.plugins.trtllm.core.sampling import (
    SamplingPlan,
    inabilities,
    plan_sampling,
)
from poolgrid.plugins.trtllm.library import TrtllmLibrary, orders_by_priority, parameters_of
from poolgrid.plugins.trtllm.logits import ProcessorsOfRequests
from poolgrid.plugins.trtllm.media import MediaNames
from poolgrid.server.workers.engines.root_seeds import RootSeeds

log = logging.getLogger(__name__)

HEALTH_SALT = "poolgrid-health"
"""Cache salt of the worker's own requests: no other request can reuse what they leave in the cache."""

PROMPT_SALT = "\0prompt-logprobs\0"
"""Between a tenant's salt and the id of a request whose prompt must be computed as a whole."""

HEALTH_TOKEN = 1
"""Prompt of such a request: one token, less than any block, so that it leaves no block that has a name."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What a request becomes, as far as that is known without TensorRT-LLM."""

    sampling: SamplingPlan
    adapter: Adapter | None
    cache_salt: str
    hash_seed: int | None = None
    """Seed of its block hashes, where its media are to be named by it."""


class TrtllmCalls:
    """Makes the calls of one engine. ``plan`` is called where requests come in, all else in the engine's thread."""

    def __init__(
        self,
        library: TrtllmLibrary,
        llm: Any,
        arguments: EngineArguments,
        facts: ModelFacts,
        processors: ProcessorsOfRequests,
    ) -> None:
        self.library = library
        self.llm = llm
        self.arguments = arguments
        self.transfers_kv = bool((arguments.values.get("cache_transceiver_config") or {}).get("backend"))
        """Whether prefill and decode legs can run."""
        self._processors = processors
        self._eos_token_ids = frozenset(facts.eos_token_ids)
        self._vocabulary_size = facts.vocabulary_size
        self._measures = bool(arguments.values.get("enable_iter_perf_stats"))
        self._guide_backend: str | None = arguments.values.get("guided_decoding_backend") or None
        self.inabilities = inabilities(library.version, arguments.values)
        self._accepted = parameters_of(llm.generate_async)
        self._sampling_parameters = parameters_of(library.sampling_params)
        self._conversations = library.conversation_params if "conversation_params" in self._accepted else None
        self._by_tokens = uses_kvbm(arguments.values)
        self._orders = "priority" in self._accepted and orders_by_priority(llm)
        self._dropped_fields: set[str] = set()
        self.machine = machine_id()
        """Where handles that this engine makes mean something."""
        self._far_handles = 0
        self.adapters = adapters(arguments.values)
        self.roots = RootSeeds(arguments.block_size)
        self.media: MediaNames | None = None
        """Names of media in events; ``None`` where the model's files do not say what its tokens are."""
        if facts.vocabulary_size and facts.image_token_id is not None:
            self.media = MediaNames(facts.vocabulary_size, facts.image_token_id)

    @property
    def takes_retention(self) -> bool:
        return self.library.kv_cache_retention is not None and "kv_cache_retention_config" in self._accepted

    def plan(self, request: Generate) -> RequestPlan | None:
        """Return what a request becomes, ``None`` for an encode leg; raises ``RefusedError``."""
        if request.stage is Stage.ENCODE:
            return None
        routing = request.routing
        adapter = None
        if routing.lora_name:
            adapter = self.adapters.get(routing.lora_name)
            if adapter is None:
                raise UnableError(f"lora_name is {routing.lora_name!r}, this engine has no such adapter")
        has_salts = "cache_salt" in self._accepted
        if routing.cache_salt and not has_salts:
            raise UnsupportedError("this TensorRT-LLM has no cache salts, and tenants must not share blocks")
        if self._by_tokens and (routing.cache_salt or request.sampling.prompt_logprobs is not None):
            given = "cache_salt" if routing.cache_salt else "prompt_logprobs"
            raise UnableError(f"{given} is given, and {BY_TOKENS}: start workers without it for such requests")
        salt = routing.cache_salt
        if request.sampling.prompt_logprobs is not None and request.stage is not Stage.DECODE and has_salts:
            # The engine reports the blocks that it computes: with a salt of its own a request reuses nothing.
            salt = f"{salt}{PROMPT_SALT}{request.request_id}"
        if request.retention is not None and not self.takes_retention:
            raise UnableError(
                "kv_cache_retention_config is given, and this TensorRT-LLM takes none: leave it out, or use 1.2"
            )
        seed = None if request.multimodal is None else self._name_media(request, salt)
        sampling = plan_sampling(request, self._eos_token_ids, self._guide_backend, self.inabilities)
        for name in request.sampling.engine_fields or ():
            if name not in self._sampling_parameters:
                raise UnableError(f"{name} is given, and TensorRT-LLM {self.library.version} has no such parameter")
        plan = RequestPlan(sampling, adapter, salt, seed)
        self._processors.check(request)
        self.roots.note(request.token_ids, routing.lora_name, None if adapter is None else adapter.number, salt)
        return plan

    def _name_media(self, request: Generate, salt: str) -> int | None:
        """Return the seed by which a request's images are named; remember those that have digests already."""
        if self.media is None:
            return None
        seed = hash_seed(request.routing.lora_name, salt)
        if request.disaggregated_params is not None:
            digests = codec.media_digests(request.disaggregated_params)
            try:
                items = wire_codec.multimodal.decode(request.multimodal or b"").items
            except DecodeError:
                return None  # it is refused where its media are loaded
            self.media.note(digests, [item.media_hash for item in items], seed)
        return seed if self.library.names_media else None

    def generate(
        self,
        request: Generate,
        plan: RequestPlan | None,
        inputs: Any,
        context_only: bool,
        handles: Sequence[tuple[codec.HandleField, dict[str, Any]]] = (),
    ) -> Any:
        """Give a request to the engine and return its result, which grows.

        ``handles`` are those of embeddings that were fetched for it.

        Raises ``RefusedError``, and what TensorRT-LLM raises.
        """
        if plan is None:
            return self.llm.generate_async(inputs)
        routing = request.routing
        given: dict[str, Any] = {"sampling_params": self.sampling_params(request, plan), "streaming": not context_only}
        params, prompt = self._disaggregated_params(request, context_only, handles)
        if params is not None:
            given["disaggregated_params"] = params
        if prompt is not None:
            inputs = list(unpack_tokens(prompt))
        adapter = plan.adapter
        if adapter is not None:
            given["lora_request"] = self.library.lora_request(
                adapter.name, adapter.number, adapter.path, adapter.checkpoint_source
            )
        if plan.cache_salt:
            given["cache_salt"] = plan.cache_salt
        given.update(self._scheduling(routing.dp_rank))
        if routing.priority and self._orders:
            given["priority"] = unit_priority(routing.priority)
        if request.turn is not None and self._conversations is not None:
            # With the policy per_conversation, state of earlier turns stays for named conversations only.
            given["conversation_params"] = self._conversations(conversation_id=request.turn.conversation)
        if self.takes_retention and (retention := retention_of(request)) is not None:
            given["kv_cache_retention_config"] = self._retention(retention, request)
        if request.trace is not None and "trace_headers" in self._accepted:
            given["trace_headers"] = request.trace.headers
        return self.llm.generate_async(inputs, **given)

    async def generate_one(self, rank: int) -> None:
        """Let a rank generate one token of the worker's own."""
        given = self._scheduling(rank)
        if "cache_salt" in self._accepted:
            given["cache_salt"] = HEALTH_SALT
        sampling = self.library.sampling_params(
            end_id=-1, pad_id=0, max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False
        )
        result = self.llm.generate_async([HEALTH_TOKEN], sampling_params=sampling, streaming=False, **given)
        try:
            # Not ``result(timeout)``: it has no effect.
            await result.aresult()
        except BaseException:
            if not result.finished:
                result.abort()
            raise

    def text_of(self, tokens: bytes) -> str:
        """Return the text of tokens (u32 little-endian); raises ``RefusedError`` where there is no tokenizer."""
        tokenizer = getattr(self.llm, "tokenizer", None)
        if tokenizer is None:
            raise UnableError("an output with media continues as text, and this engine has no tokenizer")
        text: str = tokenizer.decode(list(unpack_tokens(tokens)))
        return text

    def _retention(self, retention: KvRetention, request: Generate) -> Any:
        """Return how long a request's blocks stay, as TensorRT-LLM takes it; durations are ``timedelta``."""
        made = self.library.kv_cache_retention
        assert made is not None, "a plan was made, so the version has it"
        length = len(request.token_ids) // 4
        emitted = request.routing.emitted_tokens
        prompt = length - emitted
        ranges = [
            (
                each.start,
                min(prompt, prompt if each.end is None else each.end),
                each.priority,
                _duration(each.duration_ms),
            )
            for each in retention.ranges
            if each.start < prompt
        ]
        decode = (retention.decode_priority, _duration(retention.decode_duration_ms))
        if emitted:
            # For the engine the output so far is prompt.
            ranges.append((prompt, length, *decode))
        return made([made.TokenRangeRetentionConfig(*each) for each in ranges], *decode)

    def _scheduling(self, rank: int) -> dict[str, Any]:
        if "scheduling_params" not in self._accepted:
            return {}
        return {"scheduling_params": self.library.scheduling_params(attention_dp_rank=rank, attention_dp_relax=False)}

    def sampling_params(self, request: Generate, made: RequestPlan) -> Any:
        """Return a request's own ``SamplingParams``; raises ``RefusedError``."""
        plan = made.sampling
        arguments = dict(plan.arguments)
        if self._measures:
            # What TensorRT-LLM's own metrics are made of.
            arguments["return_perf_metrics"] = True
        if plan.guide is not None:
            arguments["guided_decoding"] = self.library.guided_decoding_params(**plan.guide)
        if plan.logit_bias:
            arguments["embedding_bias"] = embedding_bias(plan.logit_bias, self._vocabulary_size)
        processor = self._processors.make(request, self._vocabulary_size)
        if processor is not None:
            arguments["logits_processor"] = processor
        return self.library.sampling_params(**arguments)

    def _disaggregated_params(
        self, request: Generate, context_only: bool, handles: Sequence[tuple[codec.HandleField, dict[str, Any]]]
    ) -> tuple[Any, bytes | None]:
        """Return what the leg before left, made into what this leg is asked for (``None`` for a whole request).

        The second value are the token ids of a prompt with media, for a decode leg.
        """
        made: Any = None
        prompt: bytes | None = None
        if request.disaggregated_params is not None:
            try:
                decoded = codec.decode(
                    request.disaggregated_params, self.library.disaggregated_params, self.library.logprob
                )
            except DecodeError as error:
                raise RefusedError(f"disaggregated_params: {error}") from None
            made, prompt = decoded.params, decoded.prompt
            if decoded.machine not in ("", self.machine):
                self._warn_of_far_handles()
                raise UnableError(
                    "the embeddings of the request are in the memory of another machine, and TensorRT-LLM's handles of "
                    "them mean nothing here"
                )
            if decoded.tensors:
                _set_handles(made, handles)
            fresh = set(decoded.dropped) - self._dropped_fields
            if fresh:
                self._dropped_fields |= fresh
                log.warning(
                    "disaggregated params have fields that this TensorRT-LLM does not know, they are dropped: %s; "
                    "run the same version on both sides",
                    ", ".join(sorted(fresh)),
                )
        if request.stage is Stage.DECODE:
            made.request_type = codec.GENERATION_ONLY
        elif context_only:
            if made is None:
                made = self.library.disaggregated_params()
            made.request_type = codec.CONTEXT_ONLY
        elif made is not None:
            made.request_type = codec.WHOLE
        return made, prompt if request.stage is Stage.DECODE else None

    def _warn_of_far_handles(self) -> None:
        self._far_handles += 1
        if self._far_handles == 1:
            log.warning(
                "an encode worker on another machine made embeddings for a request of this worker: they cannot be "
                "taken from there, and such requests start again with their images. Run the encode workers of a model "
                "on the machines of those that compute its prompts, or start both with --tensor-transport zmq or nixl"
            )


def _set_handles(made: Any, handles: Sequence[tuple[codec.HandleField, dict[str, Any]]]) -> None:
    """Put handles of what was fetched where the engine looks for them."""
    if not handles:
        raise UnableError(
            "the embeddings of the request are to be fetched from an encode worker, and this worker has "
            "tensor_transport none: start it with zmq or nixl, as the encode worker"
        )
    for field, handle in handles:
        if field != codec.EMBEDDINGS:
            setattr(made, field, handle)
    made.multimodal_embedding_handles = [handle for field, handle in handles if field == codec.EMBEDDINGS]


def _duration(duration_ms: int | None) -> timedelta | None:
    # As a number it would count as seconds.
    return None if duration_ms is None else timedelta(milliseconds=duration_ms)


def embedding_bias(bias: Mapping[int, float], vocabulary_size: int) -> Any:
    """Return a logit bias as TensorRT-LLM takes it: a tensor over the vocabulary; raises ``RefusedError``."""
    if not vocabulary_size:
        raise UnsupportedError("logit_bias is given, and the model's files do not have its vocabulary size")
    beyond = [token_id for token_id in bias if not 0 <= token_id < vocabulary_size]
    if beyond:
        raise UnsupportedError(f"logit_bias names token {beyond[0]}, allowed are 0 to {vocabulary_size - 1}")
    try:
        import torch
    except ImportError:
        raise UnsupportedError("logit_bias needs torch, which is not installed here") from None
    tensor = torch.zeros(vocabulary_size, dtype=torch.float32)
    for token_id, value in bias.items():
        tensor[token_id] = value
    return tensor


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Drawn by Linux at each start of a machine; the same in all its containers."""


def machine_id() -> str:
    """Return an id of this machine that changes with each boot."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
