"""Runs a plan against an endpoint: what is sent when, how many at once, and what is counted.

* Closed loop: ``concurrency`` senders, each with the next request as soon as its last one ended.
* Replay: each request at its scheduled time, whatever became of the others; all its times count from that
  moment, so a slow server cannot hide behind a slow client. At most ``in_flight_max`` run at once: a request that is
  due while all slots are taken waits for one, is counted as ``delayed``, and its wait is part of its measured times.

A conversation is sent turn by turn, each with all that was said before, whatever the endpoint said; its turns are one
place of the concurrency, also while its user thinks. A turn that fails ends it, and so does a
pause that is longer than the run.

A failed request is counted by kind and never ends the run. When ``stop`` is set nothing new is sent, what is in flight
is cancelled, and what was measured so far is returned.

How many tokens the endpoint makes of a word, so that prompts of words have the length that was asked for.

Two requests of known numbers of words are sent; from the tokens that the endpoint counts follow the tokens of a word,
and those that its chat template adds. An endpoint that reports no usage is left at one token a word.
"""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from pydantic import ValidationError

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.plugins.bench.client import BenchExchange, Client, RequestFailed
from poolgrid.plugins.bench.conversations import PlannedConversation
from poolgrid.plugins.bench.prompt import ONE_TOKEN_A_WORD, PlannedRequest, PromptMaker, WordScale
from poolgrid.plugins.bench.statistics import Measurements, Outcome
from poolgrid.server.cli.local_pool import LocalPool, UpSettings, plan
from poolgrid.server.cli.options import option_name, parsed_options
from poolgrid.server.cli.part import PartFailed
from poolgrid.server.frontend.prompt_model import ModelDirectoryError, PromptModel
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import cancel_all, owned

Verify = Callable[[PlannedRequest, str], bool]
"""Says whether a response's text is the right one for its request."""


Message = dict[str, str]
"""A message of a conversation, as OpenAI's API has it."""

Planned = PlannedRequest | PlannedConversation


