"""``poolgrid bench``: plan the load, run it with a progress bar on stderr, print the tables on stdout.

A run is one endpoint at one concurrency. Several endpoints (or policies, each with a pool that is started for it),
several concurrencies and several rounds make a series: concurrency by concurrency, round by round, the endpoints one
after the other, each round with other prompts, and in a round all endpoints with the same.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.kernel.wire.secret_texts import without_received_bytes
from poolgrid.plugins.bench.client import Client, HttpTarget, RequestFailed
from poolgrid.plugins.bench.conversations import (
    ConversationShape,
    plan_conversations,
    synthetic,
)
from poolgrid.plugins.bench.prompt import ONE_TOKEN_A_WORD, WORDS, PlannedRequest, PromptMaker, digits_of
from poolgrid.plugins.bench.runner import (
    Planned,
    PoolsFailed,
    RequestShape,
    Result,
    Verify,
    measure_word_scale,
    open_pools,
    run,
)
from poolgrid.plugins.bench.settings import BenchSettings
from poolgrid.plugins.bench.statistics import Measurements, Point, Report, Series, report, with_ratios
from poolgrid.plugins.bench.table import report_table, series_table
from poolgrid.plugins.bench.trace import TraceError, ideal_cached_token_ratio, plan_trace, read_trace
from poolgrid.server.cli.command_line import API_KEY_VARIABLE, cannot_write, command, json_text, print_json
from poolgrid.server.cli.options import with_settings
from poolgrid.server.cli.router_client import api_key_headers, url_of
from poolgrid.server.process import lifecycle
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.tasks import unless
from poolgrid.server.process.terminal_table import terminal

REQUESTS_DEFAULT = 100
"""Requests of a closed loop with neither a number nor a duration."""

CONNECT_TIMEOUT_S = 10.0

PROGRESS_LINE_MS = 10_000.0
"""Between two lines of progress where there is no terminal."""

IN_FLIGHT_MAX = 900
"""Requests of a replay at once, below the usual limit of 1,024 open files; a request beyond it waits,
which is counted and part of its times."""

TOKEN_ID_MIN, TOKEN_ID_MAX = 16, 255
"""Token ids in prompts: special ones lie below, and every byte-level vocabulary reaches the last."""

READY_INTERVAL_S = 0.2
"""Between two looks at an endpoint that is not ready."""


class BenchError(Exception):
    """The run cannot start; the message has the reason and the fix."""


async def until_ready(target: HttpTarget, settings: BenchSettings) -> None:
    """Wait until an endpoint reports ready; raise ``BenchError`` when it does not in time.

    One without ``/ready`` (404) counts as ready.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + settings.start_timeout_ms / 1000
    url = f"{target.url}/ready"
    async with _http() as client:
        while True:
            try:
                answer = await client.get(url)
                if answer.status_code in (200, 401, 403, 404, 405):
                    return
                why = f"status {answer.status_code}: {answer.text[:200]}"
            except httpx.HTTPError as error:
                why = without_received_bytes(error)
            if loop.time() >= deadline_s:
                raise BenchError(
                    f"asking {url} for {settings.start_timeout_ms / 1000:g} s: {why}; is the endpoint running, and "
                    "is --url right? --start-timeout-ms waits longer"
                )
            await asyncio.sleep(READY_INTERVAL_S)


async def detect_model(target: HttpTarget, settings: BenchSettings) -> str:
    """Return the model to ask for, having made sure that the endpoint answers; raise ``BenchError`` otherwise."""
    url = f"{target.url}/v1/models"
    try:
        async with _http() as client:
            answer = await client.get(url)
    except httpx.HTTPError as error:
        raise BenchError(
            f"asking {url}: {without_received_bytes(error)}; is the endpoint running, and is --url right?"
        ) from None
    if settings.model is not None:
        return settings.model
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


def _http() -> httpx.AsyncClient:
    return httpx.AsyncClient(headers=api_key_headers(), timeout=httpx.Timeout(30.0, connect=CONNECT_TIMEOUT_S))


