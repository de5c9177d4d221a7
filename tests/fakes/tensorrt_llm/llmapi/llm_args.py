# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""The arguments of ``LLM``: pydantic models that forbid unknown keys, made of the contract facts.

Fields, types, defaults and ranges are read from ``contract_1_2_1.json``, with what other releases lack or add
(``_fake/surface.py``); only what no table can say is written here: how values depend on each other. The real models
need torch, MPI or a tokenizer in places, which are ``Any`` here, and building them touches the GPU; these do not.
"""

from __future__ import annotations

import copy
import json
import operator
import re
from collections.abc import Callable, Iterator
from enum import Enum, StrEnum
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from poolgrid.plugins.trtllm.arguments.engine_rules import KV_EVENTS

from .._fake.profile import PROFILE
from .._fake.surface import ADDED, GONE, LATER_FIELDS, RUN_TIME

_FACTS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "contract_1_2_1.json").read_text(encoding="utf-8"))
_REQUIRED = "<required>"


class StrictBaseModel(BaseModel):
    """Refuses what it does not know."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, populate_by_name=True)


# -- enums -------------------------------------------------------------------------------------------------------------


def _words(name: str) -> Any:
    return StrEnum(name, {each: each for each in _FACTS["enums"][name]})


CapacitySchedulerPolicy = _words("CapacitySchedulerPolicy")
ContextChunkingPolicy = _words("ContextChunkingPolicy")
BatchingType = _words("BatchingType")
SamplerType = _words("SamplerType")
LoadFormat: type[Any] = Enum("LoadFormat", {name: at for at, name in enumerate(_FACTS["enums"]["LoadFormat"])})  # type: ignore[misc]


# -- what values have to do with each other ----------------------------------------------------------------------------


class _CudaGraphRules(StrictBaseModel):
    @model_validator(mode="after")
    def _agree(self) -> Any:
        made: Any = self
        if made.batch_sizes is not None:
            made.batch_sizes = sorted(made.batch_sizes)
            if made.max_batch_size and made.batch_sizes != _graph_batches(made.max_batch_size, made.enable_padding):
                raise ValueError(
                    "Please don't set both cuda_graph_config.batch_sizes and cuda_graph_config.max_batch_size."
                )
        return self


def _graph_batches(maximum: int, padding: bool) -> list[int]:
    small = [1, 2, 4] + [8 * each for each in range(1, 17)] if padding else [*range(1, 32), 32, 64, 128]
    sizes = small + [2**each for each in range(8, maximum.bit_length())]
    sizes = [each for each in sizes if each <= maximum]
    return sizes if sizes[-1] == maximum else [*sizes, maximum]


class _DecodingRules(StrictBaseModel):
    @model_validator(mode="after")
    def _schedule(self) -> Any:
        made: Any = self
        if made.draft_len_schedule and made.draft_len_schedule.get(1) != made.max_draft_len:
            raise ValueError("draft_len_schedule must map batch size 1 to max_draft_len")
        return self


class _EagleRules(_DecodingRules):
    @model_validator(mode="after")
    def _required(self) -> Any:
        made: Any = self
        if made.max_draft_len is None:
            raise ValueError("max_draft_len is required for Eagle")
        if made.speculative_model is None:
            raise ValueError("Draft model must be provided for Eagle")
        return self


