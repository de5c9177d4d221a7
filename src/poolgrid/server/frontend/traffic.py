"""What a front end logs of its traffic: a line for each request on demand, and one every ten seconds for all.

Rules
    1. Nothing is said of what a prompt or an answer holds: only names, counts and times.
    2. Nothing is done per token. What a request has got is asked of it when a line is due, and when it ends.
    3. Where nothing happens nothing is said.

The span of a client's request, told at its end: what was asked for and what it got, in OpenTelemetry's words.

Names beginning with ``gen_ai.`` are of its conventions for generative AI. Nothing that a prompt or an answer holds is
among them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple, Protocol

from poolgrid.kernel.requests.log_fields import Field, about
from poolgrid.kernel.requests.trace_record import TraceRecord
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.server.frontend.sequence_output import RequestOutput
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.figures import counted, number, percent
from poolgrid.server.process.logs import EVERY_LINE
from poolgrid.server.process.tasks import Restart, cancel_all, supervised

log: Final = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 10.0
"""Between two lines about all requests, as engines have it."""


class TrackedRequest(Protocol):
    """A request in flight."""

    def account(self) -> TokenTotals:
        """Return what it has sent to workers and got so far."""
        ...

    def line(self) -> EndedRequest:
        """Return what there is to log of it, once it is over."""
        ...


class TokenTotals(NamedTuple):
    """What requests have sent and got."""

    prompt_tokens: int = 0
    """Of sequences that have a worker; a prompt with several choices counts for each of them."""
    cached_tokens: int = 0
    output_tokens: int = 0


class Totals(NamedTuple):
    """What a front end has served since it began."""

    ended: int
    running: int
    account: TokenTotals


class EndedRequest(NamedTuple):
    """A request that is over, as its line tells it."""

    name: str
    """As the client calls it, and as its answer does."""
    endpoint: str
    status: int
    error: str
    """The error's code; empty when there was none."""
    streaming: bool
    model: str
    tenant: str
    account: TokenTotals
    ttft_ms: float | None
    duration_ms: float
    workers: str
    trace_id: str = ""
    """Of a request whose trace is kept."""


class Traffic:
    """The requests of one front end: those in flight, and the sum of those that are over."""

    def __init__(self, each_request: bool, counted: Callable[[], TokenTotals]) -> None:
        """``each_request``: log a line for each, whatever level other lines have. ``counted`` is asked for the tokens
        of all that are over."""
        self._each = each_request
        self._counted = counted
        self.running: set[TrackedRequest] = set()
        """The server of a request puts it here: what every request does must cost next to nothing."""
        self._ended = 0
        if each_request:
            log.setLevel(logging.INFO)

    def end(self, request: TrackedRequest) -> None:
        """Take note that a request is over, whose tokens are counted."""
        self.running.remove(request)
        self._ended += 1
        if self._each:
            ended = request.line()
            log.info("%s", request_line(ended), extra=EVERY_LINE | about(**fields_of(ended)))

    def totals(self) -> Totals:
        """Return the tokens served so far, of requests in flight too."""
        accounts = [self._counted(), *(each.account() for each in self.running)]
        return Totals(self._ended, len(self.running), TokenTotals(*map(sum, zip(*accounts, strict=True))))


def fields_of(ended: EndedRequest) -> dict[str, Field]:
    """Return all that is told of a request that is over; what is empty is not told."""
    return {"request_id": ended.name, "endpoint": ended.endpoint, "status": ended.status, **_further(ended)}


def _further(ended: EndedRequest) -> dict[str, Field]:
    account = ended.account
    return {
        "error": ended.error,
        "model": ended.model,
        "tenant": ended.tenant,
        "isl": account.prompt_tokens,
        "cached": account.cached_tokens,
        "osl": account.output_tokens,
        "ttft_ms": "" if ended.ttft_ms is None else round(ended.ttft_ms),
        "total_ms": round(ended.duration_ms),
        "worker": ended.workers,
        "trace_id": ended.trace_id,
    }


def request_line(ended: EndedRequest) -> str:
    """Return the line of a request that is over, ``key=value`` after its name, endpoint and status."""
    told = " ".join(f"{key}={_word(str(value))}" for key, value in _further(ended).items() if value != "")
    return f"request {ended.name} {ended.endpoint} {ended.status}{' stream' if ended.streaming else ''} {told}"


