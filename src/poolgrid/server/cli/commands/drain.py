"""`poolgrid drain`: take workers out of use without losing a stream.

A worker is drained when its router knows that it drains and nothing of any router is on it, or when it has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import click
import httpx
import msgspec

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.answers import WorkerList, WorkerRow
from poolgrid.server.cli.command_line import as_json, command, print_json, router_url
from poolgrid.server.cli.router_client import KEY_NOTE, api_key_headers, found_url, refusal
from poolgrid.server.process.figures import counted
from poolgrid.server.transport.security import is_loopback

LOOK_INTERVAL_S = 0.2
"""Between two looks at what is left: a drain takes seconds, and a look costs its router a millisecond."""

TIMEOUT_S = 5.0
"""Longest wait for one answer; routers and workers answer from memory."""

WORKERS_PATH = "/v1/workers"

T = TypeVar("T")
Left = Callable[[], Awaitable[dict[str, str]]]
"""Says of each worker that is not drained yet what is left there; raises ``DrainFailed``."""


class Named(msgspec.Struct, frozen=True):
    """Workers that got the order, from the answer to it."""

    worker_id: str


class WorkerHealth(msgspec.Struct, frozen=True):
    """What a worker reports in ``/health``, as far as it matters here."""

    status: str
    running_requests: int
    waiting_requests: int


class DrainFailed(Exception):
    """A process could not be reached; the message names it, and what is known."""


@dataclass(frozen=True, slots=True)
class Told:
    """The order to workers, and how long to wait for them."""

    timeout_ms: int | None
    wait_s: float

    @property
    def query(self) -> dict[str, str]:
        return {} if self.timeout_ms is None else {"timeout_ms": str(self.timeout_ms)}


def left_on(rows: Sequence[WorkerRow], workers: Collection[str]) -> dict[str, str]:
    """Return, of each of these workers that is not drained yet, what is left there; nothing of one that has left."""
    left: dict[str, str] = {}
    for row in rows:
        if row.worker_id not in workers:
            continue
        # Its own count, or the router's, the larger one: one is late by an event, the other by a choice.
        requests = max(row.running_requests + row.waiting_requests, row.active_requests)
        if row.state != "draining":
            left[row.worker_id] = "has not reported yet that it drains"
        elif requests:
            left[row.worker_id] = counted(requests, "request")
    return left


def without_anybody(rows: Sequence[WorkerRow], workers: Collection[str]) -> list[str]:
    """Return the models and roles that no worker will serve once these workers have drained."""
    lost = {(row.model, row.role) for row in rows if row.worker_id in workers and row.state != "draining"}
    kept = {(row.model, row.role) for row in rows if row.worker_id not in workers and row.state == "ready"}
    # An aggregated worker does what prefill and decode workers do.
    whole = {model for model, role in kept if role == "aggregated"}
    return sorted(f"{model} ({role})" for model, role in lost - kept if model not in whole or role == "encode")


def drain_through(url: str, names: Sequence[str], told: Told, as_json: bool) -> int:
    """Drain the named workers of a router's pool, or all without a name; return the exit status."""
    return asyncio.run(_at(url, api_key_headers(), lambda client: _drain(client, names, told, as_json)))


def drain_here(url: str, told: Told, as_json: bool) -> int:
    """Drain the worker whose HTTP this is; return the exit status."""
    return asyncio.run(_at(url, {}, lambda client: _drain_here(client, told, as_json)))


async def _at(url: str, headers: dict[str, str], work: Callable[[httpx.AsyncClient], Awaitable[int]]) -> int:
    """Work with a client of ``url``; a failure is printed, and is status 1."""
    try:
        base = httpx.URL(url.rstrip("/"))
        # No certificate names this machine to itself; without a key, another process there gains nothing.
        checked = bool(headers) or not is_loopback(base.host)
        async with httpx.AsyncClient(base_url=base, timeout=TIMEOUT_S, headers=headers, verify=checked) as client:
            return await work(client)
    except (DrainFailed, httpx.InvalidURL) as error:
        click.echo(f"draining at {without_credentials(url)}: {error}", err=True)
        return 1


async def _drain(client: httpx.AsyncClient, names: Sequence[str], told: Told, as_json: bool) -> int:
    rows = await _rows(client)
    known = sorted({row.worker_id for row in rows})
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise DrainFailed(
            f"the pool has no worker {', '.join(unknown)}, it has {', '.join(known) or 'none'}; no worker is drained"
        )
    workers = list(names) or known
    for lost in without_anybody(rows, workers):
        click.echo(
            f"no other worker serves {lost}: requests that do not finish in time have nowhere to go in this pool",
            err=True,
        )
    for worker in workers:
        await _tell(client, f"{WORKERS_PATH}/{quote(worker, safe='')}/drain", told)

    async def left() -> dict[str, str]:
        return left_on(await _rows(client), workers)

    return await _finish(left, workers, told, as_json)


