"""What a test can choose about the engine behind the fake, since ``LLM`` itself takes only TensorRT-LLM's arguments.

``behaviour`` is read when an ``LLM`` is made. A process that a test starts gets it from ``TRTLLM_FAKE``, a JSON object
of these fields, with two more words:

* ``version``: which release is pretended (``_fake/profile.py``); it is decided when the package is imported.
* ``as_released``: with ``true``, everything that the release does to its callers is switched on (``as_released``), and
  the other fields of the object change that.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace

from .profile import PROFILE, Profile

ENVIRONMENT = "TRTLLM_FAKE"


@dataclass(slots=True)
class Behaviour:
    """The model and the machine that are pretended."""

    device_blocks: int = 1024
    """KV blocks that fit on the pretended GPU."""
    block_bytes: int = 65_536
    """Bytes of a block in the host cache: ``host_cache_size`` divided by this is its number of blocks."""
    model_max_seq_len: int = 131_072
    vocabulary_size: int = 32_000
    eos_probability: float = 0.0
    speedup: float = 0.0
    """0 = as fast as the machine goes; above, steps take the simulated time divided by it."""
    partial_blocks_max: int = 64
    """Partial blocks that are kept; the oldest is removed beyond."""
    null_diff_crash: bool = False
    """The event serializer fails on a null diff, as before the fix on main: the events that were with it are lost, and
    the next request is refused with the error."""
    leak_failed_transfers: bool = False
    """A request that is cancelled while its KV is on its way keeps its blocks for ever."""
    cancel_breaks_transfer: bool = False
    """After a generation request was cancelled the next one's KV transfer fails: a known issue of 1.4.0rc1."""

    rpc_call_ms: float = 0.0
    """How long a call for events or statistics takes: a synchronous call to the engine's process, made when a reader
    asks. The caller's thread waits, without a limit while that process does not answer (``Executor.stop_process``).
    A call for events that fails returns nothing and says so nowhere."""
    sampler_ignores: bool = False
    """Penalties and the seed are taken and change nothing, unless ``sampler_type`` is ``TRTLLMSampler``. Without a seed
    requests that sample differ from each other; greedy ones do not."""
    input_processing_ms: float = 0.0
    """How long ``generate_async`` itself works on a prompt with media before it returns."""
    health_method: bool = True
    """``LLM`` has ``_check_health``, which is private and not in every build."""
    one_thread: bool = False
    """``LLM`` must be shut down by the thread that made it, as MPI wants."""
    stop_file: str = ""
    """While there is a file of this name, the engine's process is stopped: for tests whose worker is a process."""
    machine: str = ""
    """Where the engine is: handles of tensors made on a machine of another name cannot be opened."""
    out_of_memory_at: tuple[int, ...] = ()
    """Iterations that run out of memory: all requests of the engine are answered with an error, and it goes on."""
    stdout_lines: int = 0
    """So many lines on standard output when an engine is made, and when it ends: its loggers write there."""
    leaves_process: bool = False
    """An engine starts a process of its own, which outlives it unless it is shut down in order."""
    lost_rank_file: str = ""
    """Once there is a file of this name, a rank of the engine is dead and the others wait for it for ever
    (``Executor.lose_rank``)."""


def as_released(profile: Profile = PROFILE) -> Behaviour:
    """Return what a release does to its callers, friendly or not."""
    return Behaviour(
        rpc_call_ms=1.0,
        sampler_ignores=profile.sampler_ignores,
        cancel_breaks_transfer=profile.second_by_default,
        input_processing_ms=20.0,
        one_thread=True,
        stdout_lines=200,
    )


def from_environment() -> Behaviour:
    """Return the behaviour that the environment asks for."""
    given = json.loads(os.environ.get(ENVIRONMENT, "{}"))
    given.pop("version", None)  # read where the package is imported
    start = as_released() if given.pop("as_released", False) else Behaviour()
    unknown = set(given) - {field.name for field in fields(Behaviour)}
    if unknown:
        raise ValueError(f"{ENVIRONMENT} names unknown fields: {sorted(unknown)}")
    if "out_of_memory_at" in given:
        given["out_of_memory_at"] = tuple(given["out_of_memory_at"])
    return replace(start, **given)


behaviour = from_environment()