class RequestShape(msgspec.Struct, frozen=True):
    """How a planned request is written down."""

    model: str
    endpoint: str = "completions"
    """``completions`` or ``chat``."""
    text: bool = False
    """Words instead of token ids; always so in chat."""
    ignore_eos: bool = True
    """Ask the engine to generate until ``osl`` tokens, as most engines understand it."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, request: PlannedRequest, prompts: PromptMaker, earlier: Sequence[Message] = ()) -> bytes:
        """Return the JSON body of a request; ``earlier`` messages are those of its conversation."""
        fields: dict[str, object] = {
            "model": self.model,
            "max_tokens": request.osl,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.endpoint == "chat":
            fields["messages"] = [*earlier, *self.messages(request, prompts)]
        elif self.text:
            fields["prompt"] = " ".join(filter(None, (prompts.system_text(request), prompts.text(request))))
        else:
            fields["prompt"] = msgspec.Raw(prompts.tokens_json(request))
        return msgspec.json.encode(fields)

    def messages(self, request: PlannedRequest, prompts: PromptMaker) -> list[Message]:
        """Return what a turn adds to its conversation: what its user says, at its begin after the system prompt."""
        said = {"role": "user", "content": prompts.text(request, overhead=True)}
        if not request.system_blocks:
            return [said]
        return [{"role": "system", "content": prompts.system_text(request)}, said]


class Result(msgspec.Struct):
    """A finished (or interrupted) run."""

    measured: Measurements
    sent: list[PlannedRequest]
    """What was sent, in order; empty unless the run was asked to remember it."""
    duration_s: float
    interrupted: bool


class Runner:
    """The state of one run."""

    def __init__(
        self,
        client: Client,
        shape: RequestShape,
        prompts: PromptMaker,
        clock: Clock,
        *,
        verify: Verify | None = None,
        progress: Callable[[Measurements], None] | None = None,
        remember_sent: bool = False,
    ) -> None:
        self._prefixes: set[tuple[int, ...]] = set()
        """System prompts that were sent."""
        self._client = client
        self._shape = shape
        self._prompts = prompts
        self._clock = clock
        self._verify = verify
        self._progress = progress
        self._remember_sent = remember_sent
        self._sent: list[PlannedRequest] = []
        self.measured = Measurements()

    async def closed_loop(
        self, requests: Iterator[Planned], *, concurrency: int, duration_s: float | None, stop: asyncio.Event
    ) -> Result:
        """Keep ``concurrency`` requests in flight until they, the time or the patience end."""
        started_ms = self._clock.monotonic_ms()
        ends_ms = started_ms + duration_s * 1000.0 if duration_s is not None else float("inf")

        async def sender() -> None:
            for planned in requests:
                if stop.is_set() or self._clock.monotonic_ms() >= ends_ms:
                    return
                await self._converse(planned, ends_ms)

        await self._supervise([owned(sender(), f"sender {number}") for number in range(concurrency)], stop)
        return self._result(started_ms, stop)

    async def scheduled(self, requests: Iterable[PlannedRequest], *, in_flight_max: int, stop: asyncio.Event) -> Result:
        """Send each request at its time, at most ``in_flight_max`` at once."""
        started_ms = self._clock.monotonic_ms()
        slots = asyncio.Semaphore(in_flight_max)
        running: set[asyncio.Task[None]] = set()
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            slots.release()
            error = None if task.cancelled() else task.exception()
            if error is not None and not failure.done():
                failure.set_exception(error)

        async def dispatch() -> None:
            for planned in requests:
                assert planned.at_ms is not None, "a scheduled run needs times"
                body = self._shape.body(planned, self._prompts)  # before it is due
                due_ms = started_ms + planned.at_ms
                wait_ms = due_ms - self._clock.monotonic_ms()
                if wait_ms > 0:
                    await asyncio.sleep(wait_ms / 1000.0)
                if slots.locked():
                    self.measured.delayed += 1
                await slots.acquire()
                task = owned(self._sent_at(planned, body, due_ms), "request")
                running.add(task)
                task.add_done_callback(ended)
            while running:
                await asyncio.wait(running)

        try:
            await self._supervise([owned(dispatch(), "dispatch")], stop, failure)
        finally:
            await cancel_all(list(running))
        return self._result(started_ms, stop)

    async def _supervise(
        self, tasks: list[asyncio.Task[None]], stop: asyncio.Event, failure: asyncio.Future[None] | None = None
    ) -> None:
        """Wait for the tasks or for ``stop``, then leave none behind; a fault of our own is raised."""
        work = asyncio.gather(*tasks)
        stopped = owned(stop.wait(), "end of the run")
        waits: list[asyncio.Future[Any]] = [work, stopped] if failure is None else [work, stopped, failure]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if failure is not None and failure.done():
                failure.result()
            if work.done():
                work.result()
        finally:
            stopped.cancel()
            await cancel_all(tasks)
            if work.done() and not work.cancelled():
                work.exception()  # retrieved, so that asyncio does not report it a second time

    async def _sent_at(self, planned: PlannedRequest, body: bytes, due_ms: float) -> None:
        await self._send(body, planned, due_ms)

    async def _converse(self, planned: Planned, ends_ms: float) -> None:
        """Send a request, or the turns of a conversation one after the other."""
        if isinstance(planned, PlannedRequest):
            await self._send(self._shape.body(planned, self._prompts), planned, None)
            return
        said: list[Message] = []
        reusable = self._reusable_prefix(planned.turns[0])
        for request, pause_ms in zip(planned.turns, planned.pauses_ms, strict=True):
            if said:
                if self._clock.monotonic_ms() + pause_ms >= ends_ms:
                    return
                await asyncio.sleep(pause_ms / 1000.0)
            exchange = await self._send(self._shape.body(request, self._prompts, said), request, None, reusable)
            if exchange is None:
                return
            said += self._shape.messages(request, self._prompts)
            said.append({"role": "assistant", "content": exchange.text})
            usage = exchange.usage
            reusable = 0 if usage is None else usage.prompt_tokens + usage.completion_tokens

    def _reusable_prefix(self, request: PlannedRequest) -> int:
        """Return how many tokens of a first turn were sent before."""
        prefix = request.block_ids[: request.system_blocks]
        if not prefix:
            return 0
        known = prefix in self._prefixes
        self._prefixes.add(prefix)
        return request.system_blocks * request.block_tokens if known else 0

    async def _send(
        self, body: bytes, request: PlannedRequest, due_ms: float | None, reusable_tokens: int | None = None
    ) -> BenchExchange | None:
        """Send one request and count what came of it; ``None`` when it failed."""
        if self._remember_sent:
            self._sent.append(request)
        started_ms = due_ms if due_ms is not None else self._clock.monotonic_ms()
        exchange = None
        try:
            exchange = await self._client.post(self._shape.path, body)
        except RequestFailed as error:
            self.measured.add_error(error.kind, error.detail)
        except asyncio.CancelledError:
            self.measured.cancelled += 1
            raise
        else:
            self.measured.add(_outcome(exchange, request, started_ms, reusable_tokens))
            if self._verify is not None and not self._verify(request, exchange.text):
                self.measured.wrong_texts += 1
        if self._progress is not None:
            self._progress(self.measured)
        return exchange

    def _result(self, started_ms: float, stop: asyncio.Event) -> Result:
        duration_s = (self._clock.monotonic_ms() - started_ms) / 1000.0
        return Result(self.measured, self._sent, duration_s, stop.is_set())


def _outcome(
    exchange: BenchExchange, request: PlannedRequest, started_ms: float, reusable_tokens: int | None = None
) -> Outcome:
    usage = exchange.usage
    # An answer whose tokens are no text yet (half a character, say) has its first moment at its end.
    first_ms = exchange.first_ms if exchange.first_ms is not None else exchange.finished_ms
    return Outcome(
        ttft_ms=max(0.0, first_ms - started_ms),
        latency_ms=max(0.0, exchange.finished_ms - started_ms),
        gaps_ms=exchange.gaps_ms,
        prompt_tokens=usage.prompt_tokens if usage is not None else request.isl,
        cached_tokens=usage.cached_tokens if usage is not None else 0,
        output_tokens=usage.completion_tokens if usage is not None else exchange.chunks,
        usage_reported=usage is not None,
        worker=exchange.worker,
        reusable_tokens=reusable_tokens,
    )


async def run(
    client: Client,
    shape: RequestShape,
    prompts: PromptMaker,
    requests: Iterable[Planned],
    clock: Clock,
    *,
    concurrency: int | None = None,
    in_flight_max: int = 900,
    duration_s: float | None = None,
    stop: asyncio.Event | None = None,
    verify: Verify | None = None,
    progress: Callable[[Measurements], None] | None = None,
    remember_sent: bool = False,
) -> Result:
    """Run a plan: a closed loop when ``concurrency`` is given, else each request at its ``at_ms``.

    ``verify`` is asked about every successful answer; its refusals are counted as ``wrong_texts``.
    """
    runner = Runner(client, shape, prompts, clock, verify=verify, progress=progress, remember_sent=remember_sent)
    stop = stop or asyncio.Event()
    try:
        if concurrency is not None:
            return await runner.closed_loop(iter(requests), concurrency=concurrency, duration_s=duration_s, stop=stop)
        scheduled = (each for each in requests if isinstance(each, PlannedRequest))
        return await runner.scheduled(scheduled, in_flight_max=in_flight_max, stop=stop)
    finally:
        client.close()


PROBE_WORDS = (64, 448)
"""Words of the two requests: far enough apart that their difference tells a word's tokens within a percent."""


