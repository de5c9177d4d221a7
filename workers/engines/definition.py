"""Facts of an engine, and what a worker process lends it. ``docs/internals/engines.md`` shows one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.worker_protocol.engine import Engine, ForwardBooks, UntilKnown
from poolgrid.server.process.clock import AwakeClock, Clock
from poolgrid.server.process.settings import Settings
from poolgrid.server.transport.planes import PlaneContext
from poolgrid.server.workers.metrics import WorkerMetrics
from poolgrid.server.workers.settings import WorkerProcessSettings
from poolgrid.server.workers.start_phases import StartPhases
from poolgrid.server.workers.transfers import EmbeddingExchange, KvExchange

if TYPE_CHECKING:
    from poolgrid.server.http.health_app import HttpAnswer
    from poolgrid.server.workers.engines.server.kinds import ServerKind
    from poolgrid.server.workers.server_workers import ServerWorkers

S = TypeVar("S", bound=WorkerProcessSettings)


@dataclass(frozen=True, slots=True)
class EngineHost:
    """What an engine may use of its process."""

    context: PlaneContext
    registry: CollectorRegistry
    metrics: WorkerMetrics
    clock: Clock
    awake: AwakeClock
    """For judging others: it stands still while this process does."""
    epoch: int
    request_port: int
    http_port: int
    say_start: Callable[[str], None]
    """Shows people what the start of the engine waits for."""
    start: StartPhases
    """Phase of the start; an engine reports loading and its first token as far as it knows them."""


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """A running engine, and the worker's card for it."""

    engine: Engine
    card: WorkerCard
    kv: KvExchange | None = None
    """The worker's part in handing KV over; ``None`` for an engine that talks to its peers by itself."""
    embeddings: EmbeddingExchange | None = None
    """The worker's part in taking embeddings from encode workers; ``None`` for an engine that takes none that way."""
    observe_card: Callable[[Callable[[WorkerCard], None]], None] | None = None
    """Calls a function for each new card, of an engine that may serve other names later."""
    forward_books: ForwardBooks | None = None
    """Books of the requests that routers send straight to its server; ``None`` for an engine without one."""
    until_known: UntilKnown | None = None
    """Waits, not without end, until ``engine.restate`` has what the engine held before this process; it is called when
    ``engine.run`` is. ``None`` where the cache begins with the process."""


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What an engine would be started with, for people."""

    text: str
    warnings: tuple[str, ...] = ()
    gpus: int = 0
    """How many GPUs the engine needs."""
    gpus_made_of: str = ""
    """How that comes about, as in ``TP 4 x PP 1``."""


class ServerFollower(Protocol):
    """Follows engine servers: starts and ends their workers while it runs."""

    def answer(self, method: str, query: bytes, body: bytes) -> HttpAnswer:
        """Answer a request of an operator on this machine about what is followed."""
        ...

    def describe(self) -> dict[str, object]: ...

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until ``stop`` is set, and the requests of all workers are done."""
        ...


@dataclass(frozen=True, slots=True)
class EngineDefinition(Generic[S]):
    """One engine: all that a worker, the command line and the documentation need to know of it."""

    title: str
    """What people call it, as in "with TITLE"."""
    settings: type[S]
    open: Callable[[S, EngineHost], AbstractAsyncContextManager[OpenedEngine]]
    """Makes the engine ready for requests; it runs until the end of the block, and is gone after it, whatever ended
    it. May take minutes, and is cancelled when the worker is stopped meanwhile."""
    shortest_timeout_ms: Callable[[S], float]
    """The shortest time after which this engine's worker gives a request or a peer up."""
    check_library: Callable[[], None] = lambda: None
    """Raises ``OptionError`` where the package that it drives is absent, which is found before a model is fetched."""
    about: str = ""
    """Text of the page of settings above its table."""
    tables: tuple[type[Settings], ...] = ()
    """The settings classes of that table, where it is more than ``settings``."""
    server_kind: ServerKind | None = None
    """How its server is recognised, where it runs in one that is asked over HTTP."""
    serves: Callable[[S], tuple[str, str]] = lambda settings: ("", "")
    """Model and role that the worker will have, as far as the settings have them; shown while it loads."""
    loads: Callable[[S], str | None] = lambda settings: None
    """What it loads with these settings, as they name it, which may be nothing yet; ``None`` = it loads no model."""
    with_model: Callable[[S, Path], S] | None = None
    """The settings by which it loads a model from this directory, under the name that clients know."""
    workers: Callable[[S], Sequence[S]] = lambda settings: (settings,)
    """The settings of each worker of a process with these settings."""
    follow: Callable[[S, ServerWorkers], ServerFollower] | None = None
    """Makes what starts and ends the workers of a process; ``None`` = they are ``workers``, for as long as it runs."""
    read_limits: Callable[[Path], dict[str, int]] | None = None
    """The sizes in an engine file, as options of an engine that pretends to be the file's; raises ``ValueError``.
    ``None`` = it has no files."""
    start_plan: Callable[[S], StartPlan] | None = None
    """What ``--print-engine-args`` prints; raises ``ValueError`` saying what is wrong. ``None`` = there are none."""


def close_in_order(opened: AsyncExitStack, close: Callable[[bool], None]) -> None:
    """Have ``close`` called at the end: with ``False`` on cancellation, when nothing is waited for."""

    def end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close(not isinstance(error, asyncio.CancelledError))

    opened.push(end)
