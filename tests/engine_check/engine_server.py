"""The stand-in of vLLM's server with habits that a check should find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq.asyncio

from lab.benchmarks.fleet import free_port
from tests.fakes.engine_server.threaded import servers_in_thread
from tests.fakes.engine_server.vllm import Options, VllmServer

BLOCK = 8


@dataclass(frozen=True)
class Habits:
    publishes: bool = True
    connects: bool = False
    """To an endpoint at which it does not listen."""
    replays: bool = True
    says_block_size: int = BLOCK
    says_cached_tokens: bool = True
    lists_sources: bool = True
    transfers: str = ""
    """Lines of its metrics about KV that moved."""
    swapped: bool = False
    """The endpoint that it names is its replay socket's."""


class HabitualServer(VllmServer):
    habits = Habits()

    def _metrics(self) -> str:
        text = super()._metrics().replace(f'block_size="{BLOCK}"', f'block_size="{self.habits.says_block_size}"')
        return text + self.habits.transfers

    def _sources(self) -> Any:
        sources = super()._sources()
        for source in sources:
            if self.habits.connects:
                source["endpoint"] = f"tcp://127.0.0.1:{free_port()}"
            if self.habits.swapped:
                source["endpoint"] = source["replay_endpoint"]
        return sources


@contextmanager
def engine_server(habits: Habits) -> Iterator[VllmServer]:
    """Run a server until the end of the block."""
    options = Options(
        block_size=BLOCK,
        blocks=4096,
        model="m",
        details=habits.says_cached_tokens,
        lists_sources=habits.lists_sources,
        sources_as_list=True,
        replays=habits.replays,
        publishes=habits.publishes,
    )

    def make(context: zmq.asyncio.Context, options: Options) -> VllmServer:
        server = HabitualServer(context, options)
        server.habits = habits
        return server

    with servers_in_thread(options, make=make) as running:
        yield running.servers[0]
