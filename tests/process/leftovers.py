"""What a part of a process that has ended leaves behind: tasks, timers, threads, sockets and other open files."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import Context
from types import FrameType
from typing import Any

import pytest

from poolgrid.server.frontend.prompt_model import PromptModel

PATIENCE_S = 120.0
"""How long threads may take to end."""

FIRST_PATIENCE_S = 2.0
"""The same while a library's own threads, which stay, may be among them."""


class Broken(Exception):
    """What a test lets a step raise."""


def breaks(*_: Any, **__: Any) -> Any:
    """Stand in for a step that fails."""
    raise Broken


class _Loop(asyncio.SelectorEventLoop):
    """A loop that remembers its timers."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[asyncio.TimerHandle] = []

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        self.timers.append(handle)
        return handle


load_once = functools.cache(PromptModel.load)
"""In place of ``PromptModel.load``, which takes a fifth of a second of CPU and opens nothing."""


def ended_leaving_nothing(
    serve: Callable[[], Awaitable[None]], error: type[BaseException] | None = None, match: str | None = None
) -> None:
    """Run ``serve`` to its end, which is ``error`` if there is one, and look for what is left of it."""

    async def once() -> tuple[BaseException | None, list[str]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _Loop)
        loop.timers.clear()
        tasks = asyncio.all_tasks()
        caught = None
        if error is None:
            await serve()
        else:
            with pytest.raises(error, match=match) as info:
                await serve()
            # Kept until everything was looked at: its frames keep alive what somebody has forgotten to close.
            caught = info.value
        for _ in range(3):
            await asyncio.sleep(0)  # what was cancelled has its last turn
        await loop.shutdown_default_executor()
        left = [repr(task) for task in asyncio.all_tasks() - tasks]
        left += [repr(each) for each in loop.timers if not each.cancelled() and each.when() > loop.time()]
        return caught, left

    def run() -> tuple[BaseException | None, list[str]]:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            return runner.run(asyncio.wait_for(once(), 60))

    gc.collect()  # what others have left must not vanish meanwhile, in place of what this leaves
    gc.freeze()  # and a process that ends collects, several times here: a second each, of all that tests have imported
    if _left_behind(run, FIRST_PATIENCE_S):
        # Libraries open things that they keep for good; what is left again is ours.
        assert _left_behind(run, PATIENCE_S) == []


def _left_behind(run: Callable[[], tuple[BaseException | None, list[str]]], patience_s: float) -> list[str]:
    """Run once and tell what is left."""
    threads, files, natives = set(threading.enumerate()), _files(), _natives()
    caught, left = run()
    for thread in set(threading.enumerate()) - threads:
        thread.join(patience_s)  # told to end, and not waited for
    left += [repr(thread) for thread in set(threading.enumerate()) - threads]
    left += [f"{count} more of {what}" for what, count in (_files() - files).items()]
    # The system takes a moment to forget a thread that has ended.
    until_s = time.monotonic() + patience_s
    while _natives() > natives and time.monotonic() < until_s:
        threading.Event().wait(0.005)
    if _natives() > natives:
        left.append("a thread that is not Python's: ZMQ has two per context")
    del caught
    return left


def refused_for_its_port(start: Callable[..., Callable[[], Awaitable[None]]], port: str, **settings: Any) -> None:
    """Start with a ``port``, a setting, that is taken: it is named, and nothing is left."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken: dict[str, Any] = {port: holder.getsockname()[1]}
        ended_leaving_nothing(start(**settings, **taken), OSError, f"binding {port}:")


def _files() -> Counter[str]:
    """Count what is open by what it is; numbers of sockets and pipes differ from run to run."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
        except OSError:
            pass  # the directory's own
    return found


def _natives() -> int:
    return len(os.listdir("/proc/self/task"))


def collected() -> Counter[str]:
    """Return what of ours the collector finds, by type or, of frames, by function."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found: list[Any] = list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    frames = [each.f_code for each in found if isinstance(each, FrameType)]
    types = [f"{type(each).__module__}.{type(each).__qualname__}" for each in found]
    ours = [name for name in types if name.startswith("poolgrid.")]
    return Counter(ours + [code.co_qualname for code in frames if "/tests/" not in code.co_filename])
