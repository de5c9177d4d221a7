"""``poolgrid top``: a live view of a router's workers and last decisions.

``view`` turns the two answers of the router into something to draw and reads no clock and no socket; ``top`` fetches
and draws. A router that goes away is shown as away, with the last known state, and asked again at the same interval.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cli.api_key import api_key_headers
from runtime import lifecycle

DECISIONS_SHOWN = 20
"""Decisions to ask for: a screenful."""

WORKERS_SHOWN_MAX = 200
"""Rows of workers drawn; a note counts the rest."""

ANSWER_BYTES_MAX = 32 * 1024 * 1024
"""Largest answer that is read: 65,536 workers at 400 bytes each stay below."""

TIMEOUT_S = 5.0
"""Longest wait for one answer; the router answers from memory."""

BAR_CELLS = 10
_STATE_STYLES = {"ready": "green", "draining": "yellow", "unreachable": "red", "stale": "red"}

_STREAM_STYLES = {"live": "green", "syncing": "yellow", "replaying": "yellow", "snapshotting": "yellow"}

WIDE_COLUMNS = 120
"""Terminals narrower than this leave the optional columns out."""

R = TypeVar("R")


class StreamView(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker's event stream can be trusted."""

    state: str = ""
    trusted: bool = True
    disagreement: float = 0.0


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``GET /v1/workers``."""

    worker_id: str
    dp_rank: int = 0
    model: str = ""
    role: str = ""
    state: str = ""
    epoch: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    prefill_tokens: int = 0
    active_blocks: int = 0
    cached_blocks: int = 0
    indexed_blocks: int = 0
    total_blocks: int = 0
    requests_total: int = 0
    event_lag_ms: float | None = None
    last_event_ms_ago: float | None = None
    stream: StreamView = StreamView()


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``GET /v1/decisions``."""

    request_id: str
    time_ms: int = 0
    policy: str = ""
    reason: str = ""
    worker: str = ""
    isl: int = 0
    isl_blocks: int = 0
    overlap_blocks: int = 0
    cost: float | None = None
    candidates: int = 0
    realised_cached_tokens: int | None = None


class Workers(msgspec.Struct, frozen=True):
    """Answer of ``GET /v1/workers``."""

    data: list[WorkerRow]
    offset: int = 0


class Decisions(msgspec.Struct, frozen=True):
    """Answer of ``GET /v1/decisions``."""

    data: list[DecisionRow]


class Frame(msgspec.Struct, frozen=True):
    """What one look at the router brought: both answers, or none and why."""

    url: str
    workers: Workers | None = None
    decisions: Decisions | None = None
    fault: str | None = None
    """Why the last attempt failed; the answers, if any, are then from an earlier one."""


def usage_bar(used: int, total: int) -> Text:
    """Return a bar for the used share of a total, e.g. ``███░░░░░░░  30 %``."""
    if total <= 0:
        return Text("–", style="dim")
    share = min(1.0, max(0.0, used / total))
    filled = round(share * BAR_CELLS)
    style = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"
    return Text.assemble(("█" * filled, style), ("░" * (BAR_CELLS - filled), "dim"), f" {round(100 * share):3d} %")


def milliseconds(value: float | None) -> str:
    """Return a duration for people: ``12 ms``, ``3.4 s``, ``5 min``, or a dash."""
    if value is None:
        return "–"
    if value < 1000:
        return f"{value:.0f} ms"
    if value < 120_000:
        return f"{value / 1000:.1f} s"
    return f"{value / 60_000:.0f} min"


