"""From settings, a file and a JSON object to the arguments of ``LLM``, with the source of every value. Pure.

Precedence, lowest first:

1. ``default``: poolgrid's own defaults;
2. ``command line``: options and ``POOLGRID_*`` variables that were given;
3. the ``--extra-engine-args`` file;
4. ``--override-engine-args``;
5. ``run``: what this run cannot do without (a prefill engine has no overlap scheduler; events need a buffer; ...).

Merging is recursive: mappings join key by key, anything else replaces. One exception: a nested configuration whose
discriminator (``decoding_type``, ``algorithm``) changes is replaced whole: its other keys belong to the old kind.

Nothing here is built by TensorRT-LLM: nested configurations stay plain mappings, ready for its own argument helpers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from poolgrid.plugins.trtllm.arguments.contract import (
    ArgumentFault,
    ContractError,
    installed_contract,
    look_up,
    shown,
)
from poolgrid.plugins.trtllm.arguments.engine_config import (
    balancer_faults,
    balancer_warning,
    parse_json,
    parse_yaml,
    read_yaml,
)
from poolgrid.plugins.trtllm.arguments.engine_rules import (
    KVBM_MODULE,
    EventStreamEndpoints,
    check_engine,
    event_stream,
    kvbm_faults,
    stream_faults,
)
from poolgrid.plugins.trtllm.arguments.engine_rules import PATH as STREAM
from poolgrid.plugins.trtllm.settings import DYNAMIC_BATCH_WINDOW, EVENT_BUFFER_MAX_SIZE, TrtllmSettings

DEFAULT = "default"
COMMAND_LINE = "command line"
OVERRIDE = "--override-engine-args"
RUN = "run"

KVBM_CONNECTOR = {
    "connector_module": KVBM_MODULE,
    "connector_scheduler_class": "DynamoKVBMConnectorLeader",
    "connector_worker_class": "DynamoKVBMConnectorWorker",
}
"""Where Dynamo's block manager keeps its TensorRT-LLM connector (the ``kvbm`` package)."""

DISCRIMINATORS = ("decoding_type", "algorithm")

_ARGUMENT_OF_SETTING = {
    "model_path": "model",
    "tensor_parallel_size": "tensor_parallel_size",
    "enable_attention_dp": "enable_attention_dp",
    "kv_block_size": "kv_cache_config.tokens_per_block",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "max_batch_size": "max_batch_size",
    "max_num_tokens": "max_num_tokens",
    "max_seq_len": "max_seq_len",
    "guided_decoding_backend": "guided_decoding_backend",
    "trust_remote_code": "trust_remote_code",
}


_ARGUMENT_OF_OTHER_SETTING = {
    "kv_transfer_timeout_ms": "cache_transceiver_config.kv_transfer_timeout_ms",
}
"""Settings that become arguments in some modes only."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Arguments from one source."""

    source: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """What the engine starts with."""

    values: dict[str, Any]
    """Keyword arguments of ``LLM`` (or ``MultimodalEncoder``); nested configurations are plain mappings."""
    sources: dict[str, str]
    """Source of each value, by dotted path; a mapping has its source where it is empty, else its keys have theirs."""
    warnings: tuple[str, ...] = ()
    """What was asked for and is not done, one line each."""
    publishes_kv_events: bool = False
    """Whether the engine makes KV cache events at all."""
    stream: EventStreamEndpoints | None = None
    """Where it publishes them by itself; ``None`` = they are read through ``LLM``."""

    @property
    def attention_dp_size(self) -> int:
        """Ranks with a KV cache of their own: each is its own routing target."""
        return int(look_up(self.values, "tensor_parallel_size")) if look_up(self.values, "enable_attention_dp") else 1

    @property
    def block_size(self) -> int:
        return int(look_up(self.values, "kv_cache_config.tokens_per_block"))

    @property
    def gpus(self) -> tuple[int, str]:
        """How many GPUs the engine needs, and how that comes about (``TP 4 x PP 1``)."""
        sizes = {
            name: int(look_up(self.values, f"{kind}_parallel_size") or 1)
            for name, kind in (("TP", "tensor"), ("PP", "pipeline"), ("CP", "context"))
        }
        shown_sizes = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "CP"]
        return math.prod(sizes.values()), " x ".join(shown_sizes)

    def source(self, path: str) -> str:
        """Return where the value at a path came from: its own source, or the nearest one above or below."""
        if path in self.sources:
            return self.sources[path]
        above = path
        while "." in above:
            above = above.rpartition(".")[0]
            if above in self.sources:
                return self.sources[above]
        below = sorted({source for each, source in self.sources.items() if each.startswith(f"{path}.")})
        return ", ".join(below) or DEFAULT


