"""What is used of the ``tensorrt_llm`` package, imported late: only a worker that drives it needs it.

Names are asked for where 1.2.1 has them. What differs between versions is probed (parameters, fields), never guessed
from version numbers.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from poolgrid.server.process.plugins import is_installed
from poolgrid.server.process.settings import OptionError
from poolgrid.server.workers.engines.lifecycle.engine_thread import EngineThread, start_engine
from poolgrid.server.workers.engines.lifecycle.health import EngineBrokenError

log = logging.getLogger(__name__)

LOG_LEVEL_VARIABLE = "TLLM_LOG_LEVEL"
"""What TensorRT-LLM takes its log level from: DEBUG, INFO, WARNING or ERROR."""

PRIORITY_POLICY = "waiting_queue_policy"
"""Field of ``SchedulerConfig``, after 1.2, that makes the engine honour priorities."""

MEDIA_NAMES = "multi_modal_uuids"
"""Key of ``TextPrompt``, after 1.2, by which a request names its media; older versions pass over it."""

KV_CACHE_MEMORY = "kv_cache"
"""Name of the KV cache among the kinds of memory that a sleeping engine frees."""

REQUEST_ERRORS = (ValueError, TypeError, NotImplementedError)
"""What TensorRT-LLM raises for a request that it does not take, besides its own ``RequestError``."""


async def start_library(
    thread: EngineThread, version: str, make: Callable[[], Any], shut_down: Callable[[Any], None]
) -> Any:
    """Return the engine that ``make`` makes, as ``start_engine`` does; raises ``EngineBrokenError`` if it fails."""
    try:
        return await start_engine(thread, make, shut_down)
    except Exception as error:
        raise EngineBrokenError(f"starting TensorRT-LLM {version} failed: {error!r}") from error


class LibraryMissingError(OptionError):
    """The package is not there, or is not one that poolgrid can drive."""


@dataclass(frozen=True, slots=True)
class TrtllmLibrary:
    """Classes and functions of the installed TensorRT-LLM."""

    version: str
    llm: Callable[..., Any]
    multimodal_encoder: Callable[..., Any]
    sampling_params: Callable[..., Any]
    guided_decoding_params: Callable[..., Any]
    disaggregated_params: type[Any]
    scheduling_params: Callable[..., Any]
    lora_request: Callable[..., Any]
    request_error: type[Exception]
    merge_arguments: Callable[..., dict[str, Any]]
    kv_cache_retention: type[Any] | None
    """``KvCacheRetentionConfig``, where the version has it."""
    conversation_params: Callable[..., Any] | None
    """``ConversationParams``, where the version has it (after 1.2)."""
    logprob: Callable[..., Any] | None
    """Class of a token's log probability, where the version has one."""
    scheduler_fields: frozenset[str]
    """Fields of ``SchedulerConfig``."""
    prompt_fields: frozenset[str]
    """Keys that a prompt may have in addition to its text (``TextPrompt``)."""

    @property
    def names_media(self) -> bool:
        """Whether requests may say what their media are called in events."""
        return MEDIA_NAMES in self.prompt_fields

    def make_engine(self, arguments: Mapping[str, Any], encoder: bool) -> Any:
        """Start an engine with resolved arguments; takes minutes, blocks, and needs GPUs."""
        given = dict(arguments)
        if PRIORITY_POLICY in self.scheduler_fields and not encoder:
            # Without it priorities are taken and change nothing.
            given["scheduler_config"] = {PRIORITY_POLICY: "priority", **(given.get("scheduler_config") or {})}
        built = self.merge_arguments({}, given)
        if encoder:
            # It has one backend, and its constructor names none.
            built.pop("backend", None)
            return self.multimodal_encoder(**built)
        return self.llm(**built)


_ADVICE = (
    "run it where TensorRT-LLM 1.2 is (NVIDIA's release container has it), install the extra trtllm with NVIDIA's "
    "package index, or use --engine simulated"
)


