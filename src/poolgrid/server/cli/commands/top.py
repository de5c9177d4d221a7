"""`poolgrid top`: live view of a router.

``view`` turns the two answers of the router into something to draw and reads no clock and no socket; ``top`` fetches
and draws, or prints the answers as JSON. A global router is known by having no ``/v1/workers``. A router that goes away
is shown as away, with the last known state, and asked again at the same interval; one that was found by its name is
looked for again where names are, and the process that has the name then is watched in its place.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Generic, TypeVar

import click
import httpx
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from poolgrid.kernel.wire.addresses import is_name, without_credentials
from poolgrid.kernel.wire.answers import (
    DecisionList,
    DecisionRow,
    FleetList,
    LoadingRow,
    NamedRow,
    PlacedList,
    PlacedRow,
    PoolList,
    PoolRow,
    QueueRow,
    SessionList,
    SessionRow,
    StreamRow,
    WaitingTurnRow,
    WorkerList,
    WorkerRow,
)
from poolgrid.server.cli.command_line import command, router_url
from poolgrid.server.cli.doctor_view import uncached_line
from poolgrid.server.cli.router_client import KEY_NOTE, api_key_headers, found_url, key_hint, other_url_of
from poolgrid.server.diagnosis.causes import Cause
from poolgrid.server.process import lifecycle
from poolgrid.server.process.figures import UNKNOWN, counted, milliseconds, number, percent, size
from poolgrid.server.process.terminal_table import Heading, TerminalTable, terminal

DECISIONS_SHOWN = 20
"""Decisions to ask for: a screenful."""

WORKERS_SHOWN_MAX = 200
"""Rows of workers drawn; a note counts the rest."""

ANSWER_BYTES_MAX = 32 * 1024 * 1024
"""Largest answer that is read: 65,536 workers at 400 bytes each stay below."""

TIMEOUT_S = 5.0
"""Longest wait for one answer; the router answers from memory."""

BAR_CELLS = 10
POOL_PATH = "/v1/pools"
WORKER_PATH = "/v1/workers"
FLEET_PATH = "/v1/fleet"
SESSION_PATH = "/v1/sessions"

Fetch = Callable[[httpx.AsyncClient, "Frame"], Awaitable["Frame"]]
"""A look: what is to be seen now, from what was seen before."""

Other = Callable[[str], Awaitable[str]]
"""The URL to ask in place of one that does not answer, or that one; raises ``ValueError`` or ``OSError``."""

_POOL_STYLES = {
    "available": "green",
    "saturated": "yellow",
    "draining": "yellow",
    "connecting": "yellow",
    "loading": "yellow",
    "breaker-open": "red",
    "down": "red",
}
_STATE_STYLES = {"ready": "green", "draining": "yellow", "connecting": "yellow", "unreachable": "red", "stale": "red"}

_STREAM_STYLES = {"live": "green", "replaying": "yellow", "snapshotting": "yellow"}

OWN = "worker"
"""What a worker's own stream is called among its sources."""

R = TypeVar("R")


class Frame(msgspec.Struct, frozen=True):
    """What one look brought: both answers of a router, or of a global router, or none and why."""

    url: str
    workers: WorkerList | None = None
    decisions: DecisionList | None = None
    fault: str | None = None
    """Why the last attempt failed; the answers, if any, are then from an earlier one."""
    pools: PoolList | None = None
    placements: PlacedList | None = None
    fleet: FleetList | None = None
    """Registered processes, with --fleet."""
    sessions: SessionList | None = None
    """The sessions of the pool, when they were asked."""

    @property
    def place(self) -> str:
        return without_credentials(self.url)


def usage_bar(used: int, total: int) -> Text:
    """Return a bar for the used share of a total, e.g. ``███░░░░░░░  30%``."""
    if total <= 0:
        return Text(UNKNOWN, style="dim")
    share = min(1.0, max(0.0, used / total))
    filled = round(share * BAR_CELLS)
    style = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"
    return Text.assemble(("█" * filled, style), ("░" * (BAR_CELLS - filled), "dim"), f" {percent(share, 0):>4}")


