"""Begins and ends a process's traces, where it has any."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack

from poolgrid.process.clock import Clock
from poolgrid.process.tracing.settings import TraceSettings, trace_target
from poolgrid.process.tracing.tracing import Tracing

log = logging.getLogger(__name__)


def open_tracing(
    opened: AsyncExitStack, settings: TraceSettings, clock: Clock, service: str, instance: str
) -> Tracing | None:
    """Return the traces of this process, ``None`` where they are off; ``opened`` sends the last of them.

    ``service`` names what it is (``poolgrid-router``), ``instance`` distinguishes several. Raises ``ValueError`` for
    settings that cannot be meant, and where the packages lack.
    """
    target = trace_target(settings, os.environ)
    if target is None:
        return None
    try:
        from poolgrid.process.tracing.otel import OtelSink, make_exporter
    except ImportError as error:
        raise ValueError(
            f"sending traces to {target.endpoint}: {error}; install poolgrid[otel], or unset the variables that begin "
            "with OTEL_"
        ) from None
    sink = OtelSink(make_exporter(target), service, instance)
    tracing = Tracing(target.sampling, sink, clock)
    # In a thread: a receiver that does not answer is waited for a moment.
    opened.push_async_callback(asyncio.to_thread, tracing.close)
    log.info(
        "traces go to %s (%s), %g of those that begin here", target.endpoint, target.protocol, target.sampling.ratio
    )
    return tracing