def merge(layers: Sequence[Layer]) -> EngineArguments:
    """Merge layers, lowest first; the layers are not changed."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        _merge_into(values, layer.values, layer.source, sources, "")
    return EngineArguments(values, sources)


def _merge_into(
    into: dict[str, Any], values: Mapping[str, Any], source: str, sources: dict[str, str], path: str
) -> None:
    for key, value in values.items():
        where = f"{path}.{key}" if path else key
        old = into.get(key)
        if isinstance(value, Mapping) and value and isinstance(old, dict) and _same_kind(old, value):
            if not old:
                sources.pop(where, None)
            _merge_into(old, value, source, sources, where)
            continue
        if isinstance(value, Mapping) and not value and isinstance(old, dict):
            continue  # an empty mapping adds nothing
        for each in [each for each in sources if each == where or each.startswith(f"{where}.")]:
            del sources[each]
        if isinstance(value, Mapping) and value:
            fresh: dict[str, Any] = {}
            into[key] = fresh
            _merge_into(fresh, value, source, sources, where)
        else:
            into[key] = copy.deepcopy(value)
            sources[where] = source


def _same_kind(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return all(key not in new or key not in old or new[key] == old[key] for key in DISCRIMINATORS)


def setting_layers(settings: TrtllmSettings) -> tuple[Layer, Layer]:
    """Return the layer of defaults and the layer of what was given on the command line or in the environment."""
    defaults: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for setting, argument in _ARGUMENT_OF_SETTING.items():
        value = getattr(settings, setting)
        if setting in settings.model_fields_set:
            _put(given, argument, value)
        elif value not in (None, ""):
            _put(defaults, argument, value)
    _put(
        defaults,
        "scheduler_config",
        {
            "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
            "dynamic_batch_config": {
                "enable_batch_size_tuning": True,
                "enable_max_num_tokens_tuning": False,
                "dynamic_batch_moving_average_window": DYNAMIC_BATCH_WINDOW,
            },
        },
    )
    # Text workers get token ids and return token ids. Guided decoding and media need the tokenizer all the same.
    bare = settings.modality == "text" and settings.guided_decoding_backend is None
    _put(defaults, "skip_tokenizer_init", bare)
    if settings.disaggregation_mode in ("prefill", "decode"):
        _put(defaults, "cache_transceiver_config.backend", "DEFAULT")
        layer = given if "kv_transfer_timeout_ms" in settings.model_fields_set else defaults
        # Only the engine frees KV that is not fetched: it takes no abortion of a finished leg.
        _put(layer, "cache_transceiver_config.kv_transfer_timeout_ms", int(settings.kv_transfer_timeout_ms))
    if settings.disaggregation_mode == "prefill":
        _put(defaults, "disable_overlap_scheduler", True)
    if settings.disaggregation_mode == "encode":
        # MultimodalEncoder has a default of its own (16384), larger than LLM's.
        defaults.pop("max_num_tokens", None)
        defaults.pop("guided_decoding_backend", None)  # it makes no tokens
    if settings.publish_events_and_metrics and settings.disaggregation_mode != "encode":
        _put(defaults, "kv_cache_config.event_buffer_max_size", EVENT_BUFFER_MAX_SIZE)
    for each in settings.engine_argument:
        path, _, value = each.partition("=")
        keys = (f"{'  ' * depth}{key}:" for depth, key in enumerate(path.split(".")))
        text = "\n".join(keys) + f" {value}"
        _merge_into(given, parse_yaml(text, f"--engine-argument {path}"), COMMAND_LINE, {}, "")
    return Layer(DEFAULT, defaults), Layer(COMMAND_LINE, given)


def resolve(settings: TrtllmSettings, file: Layer | None = None, override: Layer | None = None) -> EngineArguments:
    """Return the arguments of a run, or raise ``ContractError`` with every fault, each with its path and source."""
    layers = [*setting_layers(settings), *(layer for layer in (file, override) if layer is not None)]
    merged = merge(layers)
    faults = installed_contract().check(merged.values)
    if not merged.values.get("model"):
        faults.insert(0, ArgumentFault("model", "is required and absent, give --model-path"))
    _raise(faults, merged)
    warnings = _overridden(layers[1].values, merged, settings.engine_argument)
    merged, publishes = _require(settings, merged, warnings)
    encodes = settings.modality == "multimodal" and settings.disaggregation_mode in ("prefill_and_decode", "prefill")
    if encodes and look_up(merged.values, "kv_cache_config.enable_block_reuse"):
        warnings.append(
            "kv_cache_config.enable_block_reuse is true with images: block hashes of TensorRT-LLM 1.2 may be equal "
            "for two images; set it to false, or use a later release"
        )
    faults = check_engine(merged.values, settings.disaggregation_mode)
    faults += kvbm_faults(merged.values, settings.disaggregation_mode, settings.modality)
    _raise([*faults, *stream_faults(merged.values, merged.attention_dp_size)], merged)
    stream = event_stream(merged.values) if publishes else None
    return replace(merged, warnings=tuple(warnings), publishes_kv_events=publishes, stream=stream)


def _raise(faults: Sequence[ArgumentFault], arguments: EngineArguments) -> None:
    if faults:
        placed = [
            ArgumentFault(fault.path, f"{fault.message} (from {arguments.source(fault.path)})") for fault in faults
        ]
        raise ContractError("checking engine arguments, the engine is not started", placed)


def _overridden(given: Mapping[str, Any], merged: EngineArguments, arguments: Sequence[str]) -> list[str]:
    """Return what was given on the command line and lost to a file or to ``--override-engine-args``, a line each."""
    lost = []
    options = {path: f"--engine-argument {path}" for path, _, _ in (each.partition("=") for each in arguments)}
    for setting, path in {**_ARGUMENT_OF_SETTING, **_ARGUMENT_OF_OTHER_SETTING}.items():
        options[path] = f"--{setting.replace('_', '-')}"
    for path, option in options.items():
        wanted, found = _at(given, path), _at(merged.values, path)
        source = merged.source(path)
        if _has(given, path) and wanted != found and COMMAND_LINE not in source:
            lost.append(f"{option} is {shown(wanted)} and has no effect: {path} is {shown(found)} (from {source})")
    return lost


def resolve_files(settings: TrtllmSettings) -> EngineArguments:
    """Return the arguments of a run, with the file and the JSON object that the settings name read in."""
    file = override = None
    if settings.extra_engine_args is not None:
        file = Layer(str(settings.extra_engine_args), read_yaml(settings.extra_engine_args))
    if settings.override_engine_args:
        override = Layer(OVERRIDE, parse_json(settings.override_engine_args, OVERRIDE))
    arguments = resolve(settings, file, override)
    _raise(balancer_faults(arguments.values), arguments)
    warning = balancer_warning(arguments.values)
    return replace(arguments, warnings=(*arguments.warnings, warning)) if warning else arguments


def _require(settings: TrtllmSettings, merged: EngineArguments, warnings: list[str]) -> tuple[EngineArguments, bool]:
    """Add what the run requires; warn where that overrides an operator's argument."""
    needs: dict[str, Any] = {}
    values = merged.values

    def need(path: str, value: Any, why: str) -> None:
        if _at(values, path) == value:
            return
        source = merged.source(path)
        if _has(values, path) and source != DEFAULT:
            warnings.append(f"{path} is {shown(_at(values, path))} (from {source}), set to {shown(value)}: {why}")
        _put(needs, path, value)

    mode = settings.disaggregation_mode
    reuses = look_up(values, "kv_cache_config.enable_block_reuse")
    publishes = settings.publish_events_and_metrics and mode != "encode"
    if publishes:
        need("enable_iter_perf_stats", True, "without it the PyTorch backend has no statistics to publish")
        if not reuses:
            source = merged.source("kv_cache_config.enable_block_reuse")
            warnings.append(
                f"kv_cache_config.enable_block_reuse is false (from {source}): the engine reuses nothing and makes no "
                "KV events, routers will see no cached blocks on this worker"
            )
            need("kv_cache_config.event_buffer_max_size", 0, "without block reuse there are no events")
        elif event_stream(values) is not None:
            need("kv_cache_config.event_buffer_max_size", 0, f"{STREAM} publishes the events, in place of the buffer")
            if look_up(values, "kv_cache_config.use_kv_cache_manager_v2") == "auto":
                need("kv_cache_config.use_kv_cache_manager_v2", True, f"only the second manager has {STREAM}")
        elif not look_up(values, "kv_cache_config.event_buffer_max_size"):
            need(
                "kv_cache_config.event_buffer_max_size",
                EVENT_BUFFER_MAX_SIZE,
                "0 means no events, and --publish-events-and-metrics is on",
            )
    elif event_stream(values) is not None:
        warnings.append(
            f"{STREAM} is given, and no process follows it: events are published only without "
            "--no-publish-events-and-metrics, and by no encode worker"
        )
    if settings.connector == "kvbm":
        need("kv_connector_config", dict(KVBM_CONNECTOR), "--connector kvbm")
        need(
            "kv_cache_config.enable_partial_reuse",
            False,
            "the kvbm connector moves whole blocks, a partly reused one would be offloaded under a wrong name",
        )
    if mode == "prefill":
        need("disable_overlap_scheduler", True, "a prefill engine must not overlap: its only step is the first")
    if not needs:
        return merged, bool(publishes and reuses)
    result = EngineArguments(copy.deepcopy(values), dict(merged.sources))
    if "kv_connector_config" in needs:
        # Replaced whole: another connector's keys must not stay.
        result.values.pop("kv_connector_config", None)
        for each in [each for each in result.sources if each.partition(".")[0] == "kv_connector_config"]:
            del result.sources[each]
    _merge_into(result.values, needs, RUN, result.sources, "")
    return result, bool(publishes and reuses)


def render(arguments: EngineArguments) -> str:
    """Return the arguments as a YAML document that can be used as a file, each line with its source as a comment."""
    lines: list[tuple[str, str]] = []

    def walk(values: Mapping[str, Any], path: str, indent: int) -> None:
        for key in sorted(values, key=str):
            value = values[key]
            where = f"{path}.{key}" if path else str(key)
            label = "  " * indent + _flow(key) + ":"
            if isinstance(value, dict) and value and where not in arguments.sources:
                lines.append((label, ""))
                walk(value, where, indent + 1)
            else:
                lines.append((f"{label} {_flow(value)}", arguments.source(where)))

    walk(arguments.values, "", 0)
    width = max((len(text) for text, source in lines if source), default=0)
    return "".join(f"{text.ljust(width)}  # {source}\n" if source else f"{text}\n" for text, source in lines)


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _put(into: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for key in above:
        into = into.setdefault(key, {})
    into[last] = value


def _at(values: Mapping[str, Any], path: str) -> Any:
    value: Any = values
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _has(values: Mapping[str, Any], path: str) -> bool:
    above, _, last = path.rpartition(".")
    holder = _at(values, above) if above else values
    return isinstance(holder, Mapping) and last in holder
