"""The simulated engine, as ``--engine simulated``."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from poolgrid.plugins.simulated.settings import SimulatedWorkerSettings
from poolgrid.server.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine
from poolgrid.server.workers.tensor_transfer.settings import TensorSettings


def _open(settings: SimulatedWorkerSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    from poolgrid.plugins.simulated.opening import open_engine

    return open_engine(settings, around)


def _shortest_timeout_ms(settings: SimulatedWorkerSettings) -> float:
    return min(settings.kv_fetch_timeout_ms, settings.tensor_lease_ms, settings.tensor_fetch_timeout_ms)


def _with_model(settings: SimulatedWorkerSettings, path: Path) -> SimulatedWorkerSettings:
    if settings.model_path or not (path / "tokenizer.json").is_file():
        return settings
    return settings.model_copy(update={"model_path": str(path)})


ENGINE = EngineDefinition(
    title="the simulated engine",
    settings=SimulatedWorkerSettings,
    open=_open,
    shortest_timeout_ms=_shortest_timeout_ms,
    about="With `--engine simulated`.",
    serves=lambda settings: (settings.served_model_name, settings.card_role.name.lower()),
    loads=lambda settings: "",
    with_model=_with_model,
    tables=(SimulatedWorkerSettings, TensorSettings),
)