def _word(text: str) -> str:
    """Return a value that reads as one, whatever a client wrote into it."""
    return repr(text) if any(each in text for each in " \"'=") else text


def report_line(before: Totals, now: Totals, waiting: int, interval_s: float) -> str | None:
    """Return the line about an interval; ``None`` when nothing happened. ``waiting``: requests in the queue."""
    ended = now.ended - before.ended
    if not ended and not now.running and now.account == before.account:
        return None
    prompt, cached, output = (a - b for a, b in zip(now.account, before.account, strict=True))
    hits = percent(cached / prompt) if prompt > 0 else "none"
    return (
        f"last {interval_s:.0f} s: {counted(ended, 'request')}, "
        f"{counted(prompt, 'prompt token')} ({number(prompt / interval_s, 0)}/s, {hits} cached), "
        f"{counted(output, 'output token')} ({number(output / interval_s, 0)}/s); "
        f"now {now.running:,} running, of which {waiting:,} waiting"
    )


def open_report(opened: AsyncExitStack, traffic: Traffic, waiting: Callable[[], int], clock: Clock) -> None:
    """Begin to log a line about all requests every ten seconds; ``opened`` ends it. ``waiting``: those in the queue."""
    report = supervised(lambda: report_traffic(traffic, waiting, clock), "report of the traffic", Restart())
    opened.push_async_callback(cancel_all, [report])


async def report_traffic(
    traffic: Traffic, waiting: Callable[[], int], clock: Clock, interval_s: float = REPORT_INTERVAL_S
) -> None:
    """Log a line every interval in which something happened, until cancelled."""
    before, before_ms = traffic.totals(), clock.monotonic_ms()
    while True:
        await asyncio.sleep(interval_s)
        now, now_ms = traffic.totals(), clock.monotonic_ms()
        line = report_line(before, now, waiting(), max(0.001, (now_ms - before_ms) / 1000))
        if line is not None:
            log.info("%s", line)
        before, before_ms = now, now_ms


PROVIDER = "poolgrid"

OPERATIONS = {
    "completions": "text_completion",
    "embeddings": "embeddings",
    "images": "generate_content",
    "videos": "generate_content",
}
"""Of endpoints; every other one is a chat."""

SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Fields of a request's sampling that the conventions have a name for, which is the same."""


def tell_request(
    trace: TraceRecord, ended: EndedRequest, outputs: Sequence[RequestOutput], first_token_ms: float | None
) -> None:
    """Put what is known of a request that is over on its span, and the spans of waiting and of streaming below it."""
    root = trace.root
    operation = OPERATIONS.get(ended.endpoint, "chat")
    root.name = f"{operation} {ended.model}".rstrip()
    told: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.response.id": ended.name,
        "http.response.status_code": ended.status,
        "poolgrid.endpoint": ended.endpoint,
        "poolgrid.streaming": ended.streaming,
    }
    known = {"gen_ai.request.model": ended.model, "poolgrid.tenant": ended.tenant, "error.type": ended.error}
    root.attributes |= {**told, **{name: value for name, value in known.items() if value}}
    if outputs:
        _tell_outputs(trace, outputs)
    if first_token_ms is not None:
        root.attributes |= {"gen_ai.response.time_to_first_chunk": (first_token_ms - root.began_ms) / 1000}
        trace.add("first token", root.began_ms, first_token_ms)
        trace.add("stream" if ended.streaming else "rest of the answer", first_token_ms)


def _tell_outputs(trace: TraceRecord, outputs: Sequence[RequestOutput]) -> None:
    told, first = trace.root.attributes, outputs[0].request
    sampling = first.sampling
    told |= {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.choice.count": len(outputs),
        "gen_ai.response.model": first.model,
        "gen_ai.usage.input_tokens": sum(len(output.request.token_ids) for output in outputs) // TOKEN_BYTES,
        "gen_ai.usage.output_tokens": sum(output.completion_tokens for output in outputs),
        "gen_ai.usage.cache_read.input_tokens": sum(output.cached_tokens or 0 for output in outputs),
        "gen_ai.response.finish_reasons": [str(output.finish_reason or "none") for output in outputs],
        "poolgrid.worker": ",".join(
            dict.fromkeys(output.stream.worker for output in outputs if output.stream is not None)
        ),
    }
    for field in SAMPLING:
        value = sampling.value_of(field)
        if value is not None:
            told[f"gen_ai.request.{field}"] = value