def stream_cell(stream: StreamRow) -> Text:
    """Return the state of a stream, whether it is trusted, and the further sources that are not live.

    A worker that has joined reports nothing until it has requests. Events that do not fit it are of no use.
    """
    if stream.fault:
        return Text("events unfit", style="red")
    if stream.state == "syncing" and stream.trusted:
        return Text("no events yet", style="dim")
    lacking = [f"{name} {one.state}" for name, one in stream.sources.items() if name != OWN and one.state != "live"]
    if stream.trusted:
        style = "yellow" if lacking else _STREAM_STYLES.get(stream.state, "")
        return Text(", ".join([stream.state, *lacking]), style=style)
    word = stream.state if stream.state == "stale" else f"suspect {percent(stream.disagreement, 0)}"
    return Text(", ".join([word, *lacking]), style="red")


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column, its cell for a row, and whether a narrow terminal can do without it."""

    heading: str
    cell: Callable[[R], Text | str]
    numeric: bool = True
    optional: bool = False


_NO_FAULT = frozenset(cause.value for cause in Cause if not cause.is_fault) | {""}

WORKER_COLUMNS: tuple[Column[WorkerRow], ...] = (
    Column("worker", lambda row: Text(row.worker_id if row.dp_rank == 0 else f"{row.worker_id}/{row.dp_rank}"), False),
    Column("role", lambda row: Text(row.role), False, optional=True),
    Column("model", lambda row: Text(row.model), False, optional=True),
    Column("state", lambda row: Text(row.state, style=_STATE_STYLES.get(row.state, "")), False),
    Column("stream", lambda row: stream_cell(row.stream), False),
    Column(
        "reuse", lambda row: Text(row.verdict, style="" if row.verdict in _NO_FAULT else "red"), False, optional=True
    ),
    Column("run", lambda row: f"{row.running_requests:,}"),
    Column("wait", lambda row: f"{row.waiting_requests:,}"),
    Column("active", lambda row: usage_bar(row.active_blocks, row.total_blocks)),
    Column("cached", lambda row: percent(row.cached_blocks / row.total_blocks if row.total_blocks else None)),
    Column("indexed", lambda row: f"{row.indexed_blocks:,}", optional=True),
    Column("prefill tok", lambda row: f"{row.prefill_tokens:,}", optional=True),
    Column("lag", lambda row: milliseconds(row.event_lag_ms), optional=True),
    Column("last event", lambda row: milliseconds(row.last_event_ms_ago), optional=True),
    Column("requests", lambda row: f"{row.requests_total:,}"),
)

LOADING_COLUMNS: tuple[Column[LoadingRow], ...] = (
    Column("worker", lambda row: Text(row.worker_id), False),
    Column("role", lambda row: Text(row.role), False, optional=True),
    Column("model", lambda row: Text(row.model), False, optional=True),
    Column("phase", lambda row: Text(row.phase, style="yellow"), False),
    Column("done", lambda row: usage_bar(row.done_bytes, row.total_bytes)),
    Column("left", lambda row: size(row.left_bytes) if row.total_bytes else UNKNOWN),
)

DECISION_COLUMNS: tuple[Column[DecisionRow], ...] = (
    Column("request", lambda row: Text(row.request_id), False),
    Column("worker", lambda row: Text(row.worker), False),
    Column("policy", lambda row: Text(row.policy), False, optional=True),
    Column("reason", lambda row: Text(row.reason), False),
    Column("overlap/ISL blocks", lambda row: f"{row.overlap_blocks:,}/{row.isl_blocks:,}"),
    Column("ISL", lambda row: f"{row.isl:,}", optional=True),
    Column("reused tok", lambda row: number(row.realised_cached_tokens, 0)),
    Column("cost", lambda row: number(row.cost), optional=True),
    Column("of", lambda row: f"{row.candidates:,}", optional=True),
)


def _room_in_use(row: PoolRow) -> Text:
    roles = row.roles()
    return usage_bar(sum(role.requests for role in roles), sum(role.capacity for role in roles))


_SESSION_STYLES = {"running": "green", "waiting": "yellow", "idle": "dim"}

SESSION_COLUMNS: tuple[Column[SessionRow], ...] = (
    Column("session", lambda row: Text(row.session), False),
    Column("parent", lambda row: Text(row.parent), False, optional=True),
    Column("state", lambda row: Text(row.state, style=_SESSION_STYLES.get(row.state, "")), False),
    Column("turns", lambda row: f"{row.turns:,}"),
    Column("footprint", lambda row: f"{row.footprint_blocks:,}"),
    Column("worker", lambda row: Text(next(iter(row.workers), UNKNOWN)), False),
    Column("ISL", lambda row: f"{row.isl:,}", optional=True),
    Column("reused tok", lambda row: f"{row.cached_tokens:,}", optional=True),
    Column("last", lambda row: milliseconds(row.last_ms_ago)),
    Column("back in", lambda row: milliseconds(row.expected_return_ms), optional=True),
)


WAITING_COLUMNS: tuple[Column[WaitingTurnRow], ...] = (
    Column("session", lambda row: Text(row.session), False),
    Column("request", lambda row: Text(row.request_id), False),
    Column("ISL", lambda row: f"{row.isl:,}"),
    Column("waited", lambda row: milliseconds(row.waited_ms)),
)

POOL_COLUMNS: tuple[Column[PoolRow], ...] = (
    Column("pool", lambda row: Text(row.name), False),
    Column("stage", lambda row: Text(row.stage), False, optional=True),
    Column("state", lambda row: Text(row.state, style=_POOL_STYLES.get(row.state, "")), False),
    Column("breaker", lambda row: Text(row.breaker.state), False, optional=True),
    Column("in flight", lambda row: f"{row.in_flight:,}"),
    Column("own queue", lambda row: number(row.waiting_requests, 0)),
    Column("room in use", _room_in_use),
    Column("workers", lambda row: f"{sum(role.ready for role in row.roles()):,}"),
    Column("models", lambda row: Text(", ".join(model.model for model in row.models)), False, optional=True),
    Column("reason", lambda row: Text(row.reason), False, optional=True),
)

PLACEMENT_COLUMNS: tuple[Column[PlacedRow], ...] = (
    Column("request", lambda row: Text(row.request_id), False),
    Column("pools", lambda row: Text(", ".join(row.pools)), False),
    Column("workers", lambda row: Text(", ".join(row.workers)), False, optional=True),
    Column("how", lambda row: Text(row.how or UNKNOWN), False),
    Column("outcome", lambda row: Text(row.outcome), False),
    Column("ISL", lambda row: f"{row.isl:,}"),
    Column("OSL", lambda row: f"{row.output_tokens:,}", optional=True),
    Column("queued", lambda row: milliseconds(row.queued_ms)),
    Column("TTFT", lambda row: milliseconds(row.ttft_ms)),
    Column("ITL", lambda row: milliseconds(row.itl_ms), optional=True),
)


NAMED_COLUMNS: tuple[Column[NamedRow], ...] = (
    Column("namespace", lambda row: Text(row.namespace), False),
    Column("component", lambda row: Text(row.component), False),
    Column("instance", lambda row: Text(row.instance), False),
    Column("since", lambda row: Text(_day_and_time(row.started_ms) if row.started_ms else "–"), False, optional=True),
    Column("endpoints", lambda row: Text("  ".join(f"{k}={v}" for k, v in sorted(row.endpoints.items()))), False),
)


def _day_and_time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%m-%d %H:%M:%SZ")


def _table(title: str, columns: Sequence[Column[R]], rows: Sequence[R]) -> TerminalTable:
    headings = [Heading(column.heading, column.numeric, column.optional) for column in columns]
    table = TerminalTable(headings, f"\n{title}")
    for row in rows:
        table.add(*(column.cell(row) for column in columns))
    return table


def worker_table(rows: Sequence[WorkerRow]) -> TerminalTable:
    """Return the table of workers, in order of name and rank."""
    ordered = sorted(rows, key=lambda row: (row.worker_id, row.dp_rank))
    table = _table("workers", WORKER_COLUMNS, ordered[:WORKERS_SHOWN_MAX])
    if len(ordered) > WORKERS_SHOWN_MAX:
        table.note = f"not shown: {counted(len(ordered) - WORKERS_SHOWN_MAX, 'more worker')}"
    return table


def decision_table(rows: Sequence[DecisionRow]) -> TerminalTable:
    """Return the table of decisions, in the order given."""
    return _table("last decisions", DECISION_COLUMNS, rows)


def queue_line(queue: QueueRow) -> Text:
    """Return the queued and the refused requests, in one line."""
    full = queue.requests_max > 0 and queue.requests >= queue.requests_max
    waiting = f"queue: {queue.requests:,} of {queue.requests_max:,} requests, "
    tokens = f"{queue.prompt_tokens:,} of {queue.prompt_tokens_max:,} prompt tokens"
    refused = ", ".join(f"{count:,} {code}" for code, count in sorted(queue.refused.items())) or "none"
    # Refused clients get a time to come back; while none waits, none is refused.
    tells = queue.retry_after_s is not None and queue.requests > 0
    again = f"   come back after {queue.retry_after_s:.0f} s" if tells else ""
    style = "red" if full else "yellow" if queue.requests else ""
    return Text.assemble((waiting + tokens, style), f"   refused: {refused}", again)


def _pool_parts(frame: Frame, pools: PoolList) -> list[RenderableType]:
    """Return what there is to see of a global router."""
    states = ", ".join(
        f"{count} {state}" for state in _POOL_STYLES if (count := sum(row.state == state for row in pools.data))
    )
    in_flight = sum(row.in_flight for row in pools.data)
    headline = f"{frame.place}   pools: {states or 'none'}   in flight: {in_flight:,}   revision {pools.revision:,}"
    parts: list[RenderableType] = [Text(headline, style="bold")]
    parts.append(queue_line(pools.queue))
    parts.append(_table("pools", POOL_COLUMNS, pools.data))
    if frame.placements is not None:
        parts.append(_table("last requests", PLACEMENT_COLUMNS, frame.placements.data))
    return parts


def _printable(text: str) -> str:
    """Return a text without what terminals obey: others wrote a part of it."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _fleet_parts(frame: Frame, fleet: FleetList) -> list[RenderableType]:
    counts: dict[str, int] = {}
    for row in fleet.data:
        counts[row.component] = counts.get(row.component, 0) + 1
    have = ", ".join(f"{count} {component}" for component, count in sorted(counts.items()))
    namespaces = counted(len({row.namespace for row in fleet.data}), "namespace")
    headline = f"{frame.place}   names: {fleet.names} at {fleet.where}   {namespaces}: {have or 'none'}"
    table = _table("processes", NAMED_COLUMNS, fleet.data[:WORKERS_SHOWN_MAX])
    if len(fleet.data) > WORKERS_SHOWN_MAX:
        table.note = f"not shown: {counted(len(fleet.data) - WORKERS_SHOWN_MAX, 'more instance')}"
    refused = [Text(f"refused: {_printable(why)}", style="red") for why in fleet.refused.values()]
    return [Text(headline, style="bold"), table, *refused]