def stream_cell(stream: StreamView) -> Text:
    """Return the state of a stream, and when it is not believed, that its overlap is predicted."""
    if stream.trusted:
        return Text(stream.state, style=_STREAM_STYLES.get(stream.state, ""))
    word = stream.state if stream.state == "stale" else f"suspect {stream.disagreement:.0%}"
    return Text(word, style="red")


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column, its cell for a row, and whether a narrow terminal can do without it."""

    heading: str
    cell: Callable[[R], RenderableType]
    numeric: bool = True
    optional: bool = False


WORKER_COLUMNS: tuple[Column[WorkerRow], ...] = (
    Column("worker", lambda row: Text(row.worker_id if row.dp_rank == 0 else f"{row.worker_id}/{row.dp_rank}"), False),
    Column("model", lambda row: Text(row.model), False, optional=True),
    Column("role", lambda row: Text(row.role), False, optional=True),
    Column("state", lambda row: Text(row.state, style=_STATE_STYLES.get(row.state, "")), False),
    Column("stream", lambda row: stream_cell(row.stream), False),
    Column("run", lambda row: f"{row.running_requests:,}"),
    Column("wait", lambda row: f"{row.waiting_requests:,}"),
    Column("KV in use", lambda row: usage_bar(row.active_blocks, row.total_blocks)),
    Column("cached", lambda row: f"{row.cached_blocks:,}"),
    Column("indexed", lambda row: f"{row.indexed_blocks:,}", optional=True),
    Column("prefill tok", lambda row: f"{row.prefill_tokens:,}", optional=True),
    Column("lag", lambda row: milliseconds(row.event_lag_ms), optional=True),
    Column("last event", lambda row: milliseconds(row.last_event_ms_ago), optional=True),
    Column("requests", lambda row: f"{row.requests_total:,}"),
)

DECISION_COLUMNS: tuple[Column[DecisionRow], ...] = (
    Column("request", lambda row: Text(row.request_id), False),
    Column("worker", lambda row: Text(row.worker), False),
    Column("policy", lambda row: Text(row.policy), False, optional=True),
    Column("reason", lambda row: Text(row.reason), False),
    Column("overlap/ISL blocks", lambda row: f"{row.overlap_blocks:,}/{row.isl_blocks:,}"),
    Column("ISL", lambda row: f"{row.isl:,}", optional=True),
    Column("reused tok", lambda row: "–" if row.realised_cached_tokens is None else f"{row.realised_cached_tokens:,}"),
    Column("cost", lambda row: "–" if row.cost is None else f"{row.cost:,.2f}", optional=True),
    Column("of", lambda row: f"{row.candidates:,}", optional=True),
)


def _table(title: str, columns: Sequence[Column[R]], rows: Sequence[R], width: int) -> Table:
    shown = [column for column in columns if width >= WIDE_COLUMNS or not column.optional]
    table = Table(title=title, title_justify="left", expand=True, box=box.SIMPLE_HEAD)
    for column in shown:
        if column.numeric:
            table.add_column(column.heading, justify="right", no_wrap=True)
        else:
            table.add_column(column.heading, overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(column.cell(row) for column in shown))
    return table


def worker_table(rows: Sequence[WorkerRow], width: int = WIDE_COLUMNS) -> Table:
    """Return the table of workers, in order of name and rank, for a terminal of ``width`` columns."""
    ordered = sorted(rows, key=lambda row: (row.worker_id, row.dp_rank))
    table = _table("workers", WORKER_COLUMNS, ordered[:WORKERS_SHOWN_MAX], width)
    if len(ordered) > WORKERS_SHOWN_MAX:
        table.caption = f"{len(ordered) - WORKERS_SHOWN_MAX:,} more workers are not shown"
    return table


def decision_table(rows: Sequence[DecisionRow], width: int = WIDE_COLUMNS) -> Table:
    """Return the table of decisions, in the order given."""
    return _table("last decisions", DECISION_COLUMNS, rows, width)


def view(frame: Frame, width: int = WIDE_COLUMNS) -> RenderableType:
    """Return one screen: a headline, the workers, the decisions."""
    parts: list[RenderableType] = []
    if frame.workers is not None:
        rows = frame.workers.data
        states = ", ".join(
            f"{count} {state}"
            for state in ("ready", "draining", "unreachable", "stale")
            if (count := sum(row.state == state for row in rows))
        )
        running = sum(row.running_requests for row in rows)
        waiting = sum(row.waiting_requests for row in rows)
        headline = (
            f"{frame.url}   workers: {states or 'none'}   requests: {running:,} running, {waiting:,} waiting   "
            f"journal offset {frame.workers.offset:,}"
        )
        parts.append(Text(headline, style="bold"))
    if frame.fault is not None:
        known = "; below is what was known last" if frame.workers is not None else ""
        parts.append(Panel(Text(f"{frame.url} does not answer: {frame.fault}{known}"), border_style="red"))
    if frame.workers is not None:
        parts.append(worker_table(frame.workers.data, width))
    if frame.decisions is not None:
        parts.append(decision_table(frame.decisions.data, width))
    return Group(*parts)


class FetchError(Exception):
    """The router could not be read; the message says what was asked and what came."""


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
        raise FetchError(f"GET {path}: status {answer.status_code}")
    return b"".join(chunks)


async def fetch(client: httpx.AsyncClient, before: Frame) -> Frame:
    """Return the router's state now; on a fault the state ``before``, marked with the fault."""
    try:
        workers = await _get(client, "/v1/workers")
        decisions = await _get(client, f"/v1/decisions?limit={DECISIONS_SHOWN}")
        return Frame(
            before.url,
            msgspec.json.decode(workers, type=Workers),
            msgspec.json.decode(decisions, type=Decisions),
        )
    except FetchError as error:
        fault = str(error)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        fault = f"the answer is not a router's: {error}"
    return Frame(before.url, before.workers, before.decisions, fault)


async def _watch(console: Console, url: str, interval_s: float, stop: asyncio.Event) -> None:
    frame = Frame(url)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=api_key_headers()) as client:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False, transient=False) as live:
            while not stop.is_set():
                frame = await fetch(client, frame)
                live.update(view(frame, console.width), refresh=True)
                try:
                    await asyncio.wait_for(stop.wait(), interval_s)
                except TimeoutError:
                    pass  # time for the next look


async def _look(console: Console, url: str) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=api_key_headers()) as client:
        frame = await fetch(client, Frame(url))
    console.print(view(frame, console.width))
    return 0 if frame.fault is None else 1


def top(url: str, interval_s: float, once: bool) -> int:
    """Show the router at ``url`` every ``interval_s`` seconds until SIGINT; with ``once`` show it once.

    Returns the exit code: with ``once`` 1 when the router did not answer as one, else 0.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        Console(stderr=True).print(
            f"poolgrid top: url is {url!r}, allowed are http://HOST[:PORT] and https://HOST[:PORT]", markup=False
        )
        return 1
    if not 0.05 <= interval_s <= 3600:
        Console(stderr=True).print(
            f"poolgrid top: interval is {interval_s} s, allowed are values from 0.05 to 3600", markup=False
        )
        return 1
    # httpx logs a line per request, which would tear the screen.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    console = Console()
    if once:
        return asyncio.run(_look(console, url))

    async def main(stop: asyncio.Event) -> None:
        await _watch(console, url, interval_s, stop)

    lifecycle.run(main)
    return 0
