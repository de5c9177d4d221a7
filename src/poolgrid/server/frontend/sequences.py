"""From a prepared request and its prompts to the sequences that a router is asked for, one per prompt and choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from poolgrid.kernel.requests.inference import NO_HINTS, InferenceRequest, header_priority
from poolgrid.kernel.wire.card import unmet
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, stable_u64
from poolgrid.kernel.wire.identifiers import name_of
from poolgrid.kernel.wire.limits import LOGITS_ARGUMENT_BYTES_MAX
from poolgrid.kernel.wire.requests import KvRetention, LogitsProcessorCall, RetainedTokens, Sampling
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.server.frontend.field_words import engine_fields
from poolgrid.server.frontend.prepared_request import PreparedRequest, Prompt
from poolgrid.server.frontend.prompts import overflow, too_long
from poolgrid.server.frontend.schema import (
    JSON_NUMBER_MAX,
    ChatBody,
    CompletionBody,
    InferenceBody,
    KvCacheRetention,
    LatencyTargets,
    Nvext,
)

PARAM = "nvext.kv_cache_retention_config"
WHERE_KV_GOES = ("transfer_mode", "directory")


def check_retention(asked: KvCacheRetention) -> KvRetention:
    """Return what a client asks for, ranges in order; raises ``RequestError``."""
    for name in WHERE_KV_GOES:
        value = getattr(asked, name)
        if value is not None:
            raise unsupported(f"{PARAM}.{name}", f"operators configure where KV is offloaded (got {quoted(value)})")
    ranges = sorted(asked.token_range_retention_configs or (), key=lambda each: each.token_start)
    made = KvRetention(
        tuple(RetainedTokens(each.token_start, each.token_end, each.priority, each.duration_ms) for each in ranges),
        asked.decode_retention_priority,
        asked.decode_duration_ms,
    )
    if made.fault:
        param = f"{PARAM}.token_range_retention_configs"
        raise invalid(
            param, f"{param}: by their starts, {made.fault}; allowed are ranges that do not overlap. Not run."
        )
    return made


def for_prompt(retention: KvRetention, isl: int) -> KvRetention:
    """Return what a prompt of ``isl`` tokens needs of it, with an end for every range.

    A request that moves has output behind its prompt, and the output is not part of a range that goes to the end.
    """
    ranges = tuple(
        RetainedTokens(each.start, min(isl, isl if each.end is None else each.end), each.priority, each.duration_ms)
        for each in retention.ranges
        if each.start < isl
    )
    return KvRetention(ranges, retention.decode_priority, retention.decode_duration_ms)


COMPLETION_MAX_TOKENS_DEFAULT = 16
"""OpenAI's default of ``max_tokens`` for completions; a chat answer may fill the context instead."""


def sequences_of(
    job: PreparedRequest,
    prompts: Sequence[Prompt],
    request_ids: Sequence[str],
    headers: Mapping[str, str] | None = None,
) -> list[InferenceRequest]:
    """Return one request per prompt and choice, in the order of their ``index``; raises ``RequestError``."""
    body = job.body
    per_prompt = job.choices_per_prompt
    salt = job.own_salt or job.client_salt
    shares = None if job.domain is None else job.domain.shares
    stop_token_ids = _stop_token_ids(job)
    priority, expected_output_tokens = 0, None
    hints = NO_HINTS
    if not job.is_plain:
        nvext = body.nvext
        if nvext is not None and nvext.agent_hints is not None:
            priority, expected_output_tokens = nvext.agent_hints.priority or 0, nvext.agent_hints.osl
        hints = _hints(nvext, body.extra_args, headers)
    elif headers:
        hints = {"headers": headers}
    if (asked := header_priority(headers)) is not None:
        priority = asked
    seed = body.seed
    unable = job.served.inabilities
    if seed is None and len(request_ids) > 1 and all(name != "seed" for name, _ in unable):
        # Without a seed of their own the choices of one request could all be the same text.
        seed = stable_u64(name_of(request_ids[0])) & 0x7FFF_FFFF
    # As ``SequenceOutput`` collects: neither events, nor stop strings to look for, nor log probabilities.
    read_whole = not body.stream and not job.stops and job.logprobs is None
    requests: list[InferenceRequest] = []
    for position, prompt in enumerate(prompts):
        sampling = _sampling(job, prompt)
        if unable and (found := unmet(sampling, unable)) is not None:
            raise RequestError(400, "unsupported_by_worker", f"{found[1]}. The request was not run.", param=found[0])
        retention = None if job.retention is None else for_prompt(job.retention, prompt.isl)
        for index in range(position * per_prompt, (position + 1) * per_prompt):
            if seed is not None and per_prompt * len(prompts) > 1:
                sampling = msgspec.structs.replace(sampling, seed=_wrap_i64(seed + index))
            request = InferenceRequest(
                request_ids[index],
                job.served.name,
                prompt.token_ids,
                sampling,
                stop_token_ids,
                priority,
                job.lora_name,
                salt,
                expected_output_tokens,
                prompt.multimodal,
                read_whole,
                cache_shares=shares,
                retention=retention,
                hints=hints,
            )
            requests.append(request)
    return requests


