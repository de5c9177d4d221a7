"""Which facts of the contract an installed TensorRT-LLM contradicts: one line each, never a failure at the first.

``POOLGRID_TRTLLM_MODEL`` names a model's directory. With it, ``pytest -m trtllm`` asks the ``tensorrt_llm`` that is
installed, with that model; without, the fake. ``docs/trtllm.md`` (First runs on GPUs) says how to run it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from tests.fakes.tensorrt_llm._fake.block_key import block_key_hash
from tests.trtllm.facts import facts, fields_of

MODEL_VARIABLE = "POOLGRID_TRTLLM_MODEL"
"""The same name as in ``tests.fakes``, which installs no fake where it is set."""

MODEL = os.environ.get(MODEL_VARIABLE, "")

BLOCK = 32
PROMPT = list(range(1000, 1000 + 2 * BLOCK + 7))
"""Two whole blocks and a partial one, of ordinary tokens of any vocabulary."""

PATIENCE_S = 120.0

_ARGUMENTS = {
    "llm_args": "TorchLlmArgs",
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "dynamic_batch_config": "DynamicBatchConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
    "attention_dp_config": "AttentionDpConfig",
    "kv_connector_config": "KvCacheConnectorConfig",
    "torch_compile_config": "TorchCompileConfig",
}
_DATACLASSES = {
    "disaggregated_params": ("disaggregated_params", "DisaggregatedParams"),
    "sampling_params": ("sampling_params", "SamplingParams"),
    "guided_decoding_params": ("sampling_params", "GuidedDecodingParams"),
    "completion_output": ("executor.result", "CompletionOutput"),
    "lora_request": ("executor.request", "LoRARequest"),
    "scheduling_params": ("scheduling_params", "SchedulingParams"),
}
_REQUIRED = "<required>"


def attribute(module: str, name: str) -> Any:
    """What the installed package has under a name; ``None`` if nothing."""
    try:
        return getattr(importlib.import_module(f"tensorrt_llm.{module}" if module else "tensorrt_llm"), name, None)
    except ImportError:
        return None


def surface_contradictions() -> list[str]:
    """Compare names, fields, defaults and signatures; needs no GPU."""
    return [*_arguments(), *_dataclasses(), *_signatures(), *_enums()]


def _written(value: Any) -> Any:
    """A default as the facts write it."""
    if isinstance(value, enum.Enum):
        return value.name
    return f"{type(value).__name__}()" if hasattr(type(value), "model_fields") else value


def _fact(value: Any) -> Any:
    return (
        value.partition(".")[2] if isinstance(value, str) and re.match(r"(LoadFormat|SamplerType)\.", value) else value
    )


def _compare(where: str, known: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> Iterator[str]:
    """Compare fields (by name: their default, or ``_REQUIRED``)."""
    for name in known.keys() - found.keys():
        yield f"{where}.{name}: is in the contract, not in the installation"
    for name in found.keys() - known.keys():
        yield f"{where}.{name}: is in the installation, not in the contract"
    for name in known.keys() & found.keys():
        expected = _fact(known[name]["default"])
        if _written(found[name]) != expected:
            yield f"{where}.{name}: the default is {_written(found[name])!r}, the contract says {expected!r}"


def _arguments() -> Iterator[str]:
    for section, name in _ARGUMENTS.items():
        model = attribute("llmapi.llm_args", name)
        if model is None:
            yield f"llmapi.llm_args.{name}: is in the contract, not in the installation"
            continue
        found = {
            key: _REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
            for key, field in model.model_fields.items()
        }
        yield from _compare(name, fields_of(facts()[section]), found)


def _dataclasses() -> Iterator[str]:
    for section, (module, name) in _DATACLASSES.items():
        kind = attribute(module, name)
        if kind is None:
            yield f"{module}.{name}: is in the contract, not in the installation"
            continue
        known = {key: fact for key, fact in fields_of(facts()[section]).items() if key != "properties"}
        yield from _compare(name, known, dict(_fields(kind)))


def _fields(kind: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(kind):
        if field.name.startswith("_"):
            continue
        if field.default_factory is not dataclasses.MISSING:
            yield field.name, field.default_factory()
        else:
            yield field.name, _REQUIRED if field.default is dataclasses.MISSING else field.default


def _signatures() -> Iterator[str]:
    llm = attribute("llmapi", "LLM")
    for name in ("generate", "generate_async"):
        parameters = inspect.signature(getattr(llm, name)).parameters
        found = {
            key: _REQUIRED if each.default is inspect.Parameter.empty else each.default
            for key, each in parameters.items()
            if key != "self"
        }
        yield from _compare(f"LLM.{name}", facts()[name], found)
    for name in facts()["llm_methods"]:
        if not name.startswith("_iteration") and name != "tokenizer" and not hasattr(llm, name):
            yield f"LLM.{name}: is in the contract, not in the installation"


def _enums() -> Iterator[str]:
    for name in ("CapacitySchedulerPolicy", "ContextChunkingPolicy"):
        kind = attribute("llmapi.llm_args", name) or attribute("llmapi", name)
        found = [] if kind is None else [each.name for each in kind]
        if set(found) != set(facts()["enums"][name]):
            yield f"{name}: has {found}, the contract says {facts()['enums'][name]}"


# -- what an engine does -----------------------------------------------------------------------------------------------


def make_llm() -> Any:
    """Return an engine of the installation with the model, or of the fake."""
    kv_cache = attribute("llmapi", "KvCacheConfig")(
        free_gpu_memory_fraction=0.3, event_buffer_max_size=10_000, tokens_per_block=BLOCK
    )
    return attribute("llmapi", "LLM")(
        MODEL or "m", skip_tokenizer_init=True, kv_cache_config=kv_cache, enable_iter_perf_stats=True, max_batch_size=8
    )


def sampling(max_tokens: int = 8, **more: Any) -> Any:
    """Return greedy sampling that only its length ends."""
    return attribute("", "SamplingParams")(
        end_id=-1, pad_id=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **more
    )


async def read_until(read: Callable[[], Any], enough: Callable[[list[Any]], bool]) -> list[Any]:
    """Read again and again until it is enough, or the patience is over."""
    found: list[Any] = []
    try:
        async with asyncio.timeout(PATIENCE_S if MODEL else 10.0):
            while not enough(found):
                found += read()
                await asyncio.sleep(0.01)
    except TimeoutError:
        pass
    return found


async def _a_result(llm: Any) -> Iterator[str]:
    found = []
    result = llm.generate_async(PROMPT, sampling(), streaming=True)
    seen = [each async for each in result]
    if not all(each is result for each in seen):
        found.append("result: iteration yields different objects, the contract says always the same")
    output = result.outputs[0]
    if output.finish_reason != "length" or len(output.token_ids) != 8:
        found.append(f"result: ended with {output.finish_reason!r} after {len(output.token_ids)} tokens, not length, 8")
    again = await llm.generate_async(PROMPT, sampling())
    if again.outputs[0].token_ids != output.token_ids:
        found.append("result: greedy decoding of the same prompt gave other tokens")
    if not again.cached_tokens:
        found.append("result: a repeated prompt has cached_tokens 0")
    if not llm._check_health():
        found.append("LLM._check_health: is false of an engine that works")
    return iter(found)


async def _events(llm: Any) -> Iterator[str]:
    def is_stored(event: dict[str, Any]) -> bool:
        return bool(event["data"]["type"] == "stored")

    events = await read_until(lambda: llm.get_kv_cache_events(timeout=0), lambda read: sum(map(is_stored, read)) >= 2)
    found = []
    ids = [event["event_id"] for event in events]
    if ids != list(range(len(ids))):
        found.append(f"events: ids are {ids[:8]}..., the contract says from 0 without holes")
    if not events or events[0]["data"]["type"] != "created":
        found.append("events: the first is not created")
    example = facts()["events"]
    for event in events:
        kind = event["data"]["type"]
        if set(event) != set(example[kind]):
            found.append(f"events: {kind} has the keys {sorted(event)}, the contract says {sorted(example[kind])}")
            break
    blocks = [block for event in events if is_stored(event) for block in event["data"]["blocks"]]
    shape = example["stored"]["data"]["blocks"][0]
    if blocks and set(blocks[0]) - {"mm_keys"} != set(shape):
        found.append(f"events: a block has the keys {sorted(blocks[0])}, the contract says {sorted(shape)}")
    parent = 0
    for at, block in enumerate(blocks[:2]):
        parent = block_key_hash(PROMPT[at * BLOCK : (at + 1) * BLOCK], parent)
        if block["block_hash"] != parent:
            found.append(f"events: block {at} has the hash {block['block_hash']}, the contract's is {parent}")
            break
    if blocks and not any(len(block["tokens"]) < BLOCK for block in blocks):
        found.append("events: no partial block was stored at the end of a request")
    return iter(found)


async def _statistics(llm: Any) -> Iterator[str]:
    items = await read_until(lambda: llm.get_stats(timeout=0), bool)
    if not items:
        return iter(["statistics: none came with enable_iter_perf_stats"])
    example = {key for key in facts()["iteration_stats_example"] if not key.startswith("_")}
    found = []
    if set(items[0]) - {"requestStats"} != example:
        found.append(f"statistics: the keys {sorted(set(items[0]) ^ example)} differ from the contract's")
    for key in ("kvCacheStats", "inflightBatchingStats"):
        known = set(facts()["iteration_stats_example"][key])
        if items[0].get(key) and set(items[0][key]) != known:
            found.append(f"statistics.{key}: the keys {sorted(set(items[0][key]) ^ known)} differ from the contract's")
    return iter(found)


async def _prompt_logprobs(llm: Any) -> Iterator[str]:
    fresh = [each + 500 for each in PROMPT]
    done = await llm.generate_async(fresh, sampling(2, prompt_logprobs=1, logprobs=1))
    rows = done.outputs[0].prompt_logprobs or []
    if len(rows) != len(fresh):
        return iter([f"prompt_logprobs: {len(rows)} rows for {len(fresh)} tokens, the contract says as many"])
    if done.outputs[0].token_ids[0] not in rows[-1]:
        return iter(["prompt_logprobs: the last row is not about the first generated token"])
    return iter(())


async def _abort(llm: Any) -> Iterator[str]:
    result = llm.generate_async(PROMPT, sampling(30_000), streaming=True)
    async for _ in result:
        result.abort()
        break
    async with asyncio.timeout(PATIENCE_S):
        await result.aresult()
    reason = result.outputs[0].finish_reason
    if reason != "cancelled":
        return iter([f"abort: the request ended with {reason!r}, the contract says cancelled"])
    result.abort()  # does nothing but warn
    return iter(())


async def _perf_metrics(llm: Any) -> Iterator[str]:
    done = await llm.generate_async(PROMPT, sampling(2, return_perf_metrics=True))
    names = {getattr(key, "value", key) for key in done.metrics_dict}
    missing = set(facts()["enums"]["MetricNames"]) - names
    return iter([f"metrics_dict: lacks {sorted(missing)}"] if missing else [])


Probe = Callable[[Any], Awaitable[Iterator[str]]]

PROBES: dict[str, Probe] = {
    "a result": _a_result,
    "events": _events,
    "statistics": _statistics,
    "log probabilities of the prompt": _prompt_logprobs,
    "an abort": _abort,
    "metrics of a request": _perf_metrics,
}
"""In this order, on one engine: each builds on what was there before."""


async def engine_contradictions(llm: Any) -> dict[str, list[str]]:
    """Return what each probe finds; one that fails is a finding too."""
    found: dict[str, list[str]] = {}
    for name, probe in PROBES.items():
        try:
            found[name] = list(await probe(llm))
        except Exception as error:
            found[name] = [f"{name}: could not be asked: {error!r}"]
    return found
