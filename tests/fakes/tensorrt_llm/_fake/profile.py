"""Which release of TensorRT-LLM is pretended, where releases differ in their surface.

``PROFILE`` is decided when the package is imported, by the word ``version`` of ``TRTLLM_FAKE``; 1.2.1 otherwise. In a
test's own process ``tests.fakes.tensorrt_llm_of`` imports the package anew for another one.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

ENVIRONMENT = "TRTLLM_FAKE"


@dataclass(frozen=True, slots=True)
class Profile:
    """How one release differs from the others."""

    version: str
    renamed_metrics: bool
    """``log_metrics_dict`` is called ``log_request_metrics_dict``, and ``log_iteration_stats`` is there."""
    later_disaggregation: bool
    """``DisaggregatedParams`` has the fields that came after 1.2, log probabilities of the first token among them."""
    request_priority: bool
    """``generate_async`` takes ``priority``; without ``waiting_queue_policy: priority`` it changes nothing."""
    sampler_ignores: bool
    """``TorchSampler`` takes penalties and seeds and does nothing with them."""
    media_keys: bool
    """Stored blocks name the media that they depend on (``mm_keys``)."""
    media_uuids: bool
    """A prompt may name its media (``multi_modal_uuids``), and events say that name; otherwise it is passed over."""
    second_cache_manager: bool
    """``kv_cache_config.use_kv_cache_manager_v2`` exists, with its own names of blocks."""
    salt_hash: str
    """What the first manager makes of a salt (``block_key.salt_id``); the second takes SHA-256."""
    names_salts: tuple[bool, bool]
    """Whether the first manager, and the second, say in events which salt a block was stored under."""
    second_by_default: bool
    """``auto`` is the second cache manager."""


PROFILES = {
    "1.2.1": Profile("1.2.1", False, False, False, True, True, False, False, "blake3", (False, False), False),
    "1.3": Profile("1.3.0", True, True, True, False, True, True, True, "std", (True, True), False),
    "1.4": Profile("1.4.0rc4", True, True, True, False, True, True, True, "std", (True, False), True),
}


def from_environment() -> Profile:
    """Return the release that the environment asks for."""
    wanted = json.loads(os.environ.get(ENVIRONMENT, "{}")).get("version", "1.2.1")
    if wanted not in PROFILES:
        raise ValueError(f"{ENVIRONMENT} asks for version {wanted!r}, the fake has {', '.join(PROFILES)}")
    return PROFILES[wanted]


PROFILE = from_environment()
