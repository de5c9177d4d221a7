"""What the arguments of one engine, or of two engines that work together, must be to each other.

The contract (``poolgrid.plugins.trtllm.arguments.contract``) knows fields one at a time; these rules know them
together. All functions are pure, take well-typed arguments, and return every fault with its path. Sources of the rules:
TensorRT-LLM 1.2.1, as collected in ``tests/trtllm_upstream``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from poolgrid.plugins.trtllm.arguments.contract import KV_CACHE, ArgumentFault, look_up, shown

Mode = Literal["prefill_and_decode", "prefill", "decode", "encode"]

GRAPH_BATCH_DEFAULT = 128
"""Largest CUDA graph batch that TensorRT-LLM generates when neither sizes nor a maximum are given."""

MAX_BATCH_SIZE_DEFAULT = 2048
"""TensorRT-LLM's own, where ``max_batch_size`` is null."""


def graph_batch_sizes(maximum: int, padding: bool) -> list[int]:
    """Return the CUDA graph batch sizes that TensorRT-LLM 1.2.1 makes for a maximum (0 = 128)."""
    maximum = maximum or GRAPH_BATCH_DEFAULT
    sizes = [1, 2, 4, *range(8, 129, 8)] if padding else [*range(1, 32), 32, 64, 128]
    power = 256
    while power <= maximum:
        sizes.append(power)
        power *= 2
    kept = [size for size in sizes if size <= maximum]
    return kept if kept and kept[-1] == maximum else [*kept, maximum]


def draft_tokens(arguments: Mapping[str, Any]) -> int:
    """Return how many tokens are drafted per step: 0 without speculative decoding."""
    speculative = arguments.get("speculative_config")
    if not speculative:
        return 0
    if speculative.get("decoding_type") == "MTP":
        return int(speculative.get("max_draft_len") or speculative.get("num_nextn_predict_layers", 1))
    return int(speculative.get("max_draft_len") or 0)


def prompt_limit(arguments: Mapping[str, Any]) -> int | None:
    """Return the longest prompt an engine takes, where its arguments alone say it; ``None`` = the model decides."""
    limits = [look_up(arguments, "max_seq_len"), look_up(arguments, "max_input_len")]
    if not look_up(arguments, "enable_chunked_prefill"):
        limits.append(look_up(arguments, "max_num_tokens"))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def check_engine(arguments: Mapping[str, Any], mode: Mode) -> list[ArgumentFault]:
    """Return what contradicts itself in the arguments of one engine that works in a mode."""
    faults = [*_check_graphs(arguments), *_check_speculation(arguments), *check_experts(arguments)]
    faults += _check_events(arguments)
    return faults + list(_check_transfer(arguments, mode)) if mode in ("prefill", "decode") else faults