def _stop_token_ids(job: PreparedRequest) -> tuple[int, ...]:
    listed = None if job.is_plain else job.body.stop_token_ids
    own = tuple(dict.fromkeys(listed)) if listed else ()
    if job.body.ignore_eos:
        return own
    if not own:
        return job.model.eos_token_ids
    return own + tuple(token_id for token_id in job.model.eos_token_ids if token_id not in own)


def _max_tokens(job: PreparedRequest, isl: int) -> tuple[str, int]:
    """Return the name of the field that says how long the answer may be, and what it says, or its default."""
    body = job.body
    room = job.max_sequence_length - isl
    if isl < 1:
        raise invalid(job.prompt_param, f"{job.prompt_param} is empty: allowed is a prompt of at least one token")
    if room < 1:
        raise too_long(job, isl)
    name, max_tokens = "max_tokens", body.max_tokens
    if type(body) is ChatBody and body.max_completion_tokens is not None:
        name, max_tokens = "max_completion_tokens", body.max_completion_tokens
    elif max_tokens is None:
        max_tokens = room if job.chat else min(COMPLETION_MAX_TOKENS_DEFAULT, room)
    if max_tokens > room:
        raise overflow(
            job,
            name,
            isl,
            max_tokens,
            f"you requested {isl + max_tokens} tokens ({isl} in the {job.prompt_param}, "
            f"{max_tokens} in the completion): allowed for {name} is 1 to {room}",
        )
    return name, max_tokens


def _sampling(job: PreparedRequest, prompt: Prompt) -> Sampling:
    body = job.body
    name, max_tokens = _max_tokens(job, len(prompt.token_ids) // TOKEN_BYTES)
    # Engines read a prompt to generate: for zero tokens they make one, which is not returned.
    generated = max(1, max_tokens)
    if job.is_plain:
        return Sampling(
            max_tokens=generated, temperature=body.temperature, seed=body.seed, ignore_eos=bool(body.ignore_eos)
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {min_tokens}: allowed is 0 to {name} ({max_tokens})")
    named = ((field, getattr(body, field)) for field in engine_fields(type(body)))
    for_engine = {field: value for field, value in named if value is not None}
    return Sampling(
        max_tokens=generated,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        seed=body.seed,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        logprobs=job.logprobs,
        logit_bias=body.logit_bias or None,
        prompt_logprobs=job.logprobs if type(body) is CompletionBody and body.echo else None,
        logits_processors=_logits_processors(body) if body.logits_processors else (),
        engine_fields=for_engine or None,
        **job.guide,
    )


def _hints(nvext: Nvext | None, targets: LatencyTargets | None, headers: Mapping[str, str] | None) -> Mapping[str, Any]:
    """Return what the client asked of routing, for ``InferenceRequest.hints``; ``nvext.router`` wins over
    ``extra_args``."""
    hints: dict[str, Any] = {}
    router, agent = (None, None) if nvext is None else (nvext.router, nvext.agent_hints)
    if targets is not None and (router is None or isinstance(router, dict)):
        given = {name: value for name, value in msgspec.structs.asdict(targets).items() if value is not None}
        router = {**given, **(router or {})}
    if router is not None or agent is not None:
        hints["nvext"] = {
            "router": router,
            "agent_hints": None if agent is None else {"priority": agent.priority, "osl": agent.osl},
        }
    if headers:
        hints["headers"] = headers
    return hints or NO_HINTS


def _logits_processors(body: InferenceBody) -> tuple[LogitsProcessorCall, ...]:
    """Return the processors that a body asks for; which names exist is for the worker to say."""
    calls = []
    for index, entry in enumerate(body.logits_processors or ()):
        arguments = msgspec.json.encode(entry.arguments)
        if len(arguments) > LOGITS_ARGUMENT_BYTES_MAX:
            param = f"logits_processors[{index}].arguments"
            raise invalid(param, f"{param} is {len(arguments)} bytes of JSON: allowed are {LOGITS_ARGUMENT_BYTES_MAX}")
        calls.append(LogitsProcessorCall(entry.name, arguments))
    return tuple(calls)


def _wrap_i64(value: int) -> int:
    return value if value <= JSON_NUMBER_MAX else value - 2**64
