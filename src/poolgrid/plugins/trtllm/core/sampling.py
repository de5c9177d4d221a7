"""From a request on the wire to the arguments of TensorRT-LLM's ``SamplingParams``. Pure.

Rules:

1. What OpenAI's API takes for granted and TensorRT-LLM does not is said explicitly: temperature 1 and top-p 1 (the
   engine's own default is greedy), and a seed (the engine's own is 0 for all requests). Legs and migrations of one
   request get the same seed.
2. The request says where it ends: ``end_id`` is the first end-of-sequence id among its stop ids, all others are
   ``stop_token_ids``, and the engine keeps the token that stopped it in the output. So tokens once given out are never
   taken back, and the router sees the same output as of any other engine.
3. Text is made elsewhere: ``detokenize`` is off.
4. What cannot be honoured is refused with its reason, never dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poolgrid.kernel.wire.card import GUIDED_DECODING, Inability, is_greedy, unmet
from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.kernel.wire.identifiers import name_of
from poolgrid.kernel.wire.requests import Generate, Sampling
from poolgrid.kernel.worker_protocol.refusal import UnableError, UnsupportedError
from poolgrid.server.structured_output.structural_tags import lark_grammar, newer_form

LLGUIDANCE = "llguidance"

NO_END_ID = -1
"""TensorRT-LLM's way to say that no token ends the output."""

SEED_MASK = (1 << 63) - 1
"""Seeds go through signed 64-bit integers on their way to the GPU."""


IGNORED_BY_TORCH_SAMPLER = ("frequency_penalty", "presence_penalty", "repetition_penalty", "seed")

IGNORED = (
    "which the sampler of this worker's TensorRT-LLM takes and ignores: leave it out, or start the worker with "
    "sampler_type TRTLLMSampler (--override-engine-args)"
)
UNGUIDED = (
    "and this worker's engine was started without guided decoding: leave it out, or start the worker with "
    "--guided-decoding-backend xgrammar or llguidance"
)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What a request's ``SamplingParams`` are made of."""

    arguments: dict[str, Any]
    """Keyword arguments of plain types."""
    guide: dict[str, Any] | None
    """The one keyword argument of ``GuidedDecodingParams``, or ``None``."""
    logit_bias: dict[int, float] | None
    """To become the ``embedding_bias`` tensor."""


