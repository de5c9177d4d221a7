"""A worker's model out of the cache of its machine, fetched into it where it is not there.

`poolgrid model fetch` does it, in a process of its own: it can be ended at any moment, and what it has fetched stays
for the next one. What it imports is not for a worker that lives for weeks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from poolgrid.process.leash import leashed
from poolgrid.process.tasks import owned
from poolgrid.workers.model_cache.cache import default_directory
from poolgrid.workers.model_cache.fetching import is_hub_name
from poolgrid.workers.settings import WorkerProcessSettings
from poolgrid.workers.start_phases import Phase, StartPhases

log = logging.getLogger(__name__)

S = TypeVar("S", bound=WorkerProcessSettings)

GRACE_S = 5.0
"""How long the fetching may take to end: it writes what it has."""

PHASES = {"wait": Phase.WAIT, "list": Phase.FETCH, "fetch": Phase.FETCH, "verify": Phase.VERIFY}


class ProgressLine(msgspec.Struct, frozen=True):
    """A line that `poolgrid model fetch --progress-lines` writes."""

    phase: str
    bytes: int = 0
    """Done."""
    total_bytes: int = 0
    """To be done in this phase; 0 = not known."""


class _Fetched(msgspec.Struct):
    """What `poolgrid model fetch --json` answers."""

    path: str


class ModelFetchError(RuntimeError):
    """The model could not be fetched."""


async def cached_model(
    settings: S, loads: str | None, with_model: Callable[[S, Path], S] | None, start: StartPhases
) -> S:
    """Return settings by which the engine loads its model from the cache; the same where it is not to.

    ``loads`` is what the engine would load, ``None`` when it loads no model. A directory that is there is loaded as it
    is, unless ``model_source`` says otherwise. Raises ``ModelFetchError``, and ``ValueError`` where the engine loads no
    model.
    """
    source = settings.model_source
    if settings.model_cache_dir is None:
        if not loads or not is_hub_name(loads):
            return settings
        settings = settings.model_copy(update={"model_cache_dir": default_directory(os.environ)})
    if loads is None or with_model is None:
        if source:
            raise ValueError(
                f"model_source is {source!r}, and with these settings the engine {settings.engine_name} loads no "
                "model: leave it out"
            )
        return settings
    if not source and loads and not _is_place(loads):
        source = loads
    if not source:
        return settings
    path = await _fetch(settings, source, start)
    log.info("the model %s is in %s", source, path)
    return with_model(settings, path)


def _is_place(model: str) -> bool:
    return os.path.isabs(model) or os.path.exists(model)


async def _fetch(settings: WorkerProcessSettings, source: str, start: StartPhases) -> Path:
    start.enter(Phase.FETCH)
    words = ["model", "fetch", source, "--cache-dir", str(settings.model_cache_dir), "--progress-lines", "--json"]
    process = await asyncio.create_subprocess_exec(
        *leashed(GRACE_S, [sys.executable, "-P", "-m", "poolgrid", *words]),
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
        raise ModelFetchError(
            f"fetching the model {source} into {settings.model_cache_dir}: {said or f'status {status}'}"
        )
    return Path(msgspec.json.decode(answer, type=_Fetched).path)


async def _follow(process: Process, start: StartPhases) -> str:
    """Show how the fetching goes; return its last word that is no progress."""
    assert process.stderr is not None
    said = ""
    async for line in process.stderr:
        try:
            now = msgspec.json.decode(line, type=ProgressLine)
            phase = PHASES[now.phase]
        except (msgspec.DecodeError, KeyError):
            said = line.decode(errors="replace").strip()
            if said:
                log.warning("fetching the model: %s", said)
            continue
        if start.phase is not phase:
            start.enter(phase)
        start.move(now.bytes, now.total_bytes)
    return said
