"""vLLM's servers, ours, in a thread with a loop of their own, for tests that talk to processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq.asyncio

from tests.fakes.engine_server.vllm import Options, VllmServer

PATIENCE_S = 120.0


class ServerThread:
    """Servers that run."""

    def __init__(self, servers: Sequence[VllmServer], loop: asyncio.AbstractEventLoop) -> None:
        self.servers = servers
        self._loop = loop

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Have work done on the servers' loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


@contextmanager
def servers_in_thread(
    *options: Options, make: Callable[[zmq.asyncio.Context, Options], VllmServer] = VllmServer
) -> Iterator[ServerThread]:
    """Run a server with each of the options."""
    loop = asyncio.new_event_loop()
    context = zmq.asyncio.Context()
    running = ServerThread([make(context, each) for each in options], loop)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        for each in running.servers:
            running.do(each.start())
        yield running
    finally:
        for each in running.servers:
            running.do(each.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        context.destroy(linger=0)
