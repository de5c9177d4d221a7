"""A worker's model by its name on a hub, fetched into the cache of its machine where it is not there.

A process of its own does it: it can be ended at any moment, and what it has fetched stays for the next one. What it
imports is not for a worker that lives for weeks.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from poolgrid.server.process.leash import leashed
from poolgrid.server.process.tasks import owned
from poolgrid.server.workers.model_hub import ProgressLine, is_hub_name
from poolgrid.server.workers.settings import WorkerProcessSettings
from poolgrid.server.workers.start_phases import Phase, StartPhases

log = logging.getLogger(__name__)

S = TypeVar("S", bound=WorkerProcessSettings)

GRACE_S = 5.0
"""How long the fetching may take to end: it writes what it has."""


class ModelFetchError(RuntimeError):
    """The model could not be fetched."""


async def fetched_model(
    settings: S, loads: str | None, with_model: Callable[[S, Path], S] | None, start: StartPhases
) -> S:
    """Return settings by which the engine loads its model from a directory; the same where it has no hub's name.

    ``loads`` is what the engine would load, ``None`` when it loads no model. Raises ``ModelFetchError``.
    """
    if loads is None or with_model is None or not is_hub_name(loads):
        return settings
    path = await _fetch(loads, start)
    log.info("the model %s is in %s", loads, path)
    return with_model(settings, path)


async def _fetch(model: str, start: StartPhases) -> Path:
    start.enter(Phase.FETCH)
    process = await asyncio.create_subprocess_exec(
        *leashed(GRACE_S, [sys.executable, "-P", "-m", "poolgrid.server.workers.model_hub", model]),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    telling = owned(_follow(process, start), "progress of the model's fetching")
    try:
        answer = await process.stdout.read()
        said = await telling
        status = await process.wait()
    finally:
        telling.cancel()
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if status:
        raise ModelFetchError(said or f"fetching {model}: status {status}")
    return Path(answer.decode().strip())


async def _follow(process: Process, start: StartPhases) -> str:
    """Show how the fetching goes; return its last word that is no progress."""
    assert process.stderr is not None
    said = ""
    async for line in process.stderr:
        try:
            now = msgspec.json.decode(line, type=ProgressLine)
        except msgspec.DecodeError:
            if text := line.decode(errors="replace").strip():
                said = text
                log.warning("fetching the model: %s", said)
            continue
        start.move(now.bytes, now.total_bytes)
    return said