def view(frame: Frame) -> RenderableType:
    """Return one screen: a headline, the queue, the workers or pools, the decisions."""
    parts: list[RenderableType] = []
    if frame.workers is not None:
        rows = frame.workers.data
        states = ", ".join(
            f"{count} {state}"
            for state in ("ready", "draining", "unreachable", "stale")
            if (count := sum(row.state == state for row in rows))
        )
        if frame.workers.loading:
            states = ", ".join(filter(None, (states, f"{len(frame.workers.loading)} loading")))
        running = sum(row.running_requests for row in rows)
        waiting = sum(row.waiting_requests for row in rows)
        headline = (
            f"{frame.place}   workers: {states or 'none'}   requests: {running:,} running, {waiting:,} waiting   "
            f"journal offset {frame.workers.offset:,}"
        )
        parts.append(Text(headline, style="bold"))
        parts.append(queue_line(frame.workers.queue))
        if any(frame.workers.uncached_tokens.values()):
            parts.append(Text(uncached_line(frame.workers.uncached_tokens)))
    if frame.fault is not None:
        is_known = any(each is not None for each in (frame.workers, frame.pools, frame.fleet))
        known = "; below is what was known last" if is_known else ""
        parts.append(Text(f"{frame.place} does not answer: {frame.fault}{known}", style="red"))
    if frame.fleet is not None:
        parts += _fleet_parts(frame, frame.fleet)
    if frame.pools is not None:
        parts += _pool_parts(frame, frame.pools)
    if frame.workers is not None:
        if frame.workers.loading:
            parts.append(_table("loading", LOADING_COLUMNS, frame.workers.loading[:WORKERS_SHOWN_MAX]))
        parts.append(worker_table(frame.workers.data))
    if frame.sessions is not None:
        table = _table("sessions (footprint in blocks)", SESSION_COLUMNS, frame.sessions.data)
        if frame.sessions.total > len(frame.sessions.data):
            table.note = f"not shown: {counted(frame.sessions.total - len(frame.sessions.data), 'session')}"
        parts.append(table)
        if (admission := frame.sessions.admission) is not None:
            parts.append(Text(f"session admission {admission.state}: {admission.reason}"))
        if turns := frame.sessions.waiting:
            parts.append(_table("turns that wait: their sessions would evict others in use", WAITING_COLUMNS, turns))
    if frame.decisions is not None:
        parts.append(decision_table(frame.decisions.data))
    return Group(*parts)


