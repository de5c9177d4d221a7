"""``poolgrid bench``: plan the load, run it with a progress bar on stderr, print the table on stdout."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from poolgrid.cli.json_output import cannot_write, json_text, print_json
from poolgrid.loadgen import schedule
from poolgrid.loadgen.client import Client, Target
from poolgrid.loadgen.prompt import WORDS, PlannedRequest, PromptMaker, digits_of
from poolgrid.loadgen.runner import RequestShape, Result, Verify, run
from poolgrid.loadgen.settings import BenchSettings
from poolgrid.loadgen.statistics import Measurements, Report, report
from poolgrid.loadgen.table import report_table
from poolgrid.loadgen.trace import TraceError, ideal_cached_token_ratio, plan_trace, read_trace
from poolgrid.runtime import lifecycle
from poolgrid.runtime.clock import SystemClock
from poolgrid.runtime.terminal_table import terminal

REQUESTS_DEFAULT = 100
"""Requests of a closed or open loop that was told neither a number nor a duration."""


class BenchError(Exception):
    """The run cannot start; the message says why and what to do."""


def detect_model(target: Target, api_key: str | None, connect_timeout_s: float, wanted: str | None) -> str:
    """Return the model to ask for, having made sure that the endpoint answers; raise ``BenchError`` otherwise."""
    url = f"{target.url}/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(url, headers=headers, timeout=httpx.Timeout(30.0, connect=connect_timeout_s))
    except httpx.HTTPError as error:
        raise BenchError(f"asking {url}: {error}; is the endpoint running, and is --url right?") from None
    if wanted is not None:
        return wanted
    try:
        answer.raise_for_status()
        model = answer.json()["data"][0]["id"]
        if not isinstance(model, str):
            raise TypeError(f"id is {model!r}")
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BenchError(
            f"asking {url} for a model: status {answer.status_code}, {error}; name one with --model"
        ) from None
    return model


def plan(settings: BenchSettings) -> tuple[Iterable[PlannedRequest], int | None]:
    """Return the requests to send and their number (``None`` when only time ends the run)."""
    if settings.trace is not None:
        rows = read_trace(settings.trace, settings.requests)
        planned = plan_trace(
            rows,
            speed=settings.speed,
            length_scale=settings.length_scale,
            isl_max=settings.isl_max,
            osl_max=settings.osl_max,
        )
        _check_ids_differ(planned, settings)
        if settings.duration_s is not None:
            ends_ms = settings.duration_s * 1000.0
            planned = [request for request in planned if request.at_ms is not None and request.at_ms < ends_ms]
        return planned, len(planned)
    count = settings.requests
    if count is None and settings.duration_s is None:
        count = REQUESTS_DEFAULT
    times: Iterable[float | None]
    if settings.rate is None:
        times = itertools.repeat(None)
    else:
        arrivals = (
            schedule.fixed(settings.rate)
            if settings.arrivals == "fixed"
            else schedule.poisson(settings.rate, settings.seed)
        )
        times = arrivals if settings.duration_s is None else schedule.until(arrivals, settings.duration_s * 1000.0)
    requests = schedule.synthetic(times, isl=settings.isl, osl=settings.osl, seed=settings.seed)
    return (requests if count is None else itertools.islice(requests, count)), count


def _check_ids_differ(planned: list[PlannedRequest], settings: BenchSettings) -> None:
    """Refuse a scale at which blocks are too short to tell the trace's ids apart."""
    base = (
        len(WORDS)
        if settings.text or settings.endpoint == "chat"
        else settings.token_id_max - settings.token_id_min + 1
    )
    largest = max(max(request.block_ids) for request in planned)
    needed = digits_of(largest, base)
    if planned[0].block_tokens < needed:
        raise TraceError(
            f"length scale {settings.length_scale} leaves {planned[0].block_tokens} tokens per trace block, allowed "
            f"are at least {needed}: fewer cannot tell {largest + 1} block ids apart; nothing was sent"
        )


def bench(settings: BenchSettings, *, verify: Verify | None = None, progress_console: Console | None = None) -> Report:
    """Run the load and return the report.

    Raises ``BenchError``, ``TraceError`` or ``ValueError`` when it cannot start.
    """
    clock = SystemClock()
    target = Target(settings.url)
    prompts = PromptMaker(settings.token_id_min, settings.token_id_max)
    requests, total = plan(settings)
    model = detect_model(target, settings.api_key, settings.connect_timeout_s, settings.model)
    client = Client(
        target,
        clock,
        api_key=settings.api_key,
        connect_timeout_s=settings.connect_timeout_s,
        request_timeout_s=settings.request_timeout_s,
    )
    shape = RequestShape(model, settings.endpoint, settings.text, settings.ignore_eos)
    results: list[Result] = []

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[errors]} errors"),
        TimeElapsedColumn(),
        console=progress_console or Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(f"{settings.mode} loop" if settings.mode != "replay" else "replay", total=total, errors=0)

        async def main(stop: asyncio.Event) -> None:
            results.append(
                await run(
                    client,
                    shape,
                    prompts,
                    requests,
                    clock,
                    concurrency=settings.concurrency if settings.mode == "closed" else None,
                    in_flight_max=settings.max_in_flight,
                    duration_s=settings.duration_s,
                    stop=stop,
                    verify=verify,
                    progress=lambda measured: _show(bar, task, measured),
                    remember_sent=settings.mode == "replay",
                )
            )

        lifecycle.run(main)
    if not results:
        raise BenchError("the run was ended before it could be summed up (a second signal)")
    result = results[0]
    return report(
        result.measured,
        mode=settings.mode,
        url=target.url,
        model=model,
        duration_s=result.duration_s,
        ideal_cached_token_ratio=ideal_cached_token_ratio(result.sent) if settings.mode == "replay" else None,
        interrupted=result.interrupted,
    )


def _show(bar: Progress, task: TaskID, measured: Measurements) -> None:
    bar.update(task, completed=measured.requests, errors=measured.errors)


def run_bench(settings: BenchSettings) -> int:
    """Run ``poolgrid bench`` and return its exit code: 0, or 1 when the run could not start or nothing succeeded."""
    errors = Console(stderr=True, highlight=False)
    if fault := cannot_write(settings.out):
        errors.print(f"poolgrid bench: --out: {fault}; nothing was sent", markup=False, soft_wrap=True)
        return 2
    try:
        found = bench(settings)
    except (BenchError, TraceError, ValueError) as error:
        errors.print(f"poolgrid bench: {error}", markup=False, soft_wrap=True)
        return 1
    if settings.as_json:
        print_json(found)
    else:
        terminal().print(report_table(found))
    if settings.out is not None:
        try:
            settings.out.write_text(json_text(found), encoding="utf-8")
        except OSError as error:
            errors.print(f"poolgrid bench: writing {settings.out}: {error}", markup=False, soft_wrap=True)
            return 1
    return 0 if found.requests > found.errors or found.interrupted else 1
