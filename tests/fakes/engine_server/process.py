"""vLLM's server as a process, with the arguments of ``vllm serve`` that a worker gives; ours, as the module beside it.

It takes any others. ``--fails`` is of no real server: it says some last words, and ends with that status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from dataclasses import replace

import zmq.asyncio

from tests.fakes.engine_server.vllm import Options, VllmServer

READERS_BLOCKS = 65_536


def say(words: str) -> None:
    sys.stderr.write(f"{words}\n")


async def main(arguments: argparse.Namespace) -> None:
    events = json.loads(arguments.kv_events_config)
    context = zmq.asyncio.Context()
    options = Options(model=arguments.served_model_name)
    if arguments.keeps_root:  # a reader of the quickstart talks to it for as long as they like
        options = replace(options, root=arguments.model, blocks=READERS_BLOCKS)
    server = VllmServer(context, options)
    server.publish_at(events["endpoint"], events["replay_endpoint"])
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # left open, the context may wait for ever at the process's end
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start(arguments.port)
    say(f"serving {arguments.model}")
    await stop.wait()
    say("ending in order")
    await server.stop()
    context.destroy(linger=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--kv-events-config", default="{}")
    parser.add_argument("--fails", type=int)
    parser.add_argument("--keeps-root", action="store_true", help="say which directory was given as the model")
    known, _ = parser.parse_known_args()
    if known.fails is not None:
        say("loading weights")
        say("ValueError: no such model architecture")
        sys.exit(known.fails)
    asyncio.run(main(known))
