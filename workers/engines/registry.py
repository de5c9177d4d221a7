"""Which engines there are: the entry points of group ``poolgrid.engines``, by the name that ``--engine`` takes.

Ours are in ``pyproject.toml``; another distribution adds its own in the same way (``docs/internals/engines.md``). An
entry point names the ``EngineDefinition``. Only the engine that is asked for is imported.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from poolgrid.server.process.plugins import installed_plugins
from poolgrid.server.process.settings import Settings

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
    named = {
        point.name: point
        for point in sorted(installed_plugins(GROUP), key=lambda point: (point.name != DEFAULT, point.name))
    }
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
            "Choose the engine: simulated (no GPU), trtllm (TensorRT-LLM in this process), a vllm, sglang or "
            "trtllm-serve server, or server (any of them)."
        ),
    )


def engine_definition(name: str) -> EngineDefinition[Any]:
    """Return the definition of an engine; raises ``KeyError`` when there is none of that name."""
    definition: EngineDefinition[Any] = engines()[name].load()
    return definition


def server_kinds() -> dict[str, ServerKind]:
    """Return the kinds of engine servers there are, by name."""
    definitions = (engine_definition(name) for name in engines())
    kinds = (each.server_kind() for each in definitions if each.server_kind is not None)
    return {each.name: each for each in kinds}
