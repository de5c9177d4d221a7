"""Which engines there are: a line each, by the name that ``--engine`` takes. ``docs/engines.md`` says how to write one.

Nothing else outside of an engine's directory names it. Only the engine that is asked for is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from poolgrid.process.settings import Settings

if TYPE_CHECKING:
    from poolgrid.workers.engines.definition import EngineDefinition
    from poolgrid.workers.engines.server.kinds import ServerKind

ENGINES = {
    "simulated": "poolgrid.workers.engines.simulated.definition",
    "trtllm": "poolgrid.workers.engines.trtllm.definition",
    "vllm": "poolgrid.workers.engines.vllm.definition",
    "sglang": "poolgrid.workers.engines.sglang.definition",
    "trtllm-serve": "poolgrid.workers.engines.trtllm_serve.definition",
}
"""Module that defines each engine, as ``ENGINE``. The first is the default."""

if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(ENGINES)]


class EngineChoice(Settings):
    """Which engine a worker drives; the other settings depend on it."""

    engine: EngineName = Field(
        next(iter(ENGINES)),
        description="Engine of the worker: simulated needs nothing, trtllm needs TensorRT-LLM and GPUs; vllm, "
        "sglang and trtllm-serve are engines' own servers, asked over HTTP.",
    )


def engine_definition(name: str) -> EngineDefinition[Any]:
    """Return the definition of an engine; raises ``KeyError`` when there is none of that name."""
    definition: EngineDefinition[Any] = importlib.import_module(ENGINES[name]).ENGINE
    return definition


def server_kinds() -> dict[str, ServerKind]:
    """Return the kinds of engine servers there are, by the name of their engine."""
    found = {}
    for name in ENGINES:
        server_kind = engine_definition(name).server_kind
        if server_kind is not None:
            found[name] = server_kind()
    return found
