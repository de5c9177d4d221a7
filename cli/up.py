"""`poolgrid up`: a pool or a fleet on one machine, each part a process of its own, watched until the end.

``ready URL`` is printed once every part is ready. The status is 1 when a part did not start; a part
that dies later is started again, and ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from poolgrid.cli.local_pool import LocalPool, UpSettings
from poolgrid.cli.part import PartFailed
from poolgrid.cli.service_process import say_ready
from poolgrid.frontend.prompt_model import ModelDirectoryError, PromptModel
from poolgrid.runtime import lifecycle, logs
from poolgrid.runtime.tasks import unless

log = logging.getLogger(__name__)


def run_up(settings: UpSettings) -> int:
    """Run a pool until SIGINT or SIGTERM; return the exit status."""
    try:
        logs.configure("up", settings.log_level)
        model = PromptModel.load(settings.model_path)
    except (ValueError, ModelDirectoryError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if settings.pools is not None:
        return run_fleet(settings, settings.pools, model)
    return _run(lambda directory: LocalPool(settings, settings.data_dir or directory, model))


def run_fleet(settings: UpSettings, path: Path, model: PromptModel) -> int:
    """Run the fleet of a pool-grid document; return the exit status."""
    from poolgrid.cli.fleet import LocalFleet
    from poolgrid.global_router.core.document.problems import GridDocumentError
    from poolgrid.global_router.document_file import read_document_file

    try:
        document = read_document_file(path).document
    except GridDocumentError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return _run(lambda _: LocalFleet(settings, path, document, model))


class Local(Protocol):
    """What runs on this machine until it is told to stop."""

    async def start(self) -> str:
        """Start every part; return the URL of the OpenAI API once it can serve."""
        ...

    def greeting(self, url: str) -> str:
        """Return what a newcomer should know."""
        ...

    async def stop(self) -> None:
        """End every part."""
        ...


def _run(make: Callable[[Path], Local]) -> int:
    status = 0

    async def main(stop: asyncio.Event) -> None:
        nonlocal status
        with tempfile.TemporaryDirectory(prefix="poolgrid-") as temporary:
            pool = make(Path(temporary))
            try:
                await unless(stop, _start(pool), "start")
                await stop.wait()
            except (PartFailed, TimeoutError, OSError) as error:
                log.error("%s", error or "the workers did not join in time")
                status = 1
            finally:
                await pool.stop()

    lifecycle.run(main)
    return status


async def _start(local: Local) -> None:
    url = await local.start()
    sys.stderr.write(local.greeting(url))
    sys.stderr.flush()
    say_ready(url)
