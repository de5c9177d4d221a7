"""The simulated engine, as ``--engine simulated``."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from poolgrid.workers.engines.definition import EngineDefinition, EngineHost, OpenedEngine
from poolgrid.workers.engines.simulated.settings import SimulatedWorkerSettings
from poolgrid.workers.tensor_transfer.settings import TensorSettings


def _open(settings: SimulatedWorkerSettings, around: EngineHost) -> AbstractAsyncContextManager[OpenedEngine]:
    from poolgrid.workers.engines.simulated.opening import open_engine

    return open_engine(settings, around)


def _shortest_timeout_ms(settings: SimulatedWorkerSettings) -> float:
    return min(settings.kv_fetch_timeout_ms, settings.tensor_lease_ms, settings.tensor_fetch_timeout_ms)


ENGINE = EngineDefinition(
    title="the simulated engine",
    settings=SimulatedWorkerSettings,
    open=_open,
    shortest_timeout_ms=_shortest_timeout_ms,
    about="With `--engine simulated`.",
    tables=(SimulatedWorkerSettings, TensorSettings),
)
