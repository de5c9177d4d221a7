"""What a test can choose about the engine behind the fake, since ``LLM`` itself takes only TensorRT-LLM's arguments.

``behaviour`` is read when an ``LLM`` is made. A process that a test starts gets it from ``TRTLLM_FAKE``, a JSON object
of these fields.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields

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
    late_notifications: int = 0
    """So many reads that find no event raise ``IndexError`` in place of ``asyncio.QueueEmpty``."""
    leak_failed_transfers: bool = False
    """A request that is cancelled while its KV is on its way keeps its blocks for ever."""


def from_environment() -> Behaviour:
    """Return the behaviour that the environment asks for."""
    given = json.loads(os.environ.get(ENVIRONMENT, "{}"))
    unknown = set(given) - {field.name for field in fields(Behaviour)}
    if unknown:
        raise ValueError(f"{ENVIRONMENT} names unknown fields: {sorted(unknown)}")
    return Behaviour(**given)


behaviour = from_environment()