class _LlmRules(StrictBaseModel):
    @field_validator("env_overrides", mode="before", check_fields=False)
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return {key: str(each) for key, each in value.items()} if isinstance(value, dict) else value

    @field_validator("load_format", mode="before", check_fields=False)
    @classmethod
    def _load_format(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value.upper() not in LoadFormat.__members__:
                raise ValueError(f"Invalid LoadFormat: {value}")
            return LoadFormat[value.upper()]
        return value

    @model_validator(mode="after")
    def _defaults(self) -> Any:
        made: Any = self
        if made.max_batch_size is None:
            made.max_batch_size = 2048
        if made.max_beam_width is None:
            made.max_beam_width = 1
        if made.backend is None:
            made.backend = "pytorch"
        for name in ("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size"):
            if getattr(made, name) is None:
                setattr(made, name, -1)
        if made.checkpoint_format is None and made.checkpoint_loader is None:
            made.checkpoint_format = "HF"
        return self


# -- types and defaults, as the facts write them -----------------------------------------------------------------------

_NAMES: dict[str, Any] = {
    "None": NoneType,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "dict": dict[str, Any],
    "Path": Path,
    "pathlib.Path": Path,
    "CapacitySchedulerPolicy": CapacitySchedulerPolicy,
    "ContextChunkingPolicy": ContextChunkingPolicy,
    "LoadFormat": LoadFormat,
    "SamplerType": SamplerType,
}
"""What a word of a type stands for; models add themselves. Any other word is a class that only TensorRT-LLM has."""

_GENERIC: dict[str, Any] = {"list": list, "dict": dict, "set": set}


def _split(text: str, separator: str) -> Iterator[str]:
    depth, start = 0, 0
    for at, each in enumerate(text):
        depth += (each in "[(") - (each in "])")
        if each == separator and not depth:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()


def _type(text: str) -> Any:
    parts = [_one_type(each) for each in _split(text, "|")]
    return Any if Any in parts else reduce(operator.or_, parts)


def _one_type(text: str) -> Any:
    """A type without alternatives; what stands in parentheses or after a blank is a remark of the facts."""
    head, bracket, rest = text.partition("[")
    if not bracket or " " in head or "(" in head:
        return _NAMES.get(re.split(r"[ (]", text)[0], Any)
    inner, _, remark = rest.rpartition("]")
    if head == "Literal":
        return Literal[tuple(each.strip("'\"") for each in inner.split(","))]
    if remark.startswith(" subset of "):
        allowed = remark.removeprefix(" subset of ").partition(";")[0].split(",")
        return _GENERIC[head][Literal[tuple(allowed)]]
    return _GENERIC[head][tuple(_type(each) for each in _split(inner, ","))]


def _all_positive(values: list[int] | None) -> list[int] | None:
    if values is not None and any(each <= 0 for each in values):
        raise ValueError("all values must be positive")
    return values


_RANGES: dict[str, dict[str, Any]] = {
    ">= 0": {"ge": 0},
    "> 0": {"gt": 0},
    "[0,1]": {"ge": 0, "le": 1},
    "non-empty, all > 0": {"min_length": 1},
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "mpi_session": {"alias": "_mpi_session", "exclude": True},
    "speculative_model": {"validation_alias": AliasChoices("speculative_model", "speculative_model_dir")},
}


def _field(name: str, fact: dict[str, Any]) -> tuple[Any, Any]:
    written = fact["type"] or "Any"
    annotation = _UNIONS[written]() if written in _UNIONS else Any if written == "None" else _type(written)
    more = {**_RANGES.get(fact.get("range", ""), {}), **_SPECIAL.get(name, {})}
    if "non-empty" in written:
        more["min_length"] = 1
    if fact.get("range") == "non-empty, all > 0":
        annotation = Annotated[annotation, AfterValidator(_all_positive)]
    if fact.get("frozen"):
        more["frozen"] = True
    default = fact["default"]
    if isinstance(default, str) and default == _REQUIRED:
        return annotation, Field(..., **more)
    if isinstance(default, str) and default.endswith("()"):
        return annotation, Field(default_factory=_NAMES[default.removesuffix("()")], **more)
    if isinstance(default, list | dict):
        return annotation, Field(default_factory=lambda: copy.deepcopy(default), **more)
    if isinstance(default, str) and "." in default and default.partition(".")[0] in _NAMES:
        default = _NAMES[default.partition(".")[0]][default.partition(".")[2]]
    elif isinstance(annotation, type) and issubclass(annotation, Enum) and isinstance(default, str):
        default = annotation[default]
    return annotation, Field(default, **more)


def _facts_of(section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in section.items() if not name.startswith("_") and isinstance(each, dict)}


def _model(
    name: str,
    section: str,
    base: type[StrictBaseModel] = StrictBaseModel,
    facts: dict[str, Any] | None = None,
    **other: tuple[Any, Any],
) -> type[BaseModel]:
    """Make a model of a section of the facts, as the pretended release has it; ``other`` fields are as given."""
    fields = dict(_facts_of(_FACTS[section] if facts is None else facts))
    fields |= ADDED[PROFILE.version].get(section, {})
    for each in GONE.get(PROFILE.version, {}).get(section, ()):
        del fields[each]
    definitions = {each: other.get(each) or _field(each, fact) for each, fact in fields.items()}
    made: type[BaseModel] = create_model(name, __base__=base, __module__=__name__, **definitions)  # type: ignore[call-overload]
    _NAMES[name] = made
    return made


def _speculative() -> Any:
    return (
        Annotated[
            EagleDecodingConfig | MTPDecodingConfig | NGramDecodingConfig | DraftTargetDecodingConfig,
            Field(discriminator="decoding_type"),
        ]
        | None
    )


def _sparse_attention() -> Any:
    """The facts name these only; their fields are in the run-time ones."""
    union = RUN_TIME["unions"]["sparse_attention"]
    for variant, fields in union["variants"].items():
        kind = {union["discriminator"]: {"type": f"Literal['{variant}']", "default": variant}}
        _model(f"{variant}SparseAttention", f"sparse_attention.{variant}", facts={**fields, **kind})
    return reduce(operator.or_, (_NAMES[f"{variant}SparseAttention"] for variant in union["variants"])) | None


_UNIONS: dict[str, Callable[[], Any]] = {
    "SpeculativeConfig (union) | None": _speculative,
    "RocketSparse|DeepSeekSparse|SkipSoftmax AttentionConfig | None": _sparse_attention,
}
"""Types that the facts describe elsewhere."""


def _decoding(name: str, kind: str, base: type[StrictBaseModel] = _DecodingRules) -> type[BaseModel]:
    known = {**_FACTS["speculative"]["decoding_base"], **_FACTS["speculative"].get(kind, {})}
    known["decoding_type"] = {"type": f"Literal['{kind}']", "default": kind}
    return _model(name, f"speculative.{kind}", base, known)


# -- the models --------------------------------------------------------------------------------------------------------

if PROFILE.second_cache_manager:
    KVEventsConfig = _model("KVEventsConfig", KV_EVENTS, facts=LATER_FIELDS[KV_EVENTS])
    _NAMES[KV_EVENTS] = KVEventsConfig  # facts of later versions name sections where those of the contract name classes
KvCacheConfig = _model("KvCacheConfig", "kv_cache_config")
DynamicBatchConfig = _model("DynamicBatchConfig", "dynamic_batch_config")
SchedulerConfig = _model("SchedulerConfig", "scheduler_config")
CacheTransceiverConfig = _model("CacheTransceiverConfig", "cache_transceiver_config")
CudaGraphConfig = _model("CudaGraphConfig", "cuda_graph_config", _CudaGraphRules)
MoeLoadBalancerConfig = _model("MoeLoadBalancerConfig", "moe_load_balancer_config")
MoeConfig = _model("MoeConfig", "moe_config")
AttentionDpConfig = _model("AttentionDpConfig", "attention_dp_config")
Nvfp4GemmConfig = _model("Nvfp4GemmConfig", "nvfp4_gemm_config")
KvCacheConnectorConfig = _model("KvCacheConnectorConfig", "kv_connector_config")
PeftCacheConfig = _model("PeftCacheConfig", "peft_cache_config")
TorchCompileConfig = _model("TorchCompileConfig", "torch_compile_config")
LoraConfig = _model("LoraConfig", "lora_config")
EagleDecodingConfig = _decoding("EagleDecodingConfig", "Eagle", _EagleRules)
MTPDecodingConfig = _decoding("MTPDecodingConfig", "MTP")
NGramDecodingConfig = _decoding("NGramDecodingConfig", "NGram")
DraftTargetDecodingConfig = _decoding("DraftTargetDecodingConfig", "DraftTarget")
TorchLlmArgs = _model("TorchLlmArgs", "llm_args", _LlmRules)

TRTLLM_ENGINE_ONLY = frozenset({"build_config"})
"""Arguments of the TensorRT backend that the PyTorch backend refuses by name."""


# -- merging -----------------------------------------------------------------------------------------------------------

_NESTED_MERGED = "kv_cache_config"


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any], extra_llm_api_options: str | None = None
) -> dict[str, Any]:
    """The extra dict wins; only ``kv_cache_config`` is merged key by key."""
    merged = {**llm_args, **llm_args_dict}
    base = llm_args.get(_NESTED_MERGED)
    extra = llm_args_dict.get(_NESTED_MERGED)
    if base is not None and extra is not None:
        known = base.model_dump(exclude_unset=True) if isinstance(base, BaseModel) else dict(base)
        given = extra.model_dump(exclude_unset=True) if isinstance(extra, BaseModel) else dict(extra)
        merged[_NESTED_MERGED] = {**known, **given}
    converters: dict[str, type[BaseModel]] = {
        "kv_cache_config": KvCacheConfig,
        "moe_config": MoeConfig,
        "nvfp4_gemm_config": Nvfp4GemmConfig,
        "attention_dp_config": AttentionDpConfig,
        "lora_config": LoraConfig,
    }
    for name, kind in converters.items():
        if isinstance(merged.get(name), dict):
            merged[name] = kind(**merged[name])
    speculative = merged.get("speculative_config")
    if isinstance(speculative, dict):
        kinds = {
            "Eagle": EagleDecodingConfig,
            "MTP": MTPDecodingConfig,
            "NGram": NGramDecodingConfig,
            "DraftTarget": DraftTargetDecodingConfig,
        }
        if speculative.get("decoding_type") not in kinds:
            raise ValueError(f"Invalid decoding type: {speculative.get('decoding_type')}")
        merged["speculative_config"] = kinds[speculative["decoding_type"]](**speculative)
    return merged


def update_llm_args_with_extra_options(llm_args: dict[str, Any], extra_llm_api_options: str | None) -> dict[str, Any]:
    """The same from a YAML file; no path changes nothing."""
    if extra_llm_api_options is None:
        return llm_args
    with open(extra_llm_api_options, encoding="utf-8") as file:
        loaded = yaml.safe_load(file)
    return update_llm_args_with_extra_dict(llm_args, loaded or {}, extra_llm_api_options)