async def _drain_here(client: httpx.AsyncClient, told: Told, as_json: bool) -> int:
    worker = (await _tell(client, "/drain", told)).worker_id

    async def left() -> dict[str, str]:
        state = _decoded(await _ask(client, "GET", "/health", frozenset({200, 503})), WorkerHealth)
        requests = counted(state.running_requests + state.waiting_requests, "request")
        return {} if state.status == "drained" else {worker: requests}

    return await _finish(left, [worker], told, as_json)


async def _finish(left: Left, workers: Sequence[str], told: Told, as_json: bool) -> int:
    """Wait until nothing is left, print how it ended, return the exit status."""
    remaining = (
        await _wait(left, told.wait_s)
        if told.wait_s
        else dict.fromkeys(workers, "ordered to drain, and not waited for")
    )
    if as_json:
        print_json({"workers": [{"worker_id": each, "left": remaining.get(each)} for each in workers]})
    else:
        for worker in workers:
            click.echo(f"{worker}: {remaining.get(worker, 'drained')}")
    return 1 if remaining and told.wait_s else 0


async def _wait(left: Left, wait_s: float) -> dict[str, str]:
    """Return what is left when everything has gone, or the time is over; a process that does not answer is asked
    again."""
    ends_s = asyncio.get_running_loop().time() + wait_s
    remaining: dict[str, str] = {}
    while True:
        trouble: DrainFailed | None = None
        try:
            remaining = await left()
            if not remaining:
                return remaining
        except DrainFailed as error:
            trouble = error
        if asyncio.get_running_loop().time() > ends_s:
            if trouble is not None:
                raise trouble
            return remaining
        await asyncio.sleep(LOOK_INTERVAL_S)


async def _rows(client: httpx.AsyncClient) -> list[WorkerRow]:
    return _decoded(await _ask(client, "GET", WORKERS_PATH, frozenset({200})), WorkerList).data


async def _tell(client: httpx.AsyncClient, path: str, told: Told) -> Named:
    return _decoded(await _ask(client, "POST", path, frozenset({202}), told.query), Named)


def _decoded(answer: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise DrainFailed(f"{answer.url.path} is not answered as poolgrid does: {error}") from None


async def _ask(
    client: httpx.AsyncClient, method: str, path: str, good: frozenset[int], query: dict[str, str] | None = None
) -> httpx.Response:
    try:
        answer = await client.request(method, path, params=query)
    except httpx.HTTPError as error:
        raise DrainFailed(f"{path}: {error}") from None
    if answer.status_code not in good:
        raise DrainFailed(f"{path}: status {answer.status_code}: {refusal(answer.status_code, answer.content)}")
    return answer


SECONDS = click.FloatRange(0, 86_400)


@command(epilog=KEY_NOTE)
@click.argument("workers", nargs=-1, help="Workers to drain, as `top` names them.")
@router_url("Router of the pool they are in.")
@click.option("--all", "every", is_flag=True, help="Drain every worker of the pool.")
@click.option(
    "--worker-url", help="Drain the one worker whose health is here, without a router; on its own machine only."
)
@click.option(
    "--timeout-s",
    type=SECONDS,
    help="Running requests may take so many seconds to finish; then other workers continue them. By default each "
    "worker's --shutdown-timeout-ms.",
)
@click.option(
    "--wait-s",
    type=SECONDS,
    default=600.0,
    help="Wait so many seconds until nothing is left; 0 = do not wait. [default: 600]",
)
@as_json
def drain(
    workers: tuple[str, ...],
    url: str,
    every: bool,
    worker_url: str | None,
    timeout_s: float | None,
    wait_s: float,
    as_json: bool,
) -> None:
    """Drain workers: they take no new requests, finish or hand over the others, and can be stopped then."""
    names = list(dict.fromkeys(workers))
    if bool(names) + every + (worker_url is not None) != 1:
        raise click.BadParameter("name workers, or give --all, or --worker-url: exactly one of the three")
    told = Told(None if timeout_s is None else round(1000 * timeout_s), wait_s)
    if worker_url is not None:
        raise SystemExit(drain_here(worker_url, told, as_json))
    raise SystemExit(drain_through(found_url(url), names, told, as_json))