async def measure_word_scale(client: Client, shape: RequestShape) -> WordScale:
    """Return what a word is for an endpoint; raises ``RequestFailed`` when it does not answer."""
    prompts = PromptMaker(0, 1)
    shape = msgspec.structs.replace(shape, ignore_eos=False)
    counted: list[int] = []
    for words in PROBE_WORDS:
        probe = PlannedRequest(0, None, (stable_u64(f"probe/{words}"),), words, words, 1)
        exchange = await client.post(shape.path, shape.body(probe, prompts))
        if exchange.usage is None:
            return ONE_TOKEN_A_WORD
        counted.append(exchange.usage.prompt_tokens)
    few, many = PROBE_WORDS
    tokens_per_word = (counted[1] - counted[0]) / (many - few)
    if tokens_per_word <= 0:
        return ONE_TOKEN_A_WORD
    return WordScale(tokens_per_word, max(0, round(counted[0] - few * tokens_per_word)))


OWN = ("port", "policy", "data_dir", "pools", "engine", "dry_run")
"""Settings of a pool that are not for its options to say."""


class PoolsFailed(Exception):
    """The pools could not be started; the message has the reason."""


@asynccontextmanager
async def open_pools(policies: Sequence[str], options: str) -> AsyncIterator[dict[str, str]]:
    """Run a pool for each policy; their URLs by policy. ``options`` are those of ``poolgrid up``.

    Raises ``PoolsFailed``; whatever ends the block, the pools are ended.
    """
    given = settings_of(options)
    async with AsyncExitStack() as opened:
        urls: dict[str, str] = {}
        try:
            model = PromptModel.load(given.model_path)
            for policy in policies:
                directory = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="poolgrid-bench-")))
                settings = given.model_copy(update={"policy": policy, "port": 0})
                pool = LocalPool(settings, directory, plan(settings, model, lambda _: ()))
                opened.push_async_callback(pool.stop)
                urls[policy] = await pool.start()
        except (PartFailed, ModelDirectoryError, TimeoutError, OSError) as error:
            raise PoolsFailed(
                f"starting a pool for each of {', '.join(policies)}: {error or 'not ready in time'}"
            ) from None
        yield urls


def settings_of(options: str) -> UpSettings:
    """Return the settings that options of ``poolgrid up`` make; raises ``PoolsFailed``."""
    try:
        given = parsed_options(UpSettings, shlex.split(options))
        if own := sorted(set(given) & set(OWN)):
            raise ValueError(f"{option_name(own[0])} is no option of these pools")
        return UpSettings(**given)
    except ValidationError as error:
        fault = error.errors()[0]
        place = option_name(str(fault["loc"][0])) if fault["loc"] else "options"
        said = f"{place}: {fault['msg'].removeprefix('Value error, ')}"
    except click.ClickException as error:
        said = error.format_message()
    except ValueError as error:
        said = str(error)
    raise PoolsFailed(f"reading --pool-options {options!r}: {said}; nothing was started")