def sampler_default(version: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampler that honours penalties and seeds, where a release's own default ignores them.

    One with drafts has a sampler of its own.
    """
    if not version.startswith("1.2.") or values.get("sampler_type") or values.get("speculative_config"):
        return {}
    return {"sampler_type": "TRTLLMSampler"}


def inabilities(version: str, values: Mapping[str, Any]) -> tuple[Inability, ...]:
    """Return what an engine with these arguments cannot do, as on its worker's card.

    No field or signature tells what a sampler takes and does nothing with, so this goes by the version: the PyTorch
    sampler of 1.2 knows neither penalties nor seeds (upstream's issues 16485 and 9442; seeds came with 17172), and
    ``TRTLLMSampler`` knows both.
    """
    found = [] if values.get("guided_decoding_backend") else [(GUIDED_DECODING, UNGUIDED)]
    sampler = str(values.get("sampler_type")).rpartition(".")[2]
    if version.startswith("1.2.") and (sampler != "TRTLLMSampler" or values.get("speculative_config")):
        found += [(name, IGNORED) for name in IGNORED_BY_TORCH_SAMPLER]
    return tuple(found)


def plan_sampling(
    request: Generate,
    eos_token_ids: Collection[int],
    guide_backend: str | None,
    unable: Sequence[Inability] = (),
) -> SamplingPlan:
    """Return what to sample with; raise ``RefusedError`` for what the engine cannot do.

    ``eos_token_ids`` are the model's, as far as known; ``guide_backend`` is the library of the engine that keeps to
    guides, ``None`` = it has none; ``unable`` is what it cannot do.
    """
    sampling = request.sampling
    if (found := unmet(sampling, unable)) is not None:
        raise UnableError(found[1])
    if sampling.guide and request.routing.emitted_tokens:
        # Another engine may be able to.
        raise UnableError(
            f"{sampling.guide} is set, and the output has begun on another worker ({request.routing.emitted_tokens} "
            "tokens): TensorRT-LLM would keep to the guide from its beginning again, after what the client has"
        )
    end_id, stop_token_ids = stops(request.stop_token_ids, eos_token_ids)
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    arguments: dict[str, Any] = {
        "end_id": end_id,
        "pad_id": max(end_id, 0),
        "max_tokens": sampling.max_tokens,
        "n": 1,
        "temperature": temperature,
        "top_p": top_p,
        "seed": _seed(request, greedy=is_greedy(sampling)),
        "ignore_eos": sampling.ignore_eos,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "add_special_tokens": False,
    }
    given = {
        "top_k": sampling.top_k,
        "min_tokens": sampling.min_tokens or None,
        "stop_token_ids": stop_token_ids or None,
        "bad_token_ids": list(sampling.bad_token_ids) or None,
        # 0 alternatives still means the chosen token's own; the engine's 0 is not told apart from none everywhere.
        "logprobs": None if sampling.logprobs is None else max(1, sampling.logprobs),
        "prompt_logprobs": None if sampling.prompt_logprobs is None else max(1, sampling.prompt_logprobs),
    }
    arguments.update({name: value for name, value in given.items() if value is not None})
    arguments = {**(sampling.engine_fields or {}), **arguments}
    return SamplingPlan(arguments, plan_guide(sampling, guide_backend), sampling.logit_bias)


def stops(stop_token_ids: tuple[int, ...], eos_token_ids: Collection[int]) -> tuple[int, list[int]]:
    """Return the end id (-1 = none) and the other stop ids of a request."""
    end_id = next((each for each in stop_token_ids if each in eos_token_ids), NO_END_ID)
    return end_id, [each for each in stop_token_ids if each != end_id]


def plan_guide(sampling: Sampling, backend: str | None) -> dict[str, Any] | None:
    """Return the guide as TensorRT-LLM takes it.

    A choice of texts becomes a regular expression. With ``llguidance`` TensorRT-LLM takes no structural tags, and
    grammars in that library's own form, so a tag becomes such a grammar.
    """
    guides: dict[str, Any] = {}
    if sampling.guided_json is not None:
        guides["json"] = _text(sampling.guided_json)
    if sampling.guided_regex is not None:
        guides["regex"] = sampling.guided_regex
    if sampling.guided_grammar is not None:
        guides["grammar"] = sampling.guided_grammar
    if sampling.guided_choice is not None:
        if not sampling.guided_choice:
            raise UnsupportedError("guided_choice has 0 texts, allowed is 1 or more")
        if "regex" in guides:
            raise UnsupportedError("2 guides are given (regex, choice), TensorRT-LLM follows at most one per request")
        guides["regex"] = "(" + "|".join(re.escape(each) for each in sampling.guided_choice) + ")"
    if sampling.structural_tag is not None:
        if backend == LLGUIDANCE and "grammar" not in guides:
            guides["grammar"] = _grammar(sampling.structural_tag)
        else:
            # XGrammar, as TensorRT-LLM calls it, takes a ``format`` only.
            guides["structural_tag"] = newer_form(sampling.structural_tag)
    if not guides:
        return None
    if len(guides) > 1:
        raise UnsupportedError(
            f"{len(guides)} guides are given ({', '.join(guides)}), TensorRT-LLM follows at most one per request"
        )
    if backend is None:
        raise UnableError(f"{sampling.guide} is set, {UNGUIDED}")
    return guides


def _seed(request: Generate, greedy: bool) -> int:
    seed = request.sampling.seed
    if seed is None:
        seed = 0 if greedy else stable_u64(name_of(request.request_id))
    return seed & SEED_MASK


def _grammar(structural_tag: str) -> str:
    try:
        return lark_grammar(structural_tag)
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"structural_tag is set, and llguidance cannot keep to this one: {error}") from None


def _text(schema: bytes) -> str:
    try:
        return schema.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"guided_json is not UTF-8: {error}") from None
