"""Which engines there are, by the name that ``--engine`` takes (``docs/internals/engines.md``).

Kinds of engine servers are the modules of ``server/dialects``, each with its ``KIND``. All others are entry points of
group ``poolgrid.engines``, which name an ``EngineDefinition``, or a ``ServerKind`` of another distribution.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from poolgrid.server.process.plugins import installed_plugins
from poolgrid.server.process.settings import Settings
from poolgrid.server.workers.engines.server import dialects

if TYPE_CHECKING:
    from poolgrid.server.workers.engines.definition import EngineDefinition
    from poolgrid.server.workers.engines.server.kinds import ServerKind

GROUP = "poolgrid.engines"

DEFAULT = "simulated"


@cache
def engines() -> dict[str, EntryPoint]:
    """Return the installed engines by name, the default first; an engine of ours whose folder is absent is none.

    Raises ``RuntimeError`` where poolgrid's own are missing: its installation is older than its source.
    """
    kinds = (
        EntryPoint(found.name.replace("_", "-"), f"{dialects.__name__}.{found.name}:KIND", GROUP)
        for found in iter_modules(dialects.__path__)
    )
    points = sorted([*installed_plugins(GROUP), *kinds], key=lambda point: (point.name != DEFAULT, point.name))
    named = {point.name: point for point in points}
    if DEFAULT not in named:
        raise RuntimeError(
            f"looking for engines: no installed package has an entry point {DEFAULT!r} in group {GROUP}; poolgrid was "
            "installed before its engines were found that way: install it again (pip install -e . in its source)"
        )
    return {name: point for name, point in named.items() if _is_there(point)}


def _is_there(point: EntryPoint) -> bool:
    try:
        return not point.module.startswith("poolgrid.") or find_spec(point.module) is not None
    except ModuleNotFoundError:
        return False


if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Literal[tuple(engines())]


class EngineChoice(Settings):
    """Which engine a worker drives; the other settings depend on it."""

    panel: ClassVar[str] = "Worker"

    engine: EngineName = Field(
        DEFAULT,
        description=(
            "Choose the engine: simulated (no GPU), trtllm (TensorRT-LLM in this process), server (engine servers of "
            "any kind), or the kind of one server."
        ),
    )


@cache
def engine_definition(name: str) -> EngineDefinition[Any]:
    """Return the definition of an engine; raises ``KeyError`` when there is none of that name."""
    from poolgrid.server.workers.engines.server.kinds import ServerKind
    from poolgrid.server.workers.engines.server.one_kind import server_engine

    found: EngineDefinition[Any] | ServerKind = engines()[name].load()
    return server_engine(found) if isinstance(found, ServerKind) else found


def server_kinds() -> dict[str, ServerKind]:
    """Return the kinds of engine servers there are, by name."""
    definitions = (engine_definition(name) for name in engines())
    kinds = (each.server_kind for each in definitions)
    return {each.name: each for each in kinds if each is not None}
