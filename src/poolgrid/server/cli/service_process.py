"""What every long-running command shares: logs, the ready line, errors at the start, the exit status.

A process prints one line ``ready ...`` on standard output when it answers, and reports it to systemd.

It ends with status 0 after SIGINT or SIGTERM, and with one line on standard error when it could not start: with status
2 when a restart cannot help (a value or a file of the configuration), with status 1 otherwise. The systemd units
restart a service unless its status is 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import threading
from collections.abc import Awaitable, Callable

import click
from prometheus_client import disable_created_metrics

from poolgrid.kernel.requests.log_fields import Field
from poolgrid.server.cli.command_line import LogChoice
from poolgrid.server.cli.options import option_name
from poolgrid.server.process import allocation, garbage, lifecycle
from poolgrid.server.process.service_manager import ServiceManager, service_manager
from poolgrid.server.process.tasks import detached

log = logging.getLogger(__name__)

FAULTS_OF_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)

BINDING = re.compile(r"^binding ([a-z_]+_port|port): ")
"""How the error of a port begins, with the name of its setting."""

_ready = threading.Event()

THREAD_SWITCH_S = 0.0002
"""How long a thread that renders, tokenizes or looks at media keeps the interpreter from the event loop, which asks for
it several times a request. 1 ms shows in the latency of all requests; at 0.1 ms the threads lose a tenth."""

PARENT_PIPE_VARIABLE = "POOLGRID_PARENT_PIPE"
"""Set by ``poolgrid up``: standard input is a pipe from the parent, and its end means that the parent is gone."""


def say_ready(*parts: str) -> None:
    """Print the ready line at once, also into a pipe; what the process has made so far stays for its life."""
    garbage.settle()
    allocation.keep_heap_trimmed()
    sys.stdout.write(" ".join(("ready", *parts)) + "\n")
    sys.stdout.flush()
    _ready.set()
    manager = service_manager.get()
    if manager is not None:
        manager.tell_ready()


Main = Callable[[asyncio.Event], Awaitable[None]]
"""A service: runs until the event is set."""


def run_service(name: str, chosen: LogChoice, prepare: Callable[[], Main], **fields: Field) -> None:
    """Run a service as this process's only job; ``fields`` are of every log line in JSON.

    ``prepare`` imports what the service is made of, and returns it.
    """
    try:
        chosen.configure(name, fields)
    except ValueError as error:
        click.echo(str(error), err=True)
        raise SystemExit(2) from None
    allocation.return_large_blocks()
    sys.setswitchinterval(THREAD_SWITCH_S)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter, which nothing reads
    garbage.suspend()
    main = prepare()
    garbage.resume()

    manager = ServiceManager.taken_from(os.environ)
    service_manager.set(manager)

    async def supervised(stop: asyncio.Event) -> None:
        if os.environ.get(PARENT_PIPE_VARIABLE):
            _stop_with_parent(asyncio.get_running_loop(), stop)
        if manager is None:
            await main(stop)
        else:
            await _managed(manager, main, stop)

    try:
        lifecycle.run(supervised)
        log.info("%s has ended", name)
    except (OSError, ValueError, RuntimeError) as error:
        log_failure(error)
        raise SystemExit(1 if _ready.is_set() else start_status(error)) from None


def log_failure(error: Exception) -> None:
    """Log why a process ends, without its traceback unless the level is debug."""
    if isinstance(error, OSError) and error.filename is not None:
        log.error("%s: %s", error.filename, error.strerror)
    else:
        for line in str(error).splitlines() or [type(error).__name__]:
            log.error("%s", BINDING.sub(lambda found: f"{option_name(found[1])}: ", line))
    log.debug("where it failed", exc_info=True)


def start_status(error: Exception) -> int:
    """Return the exit status of a start that failed: 2 for a fault of the configuration, 1 for any other."""
    is_configuration = isinstance(error, (ValueError, *FAULTS_OF_PATHS)) or getattr(error, "status", 1) == 2
    return 2 if is_configuration else 1


async def _managed(
    manager: ServiceManager, main: Callable[[asyncio.Event], Awaitable[None]], stop: asyncio.Event
) -> None:
    async def tell_stopping() -> None:
        await stop.wait()
        manager.tell_stopping()

    manager.begin_signs_of_life()
    telling = detached(tell_stopping(), "word of the end to the service manager")
    try:
        await main(stop)
    finally:
        telling.cancel()
        manager.close()


def _stop_with_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def wait() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass
        try:
            loop.call_soon_threadsafe(stop.set)
        except RuntimeError:
            pass  # the loop has ended already

    threading.Thread(target=wait, name="parent watch", daemon=True).start()
