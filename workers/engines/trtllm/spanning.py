"""TensorRT-LLM over several nodes: what its arguments must be then, and the watch over its ranks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from poolgrid.workers.core.rank_group import RankGroup
from poolgrid.workers.engines.definition import EngineHost
from poolgrid.workers.engines.trtllm.arguments.engine_arguments import RUN, EngineArguments, resolve_files
from poolgrid.workers.engines.trtllm.settings import TrtllmWorkerSettings
from poolgrid.workers.ranks.metrics import RankMetrics
from poolgrid.workers.ranks.task import TASK_VARIABLE, task_of
from poolgrid.workers.ranks.watch import RankWatch


def arguments_of(settings: TrtllmWorkerSettings) -> EngineArguments:
    """Return the arguments of a worker's engine, with what it needs where it spans nodes.

    Raises ``ContractError``, and ``ValueError`` where its GPUs cannot be divided among the nodes.
    """
    arguments = resolve_files(settings)
    if settings.nodes == 1:
        return arguments
    gpus, made_of = arguments.gpus
    if gpus < settings.nodes or gpus % settings.nodes:
        raise ValueError(
            f"nodes is {settings.nodes} and the engine has {gpus} GPUs ({made_of}): allowed are numbers of nodes that "
            "divide them; no engine was started"
        )
    if arguments.values.get("gpus_per_node") is not None:
        return arguments
    # By itself it takes the GPUs that one process sees for those of a node, which a scheduler may have bound to fewer.
    values = {**arguments.values, "gpus_per_node": gpus // settings.nodes}
    return replace(arguments, values=values, sources={**arguments.sources, "gpus_per_node": RUN})


@asynccontextmanager
async def watched_ranks(
    settings: TrtllmWorkerSettings, arguments: EngineArguments, around: EngineHost
) -> AsyncIterator[RankWatch | None]:
    """Keep watch over the ranks of an engine that spans nodes, once all are there; ``None`` = it does not.

    At the end every rank is told that the engine is over, and whether it was broken. Raises ``RankLostError``.
    """
    if settings.nodes == 1:
        yield None
        return
    task = task_of(os.environ)
    if task is None:
        raise ValueError(
            f"starting an engine on {settings.nodes} nodes: {TASK_VARIABLE} is not set, so no keeper has started this "
            "worker; start it with poolgrid worker, once for each GPU"
        )
    watch = RankWatch(
        around.context,
        settings.host,
        settings.rank_port,
        RankGroup(task.group, arguments.gpus[0], settings.rank_lease_ms),
        settings.rank_lease_ms,
        around.awake,
        RankMetrics(around.registry),
        around.stop,
    )
    try:
        await watch.complete(settings.rank_start_timeout_ms, around.say_start)
        yield watch
    except Exception as error:
        watch.end(f"the worker failed: {error}")
        raise
    finally:
        watch.end()
        await watch.close()