class FetchError(Exception):
    """The router could not be read; the message has the question and the answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


async def _get(client: httpx.AsyncClient, path: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async with client.stream("GET", path) as answer:
            async for chunk in answer.aiter_bytes():
                size += len(chunk)
                if size > ANSWER_BYTES_MAX:
                    raise FetchError(f"GET {path}: the answer exceeds {ANSWER_BYTES_MAX} bytes")
                chunks.append(chunk)
    except httpx.HTTPError as error:
        raise FetchError(f"GET {path}: {error or type(error).__name__}") from None
    if answer.status_code != 200:
        raise FetchError(f"GET {path}: status {answer.status_code}{key_hint(answer.status_code)}", answer.status_code)
    return b"".join(chunks)


async def fetch(client: httpx.AsyncClient, before: Frame) -> Frame:
    """Return the router's state now; on a fault the state ``before``, marked with the fault."""
    try:
        is_global, found = await _state(client, is_global=before.pools is not None)
        decisions = await _get(client, f"/v1/decisions?limit={DECISIONS_SHOWN}")
        if is_global:
            pools = msgspec.json.decode(found, type=PoolList)
            return Frame(before.url, pools=pools, placements=msgspec.json.decode(decisions, type=PlacedList))
        workers = msgspec.json.decode(found, type=WorkerList)
        return Frame(before.url, workers, msgspec.json.decode(decisions, type=DecisionList))
    except FetchError as error:
        fault = str(error)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        fault = f"the answer is not a router's: {error}"
    return msgspec.structs.replace(before, fault=fault)


