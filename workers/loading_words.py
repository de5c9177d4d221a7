"""A worker that loads tells its pool so, until its engine is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from poolgrid.transport.planes import PlaneContext
from poolgrid.wire import codec
from poolgrid.wire.loading import LOADING_FRAME, TELL_EVERY_S, LoadingWorker
from poolgrid.workers.adapters.sockets import CONSOLIDATOR, DealerSocket

FIRST_WORD_S = 0.25
"""An engine that is there by then has not been loading for anybody to see."""


async def tell_while_loading(context: PlaneContext, where: Callable[[], str], now: Callable[[], LoadingWorker]) -> None:
    """Send what ``now`` says to the consolidator that is ``where`` says, again and again until cancelled.

    While it is nowhere (empty) nothing is said. A word that the socket does not take is left out. Raises
    ``ValueError`` for an endpoint that cannot be used.
    """
    await asyncio.sleep(FIRST_WORD_S)
    endpoint, socket = "", None
    try:
        while True:
            if (there := where()) != endpoint:
                if socket is not None:
                    socket.close(orderly=False)
                # There are no answers.
                endpoint, socket = (
                    there,
                    DealerSocket(context, CONSOLIDATOR, there, lambda frames: None) if there else None,
                )
            if socket is not None:
                socket.send([LOADING_FRAME, codec.loading_worker.encode(now())])
            await asyncio.sleep(TELL_EVERY_S)
    finally:
        if socket is not None:
            socket.close(orderly=False)