def plan(settings: BenchSettings, seed: int | None = None) -> tuple[Iterable[Planned], int | None]:
    """Return what to send and how many requests that is (``None`` when only time ends the run).

    ``seed`` is in place of the settings' own.
    """
    seed = settings.seed if seed is None else seed
    if settings.trace is not None:
        rows = read_trace(settings.trace, settings.requests)
        planned = plan_trace(
            rows,
            speed=settings.speed,
            length_scale=settings.length_scale,
            isl_max=settings.isl,
            osl_max=settings.osl,
        )
        _check_ids_differ(planned, settings)
        if settings.duration_s is not None:
            ends_ms = settings.duration_s * 1000.0
            planned = [request for request in planned if request.at_ms is not None and request.at_ms < ends_ms]
        return planned, len(planned)
    count = settings.requests
    if count is None and settings.duration_s is None:
        count = REQUESTS_DEFAULT
    if settings.converses:
        conversations = plan_conversations(_conversation_shape(settings), seed)
        if count is None:
            return conversations, None
        number = -(-count // settings.turns)
        return itertools.islice(conversations, number), number * settings.turns
    requests = synthetic(isl=settings.prompt_tokens, osl=settings.output_tokens, seed=seed)
    return (requests if count is None else itertools.islice(requests, count)), count


def _conversation_shape(settings: BenchSettings) -> ConversationShape:
    return ConversationShape(
        settings.turns,
        settings.prompt_tokens,
        settings.output_tokens,
        settings.shared_prefix,
        settings.think_time_s,
    )


def _check_ids_differ(planned: list[PlannedRequest], settings: BenchSettings) -> None:
    """Refuse a scale at which blocks are too short to tell the trace's ids apart."""
    base = len(WORDS) if settings.writes_words else TOKEN_ID_MAX - TOKEN_ID_MIN + 1
    largest = max(max(request.block_ids) for request in planned)
    needed = digits_of(largest, base)
    if planned[0].block_tokens < needed:
        raise TraceError(
            f"length scale {settings.length_scale} leaves {planned[0].block_tokens} tokens per trace block, allowed "
            f"are at least {needed}: fewer cannot distinguish {largest + 1} block ids; nothing was sent"
        )


@dataclass(slots=True)
class _Endpoint:
    """One of the endpoints that are measured."""

    name: str
    target: HttpTarget
    model: str
    prompts: PromptMaker


@dataclass(slots=True)
class _Rounds:
    """What was measured of one endpoint at one concurrency."""

    endpoint: _Endpoint
    concurrency: int | None
    measured: Measurements = field(default_factory=Measurements)
    duration_s: float = 0.0
    ideal: float | None = None
    interrupted: bool = False
    reports: list[Report] = field(default_factory=list)


class _Bench:
    """One command: what it measures, how far it is, and what came of it."""

    def __init__(self, settings: BenchSettings, verify: Verify | None, bar: Progress) -> None:
        self._settings = settings
        self._verify = verify
        self._clock = SystemClock()
        self._bar = bar
        self._done = self._total = 0
        """Requests of earlier runs, and of all runs; 0 = not known."""
        self._runs_done = 0
        self._began_ms = self._line_due_ms = 0.0
        self.found: list[_Rounds] = []
        self.failure: Exception | None = None

    async def main(self, stop: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as opened:
                await self._measure(stop, opened)
        except (BenchError, PoolsFailed, TraceError, ValueError, OSError) as error:
            self.failure = error

    async def _measure(self, stop: asyncio.Event, opened: AsyncExitStack) -> None:
        settings = self._settings
        _, total = plan(settings)
        task = self._bar.add_task("starting", total=None, done="")
        urls = {}
        if settings.policies:
            self._bar.update(task, description=f"starting pools: {', '.join(settings.policies)}")
            urls = await opened.enter_async_context(open_pools(settings.policies, settings.pool_options))
        else:
            urls = {url: await url_of(url) for url in settings.url}
        self._bar.update(task, description="waiting until all are ready")
        endpoints = []
        for name, url in urls.items():
            endpoint = await unless(stop, self._endpoint(name, url), f"start of {url}")
            if endpoint is None:
                return
            endpoints.append(endpoint)
        levels = settings.concurrency if settings.mode == "closed" else (None,)
        runs = len(levels) * settings.rounds_run * len(endpoints)
        self._total = (total or 0) * runs
        self._bar.update(task, total=self._total if settings.duration_s is None else settings.duration_s * runs)
        for place, level in enumerate(levels):
            rounds = [_Rounds(endpoint, level) for endpoint in endpoints]
            self.found += rounds
            for number in range(settings.rounds_run):
                seed = settings.seed
                if place or number:
                    seed = stable_u64(f"{settings.seed}/{place}/{number}") >> 1
                for at in range(len(endpoints)):
                    # Who is first in a round is last in the next.
                    await self._round(rounds[(at + number) % len(endpoints)], number, seed, task, stop)
                    if stop.is_set():
                        return

    async def _endpoint(self, name: str, url: str) -> _Endpoint:
        settings = self._settings
        target = HttpTarget(url)
        await until_ready(target, settings)
        model = await detect_model(target, settings)
        scale = ONE_TOKEN_A_WORD
        if settings.writes_words:
            client = self._client(target)
            try:
                scale = await measure_word_scale(client, self._shape(model))
            except RequestFailed as error:
                raise BenchError(f"asking {url} what a word is in tokens: {error}; nothing was measured") from None
            finally:
                client.close()
        return _Endpoint(name, target, model, PromptMaker(TOKEN_ID_MIN, TOKEN_ID_MAX, scale))

    def _client(self, target: HttpTarget) -> Client:
        return Client(
            target, self._clock, api_key=os.environ.get(API_KEY_VARIABLE), connect_timeout_s=CONNECT_TIMEOUT_S
        )

    def _shape(self, model: str) -> RequestShape:
        settings = self._settings
        return RequestShape(model, settings.api, settings.writes_words, settings.ignore_eos)

    async def _round(self, rounds: _Rounds, number: int, seed: int, task: TaskID, stop: asyncio.Event) -> None:
        settings = self._settings
        endpoint = rounds.endpoint
        level = rounds.concurrency
        name = f"{endpoint.name}, " if settings.compares else ""
        what = "replay" if settings.mode == "replay" else "closed loop"
        at = "" if level is None else f", {level} at a time"
        again = f", round {number + 1} of {settings.rounds_run}" if settings.rounds_run > 1 else ""
        self._bar.update(task, description=f"{name}{what}{at}{again}")
        planned, _ = plan(settings, seed)
        self._began_ms = self._clock.monotonic_ms()
        self._line_due_ms = self._began_ms + PROGRESS_LINE_MS
        result = await run(
            self._client(endpoint.target),
            self._shape(endpoint.model),
            endpoint.prompts,
            planned,
            self._clock,
            concurrency=level,
            in_flight_max=IN_FLIGHT_MAX,
            duration_s=settings.duration_s,
            stop=stop,
            verify=self._verify,
            progress=lambda measured: self._show(task, measured),
            remember_sent=settings.mode == "replay",
        )
        self._done += result.measured.requests
        self._runs_done += 1
        ideal = _ideal(result) if settings.mode == "replay" or settings.converses else None
        rounds.reports.append(self._report(rounds, result.measured, result.duration_s, ideal, result.interrupted))
        rounds.measured.merge(result.measured)
        rounds.duration_s += result.duration_s
        rounds.interrupted |= result.interrupted
        rounds.ideal = ideal if settings.mode == "replay" else _ideal_of(rounds.measured)

    def _show(self, task: TaskID, measured: Measurements) -> None:
        requests, limit_s = self._done + measured.requests, self._settings.duration_s
        errors = sum(rounds.measured.errors for rounds in self.found) + measured.errors
        now_ms = self._clock.monotonic_ms()
        if limit_s is None:
            done: float = requests
            said = f"{requests} of {self._total} requests, {errors} errors"
        else:
            elapsed_s = min(limit_s, (now_ms - self._began_ms) / 1000)
            done = self._runs_done * limit_s + elapsed_s
            said = f"{elapsed_s:.0f} of {limit_s:g} s, {requests} requests, {errors} errors"
        self._bar.update(task, completed=done, done=said)
        if self._bar.disable and now_ms >= self._line_due_ms:
            self._line_due_ms = now_ms + PROGRESS_LINE_MS
            what = self._bar.tasks[0].description
            self._bar.console.print(f"{what}: {said}", markup=False, highlight=False, soft_wrap=True)

    def _report(
        self, rounds: _Rounds, measured: Measurements, duration_s: float, ideal: float | None, interrupted: bool
    ) -> Report:
        return report(
            measured,
            mode=self._settings.mode,
            url=rounds.endpoint.target.url,
            model=rounds.endpoint.model,
            duration_s=duration_s,
            ideal_cached_token_ratio=ideal,
            interrupted=interrupted,
        )

    def series(self) -> Series:
        """Return what was measured; raises ``BenchError`` when nothing was."""
        points = [
            Point(
                rounds.endpoint.name,
                rounds.concurrency,
                self._report(rounds, rounds.measured, rounds.duration_s, rounds.ideal, rounds.interrupted),
                rounds.reports,
            )
            for rounds in self.found
            if rounds.reports
        ]
        if not points:
            raise BenchError("the run was ended before anything was measured")
        return Series(with_ratios(points), any(point.report.interrupted for point in points))


def _ideal(result: Result) -> float | None:
    return ideal_cached_token_ratio(result.sent) if result.sent else _ideal_of(result.measured)


def _ideal_of(measured: Measurements) -> float | None:
    if measured.reusable_tokens is None or not measured.prompt_tokens:
        return None
    return measured.reusable_tokens / measured.prompt_tokens


def measure(
    settings: BenchSettings, *, verify: Verify | None = None, progress_console: Console | None = None
) -> Series:
    """Measure everything that the settings ask for.

    Raises ``BenchError``, ``PoolsFailed``, ``TraceError``, ``OSError`` or ``ValueError`` when
    it cannot start.
    """
    console = progress_console or Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        made = _Bench(settings, verify, bar)
        lifecycle.run(made.main)
    if made.failure is not None:
        raise made.failure
    return made.series()


def measure_one(
    settings: BenchSettings, *, verify: Verify | None = None, progress_console: Console | None = None
) -> Report:
    """Measure one endpoint at one concurrency and return the report; raises what ``measure`` raises."""
    return measure(settings, verify=verify, progress_console=progress_console).points[0].report


BASICS = (
    "url",
    "model",
    "trace",
    "concurrency",
    "turns",
    "isl",
    "osl",
    "requests",
    "duration_s",
    "seed",
    "out",
)


@command(epilog=f"An endpoint that takes API keys gets the one in {API_KEY_VARIABLE}.")
@with_settings(BenchSettings, renamed={"as_json": "--json"}, basics=BASICS)
def bench(settings: BenchSettings) -> None:
    """Measure any OpenAI endpoint: closed loop or replay (--trace)."""
    raise SystemExit(run_bench(settings))


def run_bench(settings: BenchSettings) -> int:
    """Run ``poolgrid bench`` and return its exit code: 0, or 1 when the run could not start or nothing succeeded."""
    errors = Console(stderr=True, highlight=False)
    if fault := cannot_write(settings.out):
        errors.print(f"poolgrid bench: --out: {fault}; nothing was sent", markup=False, soft_wrap=True)
        return 2
    try:
        found = measure(settings)
    except (BenchError, PoolsFailed, TraceError, ValueError, OSError) as error:
        errors.print(f"poolgrid bench: {error}", markup=False, soft_wrap=True)
        return 1
    several = len(settings.concurrency) > 1 or settings.compares
    shown = series_table(found.points) if several else report_table(found.points[0].report)
    answer: Series | Report = found if several else found.points[0].report
    if settings.as_json:
        print_json(answer)
    else:
        terminal().print(shown)
    try:
        if settings.out is not None:
            settings.out.write_text(json_text(answer), encoding="utf-8")
    except OSError as error:
        errors.print(f"poolgrid bench: writing {settings.out}: {error.strerror}", markup=False, soft_wrap=True)
        return 1
    succeeded = all(point.report.requests > point.report.errors for point in found.points)
    return 0 if succeeded or found.interrupted else 1