async def fetch_fleet(client: httpx.AsyncClient, before: Frame) -> Frame:
    """Return who has a name now; on a fault what was known before, marked with the fault."""
    try:
        return Frame(before.url, fleet=msgspec.json.decode(await _get(client, FLEET_PATH), type=FleetList))
    except FetchError as error:
        fault = f"{error}; has it names (--names)?" if error.status == 404 else str(error)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        fault = f"the answer is not a router's: {error}"
    return msgspec.structs.replace(before, fault=fault)


async def fetch_sessions(client: httpx.AsyncClient, before: Frame) -> Frame:
    """Return the pool's workers and sessions now; on a fault what was known before, marked with the fault."""
    try:
        workers = msgspec.json.decode(await _get(client, WORKER_PATH), type=WorkerList)
        found = await _get(client, f"{SESSION_PATH}?limit={WORKERS_SHOWN_MAX}")
        return Frame(before.url, workers, sessions=msgspec.json.decode(found, type=SessionList))
    except FetchError as error:
        fault = f"{error}; sessions are shown by the routers of pools" if error.status == 404 else str(error)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        fault = f"the answer is not a router's: {error}"
    return msgspec.structs.replace(before, fault=fault)


async def _state(client: httpx.AsyncClient, is_global: bool) -> tuple[bool, bytes]:
    """Return whether it is a global router, and its pools or workers; what it was the last time is asked for first."""
    try:
        return is_global, await _get(client, POOL_PATH if is_global else WORKER_PATH)
    except FetchError as error:
        if error.status != 404:
            raise
        return not is_global, await _get(client, WORKER_PATH if is_global else POOL_PATH)


