"""The body of `poolgrid worker` where it keeps one rank of an engine that spans nodes."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TypeGuard

import click

from poolgrid.cli.command_line import LogChoice
from poolgrid.cli.service_process import run_service
from poolgrid.workers.core.rank_place import RankPlace, place_of, words_for_launcher
from poolgrid.workers.engines.definition import EngineSpan
from poolgrid.workers.engines.registry import engine_definition
from poolgrid.workers.ranks.keeper import keep_rank
from poolgrid.workers.ranks.task import TASK_VARIABLE, RankTask, written
from poolgrid.workers.settings import WorkerProcessSettings

TASK = ("-m", "poolgrid.cli.rank_task")
"""The worker's command for the launcher of rank 0, which divides words at spaces: the real one is in a variable."""


def keep(settings: WorkerProcessSettings, log_choice: LogChoice) -> None:
    """Keep this process's rank until its engine is over; ends with status 2 when it cannot begin as it was started."""
    try:
        span = engine_definition(settings.engine_name).span(settings)
        if not _spans(span):
            return
        place = place_of(os.environ)
        endpoint = _leader(place, span)
    except ValueError as error:
        click.echo(str(error), err=True)
        raise SystemExit(2) from None
    task = RankTask(place.group, sys.argv[1:])
    environment = {**os.environ, **words_for_launcher(place, os.environ), TASK_VARIABLE: written(task)}

    async def main(stop: asyncio.Event) -> None:
        await keep_rank(
            place,
            endpoint,
            (*span.launcher, sys.executable, *TASK),
            environment,
            settings,
            stop,
            lease_ms=span.settings.rank_lease_ms,
            start_timeout_ms=span.settings.rank_start_timeout_ms,
        )

    run_service(f"{settings.worker_id} rank {place.rank}", log_choice, main, worker=settings.worker_id)


def _spans(span: EngineSpan | None) -> TypeGuard[EngineSpan]:
    return span is not None


def _leader(place: RankPlace, span: EngineSpan) -> str:
    """Return where the leader of the ranks is; raises ``ValueError`` for a place that is not the span's."""
    nodes = span.settings.nodes
    if place.size != span.ranks:
        raise ValueError(
            f"starting an engine on {nodes} nodes: it has {span.ranks} ranks ({span.ranks_made_of}), and "
            f"{place.size} processes were started ({place.said_by} says so): start one for each rank, "
            f"{span.ranks // nodes} on each node; nothing was started"
        )
    host = span.settings.leader_host or place.leader_host
    if not host:
        raise ValueError(
            f"starting an engine on {nodes} nodes: {place.said_by} does not tell where rank 0 is: set leader_host to "
            "its host; nothing was started"
        )
    return f"tcp://[{host}]:{span.settings.rank_port}" if ":" in host else f"tcp://{host}:{span.settings.rank_port}"
