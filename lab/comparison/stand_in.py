"""A stand-in for ``vllm serve`` in a rehearsal: the same API, events and metrics, no model, times of a constant rate.

    python -m lab.comparison.stand_in MODEL --port PORT --kv-events-config JSON ...

Prompts are computed one at a time, so a queue forms; a token of every stream comes once in a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from typing import Any

import zmq.asyncio

from poolgrid.kernel.wire.hashing import unpack_tokens
from poolgrid.server.frontend.prompt_model import PromptModel
from tests.fakes.engine_server.vllm import Options, VllmServer

PREFILL_TOKENS_PER_S = 3000.0
"""With texts at a tenth of their length, prompts take about as long as on an H200."""

STEP_S = 0.008
KV_BYTES_PER_BLOCK = 2_359_296
"""16 tokens of a model like Qwen3-8B in 16 bits: 36 layers, 8 heads of 128, keys and values."""


async def main(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    model = PromptModel.load(arguments.model)
    template = model.template
    assert template is not None, "the model of the comparison has a chat template"

    def render(messages: list[dict[str, Any]]) -> list[int]:
        return list(unpack_tokens(model.encode(template.render(messages, add_generation_prompt=True))))

    options = Options(
        block_size=arguments.block_size,
        blocks=int(arguments.kv_cache_memory_bytes / KV_BYTES_PER_BLOCK),
        model=arguments.served_model_name,
        root=arguments.model,
        max_model_len=36_864,
        step_s=STEP_S,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        render=render,
        kv_connector=bool(arguments.kv_transfer_config),
    )
    events = json.loads(arguments.kv_events_config)
    context = zmq.asyncio.Context()
    server = VllmServer(context, options)
    server.publish_at(*(events[name].replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start(arguments.port)
    await stop.wait()
    await server.stop()
    context.destroy(linger=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--kv-cache-memory-bytes", type=int, required=True)
    parser.add_argument("--kv-events-config", required=True)
    parser.add_argument("--kv-transfer-config", default="", help="anything: it moves KV to and from others of its kind")
    known, _ = parser.parse_known_args()
    asyncio.run(main(known))