async def _elsewhere(client: httpx.AsyncClient, silent: Frame, look: Fetch, other: Other) -> Frame:
    """Return what is to be seen where the name of a router that does not answer leads now."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            url = await other(silent.url)
    except (ValueError, OSError) as error:
        why = str(error) or f"looking its name up took more than {TIMEOUT_S:g} s"
        return msgspec.structs.replace(silent, fault=f"{silent.fault}; {why}")
    if url == silent.url:
        return silent
    client.base_url = httpx.URL(url)
    return await look(client, msgspec.structs.replace(silent, url=url))


async def _watch(
    console: Console, url: str, interval_s: float, stop: asyncio.Event, look: Fetch, other: Other | None
) -> None:
    frame = Frame(url)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=api_key_headers()) as client:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False, transient=False) as live:
            while not stop.is_set():
                frame = await look(client, frame)
                if frame.fault is not None and other is not None:
                    frame = await _elsewhere(client, frame, look, other)
                live.update(view(frame), refresh=True)
                try:
                    async with asyncio.timeout(interval_s):
                        await stop.wait()
                except TimeoutError:
                    pass  # time for the next look


async def _look(console: Console, url: str, as_json: bool, look: Fetch) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=api_key_headers()) as client:
        frame = await look(client, Frame(url))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(frame)).decode() + "\n")
    else:
        console.print(view(frame))
    return 0 if frame.fault is None else 1


def watch(
    url: str, interval_s: float, once: bool, as_json: bool = False, look: Fetch = fetch, other: Other | None = None
) -> int:
    """Show the router at ``url`` every ``interval_s`` seconds until SIGINT; with ``once`` show it once.
    ``look`` fetches what is shown. Where it stops answering, ``other`` names the one to watch.

    Returns the exit code: with ``once`` 1 when the router did not answer as one, else 0; 2 for wrong arguments.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if fault := _unusable(interval_s, once, as_json):
        terminal(stderr=True).print(f"poolgrid top: {fault}", markup=False)
        return 2
    # httpx logs a line per request, which would tear the screen.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    console = terminal()
    if once:
        return asyncio.run(_look(console, url, as_json, look))

    async def main(stop: asyncio.Event) -> None:
        await _watch(console, url, interval_s, stop, look, other)

    lifecycle.run(main)
    return 0


def _unusable(interval_s: float, once: bool, as_json: bool) -> str:
    """Return why the arguments cannot be used; empty when they can."""
    if not 0.05 <= interval_s <= 3600:
        return f"interval is {interval_s} s, allowed are values from 0.05 to 3600"
    return "--json needs --once: a live view is for people" if as_json and not once else ""


@command(epilog=KEY_NOTE)
@router_url("Router or global router to watch.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    help="Seconds between two looks. [default: 1]",
)
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option(
    "--fleet", is_flag=True, help="Show the processes of all namespaces, from the router's service discovery."
)
@click.option("--sessions", is_flag=True, help="Show the sessions of a pool: turns, footprint in blocks, state.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print the router's answers as JSON.")
def top(url: str, interval: float, once: bool, fleet: bool, sessions: bool, as_json: bool) -> None:
    """Watch a router's workers, or a global router's pools, its queue and its last decisions, live.

    With --fleet, the processes of all pools that share names. With --sessions, the pool's sessions.
    """
    other = partial(other_url_of, url) if is_name(url) else None
    look = fetch_fleet if fleet else fetch_sessions if sessions else fetch
    raise SystemExit(watch(found_url(url), interval, once, as_json, look, other))