def check_library() -> None:
    """Raise ``LibraryMissingError`` where the package is absent, without importing it."""
    if not is_installed("tensorrt_llm"):
        raise LibraryMissingError(
            f"starting --engine trtllm: the package tensorrt_llm is not installed in this Python; {_ADVICE}"
        )


def import_library() -> str:
    """Import TensorRT-LLM, with this process's log level, and return its version; raises ``LibraryMissingError``."""
    # Before the import, which reads it; the engine's processes inherit it. Who has set it knows why.
    os.environ.setdefault(LOG_LEVEL_VARIABLE, logging.getLevelName(log.getEffectiveLevel()))
    check_library()
    try:
        package = importlib.import_module("tensorrt_llm")
    except ImportError as error:
        raise LibraryMissingError(f"starting --engine trtllm: tensorrt_llm fails: {error}; {_ADVICE}") from error
    return str(getattr(package, "__version__", "unknown"))


def load_library() -> TrtllmLibrary:
    """Return what is used of TensorRT-LLM for language models; raise ``LibraryMissingError`` saying what is missing."""
    version = import_library()

    def name(module: str, attribute: str) -> Any:
        try:
            return getattr(importlib.import_module(f"tensorrt_llm.{module}"), attribute)
        except (ImportError, AttributeError) as error:
            raise LibraryMissingError(
                f"starting --engine trtllm: tensorrt_llm {version} has no {module}.{attribute} ({error}); "
                "poolgrid is written for 1.2"
            ) from error

    def optional(module: str, attribute: str) -> Any:
        try:
            return name(module, attribute)
        except LibraryMissingError:
            return None

    return TrtllmLibrary(
        version=version,
        llm=name("llmapi", "LLM"),
        multimodal_encoder=name("llmapi", "MultimodalEncoder"),
        sampling_params=name("llmapi", "SamplingParams"),
        guided_decoding_params=name("llmapi", "GuidedDecodingParams"),
        disaggregated_params=name("llmapi", "DisaggregatedParams"),
        scheduling_params=name("scheduling_params", "SchedulingParams"),
        lora_request=name("executor.request", "LoRARequest"),
        request_error=name("llmapi", "RequestError"),
        merge_arguments=name("llmapi.llm_utils", "update_llm_args_with_extra_dict"),
        kv_cache_retention=optional("llmapi", "KvCacheRetentionConfig"),
        conversation_params=optional("conversation_params", "ConversationParams"),
        logprob=optional("executor.result", "Logprob"),
        scheduler_fields=frozenset(getattr(optional("llmapi", "SchedulerConfig"), "model_fields", ())),
        prompt_fields=frozenset(getattr(optional("inputs", "TextPrompt"), "__annotations__", ())),
    )


def parameters_of(call: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a callable's parameters."""
    return frozenset(inspect.signature(call).parameters)


def observe_release(llm: Any, told: Callable[[], object]) -> None:
    """Have ``told`` called when an engine that can sleep frees its KV cache: it makes no event of that."""
    release = getattr(llm, "release", None)
    if release is None:
        return

    def released(tags: Any = None, *args: Any, **more: Any) -> Any:
        if tags is None or any(str(getattr(tag, "value", tag)) == KV_CACHE_MEMORY for tag in tags):
            told()
        return release(tags, *args, **more)

    llm.release = released


def orders_by_priority(llm: Any) -> bool:
    """Return whether an engine takes those that wait by their priority."""
    scheduler = getattr(getattr(llm, "args", None), "scheduler_config", None)
    return str(getattr(scheduler, PRIORITY_POLICY, "")).rpartition(".")[2].lower() == "priority"


def is_alive(llm: Any) -> bool:
    """Ask an engine whether it lives; a build that cannot tell (the question is private) counts as alive."""
    check = getattr(llm, "_check_health", None)
    if check is None:
        return True
    try:
        return bool(check())
    except Exception as error:
        log.warning("asking the engine for its health failed: %r", error)
        return False