def check_pair(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> list[ArgumentFault]:
    """Return what keeps a decode engine from taking over what a prefill engine hands it; paths say which side."""
    faults: list[ArgumentFault] = []

    def differ(path: str, why: str) -> None:
        left, right = look_up(prefill, path), look_up(decode, path)
        if left != right:
            faults.append(
                ArgumentFault(f"decode.{path}", f"is {shown(right)}, the prefill side has {shown(left)}: {why}")
            )

    differ("kv_cache_config.dtype", "KV blocks are copied as they are, both sides must store them alike")
    differ("kv_cache_config.tokens_per_block", "blocks must be the same on both sides")
    differ("kv_cache_config.max_attention_window", "both sides must keep the same windows")
    left, right = (_transceiver(side) for side in (prefill, decode))
    if left != right:
        faults.append(
            ArgumentFault(
                "decode.cache_transceiver_config.backend",
                f"is {shown(right)}, the prefill side has {shown(left)}: both must have the same (DEFAULT is NIXL)",
            )
        )
    faults += [ArgumentFault(f"prefill.{fault.path}", fault.message) for fault in check_engine(prefill, "prefill")]
    faults += [ArgumentFault(f"decode.{fault.path}", fault.message) for fault in check_engine(decode, "decode")]
    kinds = [(side.get("speculative_config") or {}).get("decoding_type") for side in (prefill, decode)]
    if kinds[0] != kinds[1] or draft_tokens(prefill) != draft_tokens(decode):
        faults.append(
            ArgumentFault(
                "decode.speculative_config",
                f"drafts {draft_tokens(decode)} tokens ({kinds[1]}), the prefill side {draft_tokens(prefill)} "
                f"({kinds[0]}): drafts made in prefill are continued in decode",
            )
        )
    prompt, sequence = prompt_limit(prefill), look_up(decode, "max_seq_len")
    if prompt is not None and sequence is not None and sequence <= prompt:
        faults.append(
            ArgumentFault(
                "decode.max_seq_len",
                f"is {sequence}, the prefill side takes prompts of {prompt} tokens: nothing can be generated after "
                f"prompts of {sequence} tokens and more",
                warning=sequence == prompt,
            )
        )
    for side, arguments in (("prefill", prefill), ("decode", decode)):
        faults += _check_buffer(arguments, prompt, side)
    return faults


def _transceiver(arguments: Mapping[str, Any]) -> str | None:
    backend = (arguments.get("cache_transceiver_config") or {}).get("backend")
    return "NIXL" if backend == "DEFAULT" else backend


def _check_buffer(arguments: Mapping[str, Any], prompt: int | None, side: str) -> Iterator[ArgumentFault]:
    path = f"{side}.cache_transceiver_config.max_tokens_in_buffer"
    buffer = (arguments.get("cache_transceiver_config") or {}).get("max_tokens_in_buffer")
    if prompt is None:
        if side == "prefill":
            yield ArgumentFault(
                "prefill.max_seq_len",
                "is null: without a longest prompt the transfer buffer cannot be sized",
                warning=True,
            )
    elif buffer is None or buffer < prompt:
        # TensorRT-LLM allocates a buffer of its own for a longer prompt.
        yield ArgumentFault(
            path,
            f"is {shown(buffer)}, the longest prompt has {prompt} tokens: transfers of longer prompts than the "
            "buffer are slower",
            warning=True,
        )


def _check_graphs(arguments: Mapping[str, Any]) -> Iterator[ArgumentFault]:
    graphs = arguments.get("cuda_graph_config")
    if not graphs:
        return
    sizes, maximum = graphs.get("batch_sizes"), graphs.get("max_batch_size", 0)
    if sizes and maximum:
        made = graph_batch_sizes(maximum, graphs.get("enable_padding", False))
        if sorted(sizes) != made:
            yield ArgumentFault(
                "cuda_graph_config.batch_sizes",
                f"is given with max_batch_size {maximum} and differs from the list that follows from it: keep one",
            )


def _check_speculation(arguments: Mapping[str, Any]) -> Iterator[ArgumentFault]:
    speculative = arguments.get("speculative_config")
    if not speculative:
        return
    kind = speculative.get("decoding_type")
    schedule = speculative.get("draft_len_schedule")
    if schedule:
        # JSON has no other keys than text.
        first = schedule.get(1, schedule.get("1"))
        if first != speculative.get("max_draft_len"):
            yield ArgumentFault(
                "speculative_config.draft_len_schedule",
                f"maps batch size 1 to {shown(first)}, allowed is max_draft_len "
                f"({shown(speculative.get('max_draft_len'))})",
            )
    stages = look_up(arguments, "pipeline_parallel_size")
    if kind in ("MTP", "Eagle") and stages > 1:
        yield ArgumentFault(
            "pipeline_parallel_size", f"is {stages} with {kind}, which TensorRT-LLM 1.2.1 supports only with 1"
        )


def check_experts(arguments: Mapping[str, Any]) -> list[ArgumentFault]:
    """Return what is wrong with the slots of experts; a balancer that is a path must have been read in."""
    balancer = look_up(arguments, "moe_config.load_balancer")
    experts = arguments.get("moe_expert_parallel_size")
    slots = balancer.get("num_slots") if isinstance(balancer, Mapping) else None
    if not (slots and experts and experts > 0 and slots % experts):
        return []
    message = f"is {slots}, allowed are multiples of moe_expert_parallel_size ({experts})"
    return [ArgumentFault("moe_config.load_balancer.num_slots", message)]


def _check_events(arguments: Mapping[str, Any]) -> Iterator[ArgumentFault]:
    if not look_up(arguments, "kv_cache_config.event_buffer_max_size"):
        return
    stages = look_up(arguments, "pipeline_parallel_size")
    if look_up(arguments, "enable_attention_dp") and stages > 1:
        yield ArgumentFault(
            "pipeline_parallel_size",
            f"is {stages} with attention data parallelism, whose ranks then publish no KV events; allowed is 1, "
            "or no published events",
        )


def _check_transfer(arguments: Mapping[str, Any], mode: Mode) -> Iterator[ArgumentFault]:
    if _transceiver(arguments) is None:
        yield ArgumentFault(
            "cache_transceiver_config.backend",
            f"is null on a {mode} engine: without it TensorRT-LLM reports that disaggregated serving is not enabled",
        )
    if mode == "prefill" and not look_up(arguments, "disable_overlap_scheduler"):
        yield ArgumentFault(
            "disable_overlap_scheduler", "is false, allowed on a prefill engine is true: its only step is the first"
        )
    beams = look_up(arguments, "max_beam_width")
    if beams is not None and beams > 1:
        yield ArgumentFault("max_beam_width", f"is {beams}, allowed with disaggregation is 1")
    if mode == "decode":
        tokens = look_up(arguments, "max_num_tokens")
        batch = look_up(arguments, "max_batch_size")
        drafts = draft_tokens(arguments)
        if batch is None:
            batch = MAX_BATCH_SIZE_DEFAULT
        if tokens is not None and tokens < batch * (drafts + 1):
            yield ArgumentFault(
                "max_num_tokens",
                f"is {tokens}, allowed on a decode engine are integers from {batch * (drafts + 1)}: "
                f"max_batch_size ({batch}) times {drafts} drafted tokens and the next one",
            )


KV_EVENTS = "kv_events_config"
PATH = f"{KV_CACHE}.{KV_EVENTS}"
PORT_MAX = 65_535

_TCP = re.compile(r"tcp://(.+):(\d{1,5})")
_EVERYWHERE = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Hosts that are bound and cannot be connected to, and what is."""


@dataclass(frozen=True, slots=True)
class EventStreamEndpoints:
    """Where an engine publishes its events."""

    endpoint: str
    """As rank 0 binds it."""
    replay_endpoint: str = ""
    """Empty = it has none: what is lost stays lost."""
    topic: str = ""

    def of_rank(self, rank: int) -> tuple[str, str]:
        return _of_rank(self.endpoint, rank), _of_rank(self.replay_endpoint, rank) if self.replay_endpoint else ""


def event_stream(values: Mapping[str, Any]) -> EventStreamEndpoints | None:
    """Return the stream that arguments ask for; ``None`` = events are read through ``LLM``."""
    given = (values.get(KV_CACHE) or {}).get(KV_EVENTS)
    if not isinstance(given, Mapping) or not given.get("enable_kv_cache_events"):
        return None
    return EventStreamEndpoints(
        look_up(values, f"{PATH}.endpoint"),
        look_up(values, f"{PATH}.replay_endpoint") or "",
        look_up(values, f"{PATH}.topic"),
    )


def stream_faults(values: Mapping[str, Any], ranks: int) -> Iterator[ArgumentFault]:
    """Yield what keeps the stream from being followed; none where there is no stream."""
    stream = event_stream(values)
    if stream is None:
        return
    if look_up(values, f"{PATH}.publisher") == "null":
        yield ArgumentFault(f"{PATH}.publisher", "is 'null', which publishes nothing; allowed is 'zmq', or null")
    if look_up(values, f"{KV_CACHE}.use_kv_cache_manager_v2") is False:
        yield ArgumentFault(
            f"{KV_CACHE}.use_kv_cache_manager_v2", f"is false with {PATH}, which only the second manager has"
        )
    if not look_up(values, f"{KV_CACHE}.enable_block_reuse"):
        yield ArgumentFault(PATH, f"is given, and {KV_CACHE}.enable_block_reuse is false: there are no events")
    windows = look_up(values, f"{KV_CACHE}.max_attention_window")
    if windows and len(set(windows)) > 1:
        yield ArgumentFault(
            f"{KV_CACHE}.max_attention_window",
            f"is {shown(windows)} with {PATH}, which publishes the blocks of one window: allowed are equal windows",
        )
    for kind in ("pipeline", "context"):
        size = look_up(values, f"{kind}_parallel_size")
        if size and size > 1:
            yield ArgumentFault(f"{kind}_parallel_size", f"is {size} with {PATH}, allowed is 1")
    spans: dict[str, int] = {}
    for name, endpoint in (("endpoint", stream.endpoint), ("replay_endpoint", stream.replay_endpoint)):
        if endpoint and not endpoint.startswith("ipc://"):
            port = _base_port(endpoint)
            highest = PORT_MAX + 1 - ranks
            if port is None or not 1 <= port <= highest:
                yield ArgumentFault(
                    f"{PATH}.{name}",
                    f"is {shown(endpoint)}, allowed are tcp://HOST:PORT with ports from 1 to {highest} (that of "
                    f"the first of {ranks} ranks), and ipc://PATH",
                )
            else:
                spans[name] = port
    if len(spans) == 2 and abs(spans["endpoint"] - spans["replay_endpoint"]) < ranks:
        yield ArgumentFault(
            f"{PATH}.replay_endpoint",
            f"is {shown(stream.replay_endpoint)}, {ranks} ports from there and from endpoint "
            f"({shown(stream.endpoint)}) on overlap",
        )


def _base_port(endpoint: str) -> int | None:
    found = _TCP.fullmatch(endpoint)
    return int(found[2]) if found else None


def _of_rank(endpoint: str, rank: int) -> str:
    found = _TCP.fullmatch(endpoint)
    if found is None:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"tcp://{_EVERYWHERE.get(found[1], found[1])}:{int(found[2]) + rank}"


KVBM_MODULE = "kvbm.trtllm_integration.connector"
BY_TOKENS = "KVBM (--connector kvbm) matches blocks by their tokens alone"


def uses_kvbm(values: Mapping[str, Any]) -> bool:
    """Return whether engine arguments name KVBM's connector."""
    config = values.get("kv_connector_config")
    return isinstance(config, Mapping) and KVBM_MODULE in str(config.get("connector_module"))


def kvbm_faults(values: Mapping[str, Any], mode: str, modality: str) -> Iterator[ArgumentFault]:
    """Yield what an engine with KVBM cannot be given; nothing without KVBM."""
    if not uses_kvbm(values):
        return
    if mode in ("decode", "encode"):
        yield ArgumentFault(
            "kv_connector_config",
            f"is KVBM's on a {mode} worker, which has no prompts to look up: allowed on prefill_and_decode and prefill",
        )
    for name in ("enable_lora", "lora_config"):
        if values.get(name):
            yield ArgumentFault(name, f"is {shown(values[name])}, and {BY_TOKENS}: adapters would share blocks")
    if modality != "text":
        yield ArgumentFault("kv_connector_config", f"is KVBM's with modality {modality}, whose requests it refuses")
    if values.get("enable_attention_dp") and (values.get("tensor_parallel_size") or 1) > 1:
        yield ArgumentFault("enable_attention_dp", "is true, and KVBM knows no ranks with caches of their own")
