"""What is closed at the end of a worker, in reverse order of opening."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType


def close_in_order(opened: AsyncExitStack, close: Callable[[bool], None]) -> None:
    """Have ``close`` called at the end: with ``False`` on cancellation, when nothing is waited for."""

    def end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close(not isinstance(error, asyncio.CancelledError))

    opened.push(end)
