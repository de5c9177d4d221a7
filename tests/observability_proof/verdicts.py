"""Each verdict of ``poolgrid doctor`` caused on live processes, and read from the command and from the metric.

    python -m tests.observability_proof verdicts [--only salt]

A router and, for each fault, a worker in front of an engine server of ours that has it, whose requests are those of
conversations. Faults of text need an engine that reads text: they are caused behind the gateway. ``NOT_CAUSED`` names
the verdicts that no process here can have, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import zmq.asyncio
from click.testing import CliRunner

from lab.benchmarks.fleet import free_port
from poolgrid.server.cli.main import app
from poolgrid.server.diagnosis.causes import Cause
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.e2e.processes import Process, eventually
from tests.endpoint_picker.gateway import Gateway, running_gateway
from tests.fakes.engine_server.cache import PagedCache, Running
from tests.fakes.engine_server.threaded import servers_in_thread
from tests.fakes.engine_server.vllm import Options, VllmServer
from tests.observability_proof.stack import pause

BLOCK = 16
REQUESTS = 100
"""A fault must be named within so many."""

PACE_S = 0.04
"""Between requests: what an earlier prompt's events said counts half a second later."""

LONGEST = 300
"""Requests after which a fault counts as not named: that nothing comes of a prompt takes six seconds to tell."""

PATIENCE_S = 60.0

CHECKPOINT = 128
"""Tokens between the places at which a state model of the stand-in is resumed."""

LIVE = "on live processes too, by tests/diagnosis/test_live_faults.py"
SEEN = "by engines in one process, see tests/diagnosis/test_engine_faults.py"

NOT_CAUSED = {
    Cause.BLOCK_SIZE: "the events of an engine show its block size first; see tests/diagnosis",
    Cause.RESTART: "a worker rejoins when its server restarts, and index and cache agree; see tests/diagnosis",
    Cause.TIER: SEEN,
    Cause.CACHING_OFF: LIVE,
    Cause.ADDED_TOKENS: LIVE,
    Cause.RECOMPUTED: LIVE,
    Cause.UNREPORTED: LIVE,
    Cause.CROSSED: LIVE,
    Cause.SHARED_URL: SEEN,
    Cause.SAME_ENGINE: SEEN,
    Cause.EVENTS_LATE: SEEN,
    Cause.REUSES_LESS: SEEN,
    Cause.REUSES_MORE: SEEN,
    Cause.UNKNOWN: "the verdict of too few requests, which every worker has before its first ones",
}

Edit = Callable[[dict[str, Any], int], list[dict[str, Any]]]
"""What becomes of an event that is published, given how many requests were sent."""


class CheckpointCache(PagedCache):
    """The cache of a model that is resumed at checkpoints alone."""

    def begin(
        self, tokens: list[int], lora: str, salt: str, media: tuple[tuple[int, int, str], ...] = ()
    ) -> tuple[Running, int]:
        sequence, cached = super().begin(tokens, lora, salt, media)
        kept = cached // CHECKPOINT * CHECKPOINT // self.block_size
        unused = Running(sequence.tokens, lora, salt, sequence.blocks[kept:])
        self.end(unused)
        sequence.blocks = sequence.blocks[:kept]
        sequence.filled = kept
        return sequence, kept * self.block_size


class SaltlessCache(PagedCache):
    """The cache of an engine that takes salts and does nothing with them."""

    def begin(
        self, tokens: list[int], lora: str, salt: str, media: tuple[tuple[int, int, str], ...] = ()
    ) -> tuple[Running, int]:
        return super().begin(tokens, lora, "", media)


@dataclass(frozen=True)
class Fault:
    """What is wrong with an engine server, or with how its worker is started."""

    cause: Cause
    what: str
    edit: Edit = lambda event, sent: [event]
    options: Options = field(default_factory=lambda: Options(block_size=BLOCK, blocks=4096))
    cache: type[PagedCache] = PagedCache
    at: dict[int, Callable[[VllmServer], None]] = field(default_factory=dict)
    """What happens before the request of a number."""
    worker: tuple[str, ...] = ()
    publisher: Callable[[VllmServer], str] | None = None
    """Where the router follows the engine's events by itself; ``None`` = its worker follows them."""
    body: Callable[[int], dict[str, Any]] = lambda number: {}
    """What requests have besides a prompt, by their number."""


class FaultyServer(VllmServer):
    """An engine server with a fault."""

    fault: Fault
    sent = 0

    async def _publish(self) -> None:
        self._outbox = [(rank, made) for rank, event in self._outbox for made in self.fault.edit(event, self.sent)]
        await super()._publish()


def _other_tokens(event: dict[str, Any], sent: int) -> list[dict[str, Any]]:
    """The engine hashes what its events do not name."""
    return [event | {"token_ids": [token ^ 1 for token in event["token_ids"]]} if "token_ids" in event else event]


def _small_window(event: dict[str, Any], sent: int) -> list[dict[str, Any]]:
    """The engine names a window of 17 tokens besides, and resumes at checkpoints."""
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": BLOCK + 1}
    return [event, event | window] if event["type"] == "BlockStored" else [event, event | {"group_idx": 1}]


def _forget(server: VllmServer) -> None:
    """Drop the cache and publish nothing of it."""
    for cache in server.caches:
        cache.reset()
    server._outbox.clear()


def _lose(server: VllmServer) -> None:
    first = server.publishers[0].seq
    server.lose = lambda seq: first <= seq < first + 20


SALTED = lambda number: {"cache_salt": "tenant"} if number % 8 in (3, 4, 5) else {}  # noqa: E731
ADAPTED = lambda number: {"model": "tuned"} if number % 8 in (3, 4, 5) else {}  # noqa: E731
ROOMY = Options(block_size=BLOCK, blocks=4096)

FAULTS = (
    Fault(Cause.AGREES, "nothing"),
    Fault(Cause.SALT, "salts are ignored", cache=SaltlessCache, body=SALTED),
    Fault(
        Cause.ADAPTER,
        "events do not name the adapter",
        lambda event, sent: [event | {"lora_name": None, "extra_keys": None, "lora_id": None}]
        if event.get("lora_name")
        else [event],
        replace(ROOMY, adapters=("tuned",)),
        body=ADAPTED,
    ),
    Fault(Cause.UNMATCHED, "events name other tokens", _other_tokens),
    Fault(Cause.GROUP, "a group of states is in no event", cache=CheckpointCache),
    Fault(Cause.WINDOW, "events name a window that is too small", _small_window, cache=CheckpointCache),
    Fault(Cause.ASLEEP, "the cache is dropped without an event", at={50: _forget}),
    Fault(Cause.GAP, "frames are lost, and no replay fills the gap", options=replace(ROOMY, replays=False),
          at={30: _lose}),
    Fault(Cause.GAP, "the router misses frames, and no replay fills the gap", at={30: _lose},
          publisher=lambda server: server.publishers[0].endpoint),
    Fault(Cause.EVENTS_STOPPED, "events stop", lambda event, sent: [event] if sent < 40 else []),
    Fault(Cause.NO_EVENTS, "no event comes", options=replace(ROOMY, publishes=False)),
    Fault(Cause.WRONG_ENDPOINT, "events are read at a closed port",
          publisher=lambda server: f"tcp://127.0.0.1:{free_port()}"),
    Fault(Cause.EVENTS_UNFIT, "blocks have another size", worker=("--kv-block-size", str(BLOCK * 3 // 2))),
)  # fmt: skip


def conversation(number: int) -> list[int]:
    """Return the prompt of a request: eight talks in turn behind one beginning, each of five turns."""
    slot, turn = number % 8, number // 8
    talk, turn = slot + 8 * (turn // 5), turn % 5
    shared = [7 + at % 89 for at in range(2 * BLOCK)]
    own = [100 + (talk * 7919 + at * 31) % 3000 for at in range(5 * BLOCK + 2 * BLOCK * turn + number % 7)]
    return shared + own


@dataclass
class Doctor:
    """Reads verdicts of a router."""

    url: str

    def verdict(self, worker: str) -> tuple[str, str]:
        """Return the verdict on a worker by the command, and by the metric."""
        said = CliRunner().invoke(app, ["doctor", "--url", self.url, "--json"])
        rows = json.loads(said.stdout)["data"] if said.exit_code in (0, 1) else []
        told = next((row["cause"] for row in rows if row["worker"].partition("/")[0] == worker), f"none: {said.output}")
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        start = 'poolgrid_router_reuse_verdict{cause="'
        mine = [
            line.removeprefix(start).partition('"')[0]
            for line in lines
            if line.startswith(start) and f'worker="{worker}' in line and line.endswith(" 1.0")
        ]
        return told, mine[0] if mine else ""


@dataclass(frozen=True)
class Named:
    """What became of a fault."""

    cause: Cause
    what: str
    told: str
    shown: str
    requests: int

    @property
    def is_right(self) -> bool:
        return (self.told, self.shown) == (self.cause.value,) * 2


def cause(fault: Fault, router: Process, directory: Path) -> Named:
    """Have a worker in front of a server with a fault, send it requests, and read the verdict."""
    name = fault.cause.value

    def make(context: zmq.asyncio.Context, options: Options) -> VllmServer:
        made = FaultyServer(context, options)
        made.fault, made.cache_type = fault, fault.cache
        return made

    with contextlib.ExitStack() as opened:
        running = opened.enter_context(servers_in_thread(replace(fault.options, root=str(TINY_MODEL_PATH)), make=make))
        [server] = running.servers
        assert isinstance(server, FaultyServer)
        follows: tuple[str, ...] = ()
        if fault.publisher is not None:
            sources = directory / "sources.json"
            sources.write_text(json.dumps([{"worker_id": name, "source": "kvbm", "endpoint": fault.publisher(server)}]))
            router = opened.enter_context(_process("router", "--port", "0", "--pub-sources", str(sources)))
            follows = ("--no-follow-events",)
        opened.enter_context(
            _process(
                "worker", "--engine", "vllm", "--engine-url", server.url, "--worker-id", name,
                "--consolidator", router.word("ingest"), *follows, *fault.worker,
            )
        )  # fmt: skip
        _until_there(router.url, name)
        client = opened.enter_context(httpx.Client(timeout=60, trust_env=False))
        told, number = ("", ""), -1
        while number < LONGEST and (number < REQUESTS or told != (name, name)):
            number += 1
            if number in fault.at:
                running.do(_on_loop(fault.at[number], server))
            server.sent = number
            _complete(client, router.url, conversation(number), **fault.body(number))
            pause(PACE_S)
            if number >= REQUESTS and not number % 20:
                told = Doctor(router.url).verdict(name)
        return Named(fault.cause, fault.what, *told, number)


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[Process]:
    with Process(*arguments, "--log-level", "error") as started:
        yield started.wait_ready()


async def _on_loop(act: Callable[[VllmServer], None], server: VllmServer) -> None:
    act(server)


# -- behind the gateway ------------------------------------------------------------------------------------------------

CONTEXT = 200

OF_TEXT: tuple[tuple[Cause, str, Callable[[int], int]], ...] = (
    (Cause.TEMPLATE, "the engine's template is 12 tokens longer", lambda tokens: tokens + 12),
    (Cause.TOKENIZER, "the engine's tokenizer makes 5 % more tokens", lambda tokens: tokens * 21 // 20),
    (Cause.TRUNCATED, f"the engine cuts prompts at {CONTEXT} tokens", lambda tokens: min(tokens, CONTEXT)),
)


def behind_gateway(gateway: Gateway, only: str) -> Iterator[Named]:
    """Cause the faults of text, one after another: each fills the last 100 requests of both engines."""
    for wanted, what, counted in OF_TEXT:
        if only not in wanted.value:
            continue
        for server in gateway.servers:
            server.counted = counted
        for number in range(3 * REQUESTS):
            gateway.complete(conversation(number), 2).raise_for_status()
        gateway.until_idle()
        for server in gateway.servers:
            server.counted = lambda tokens: tokens
        told = [Doctor(gateway.router_url).verdict(gateway.name_of(number)) for number in range(2)]
        right = next((each for each in told if each != (wanted.value, wanted.value)), told[0])
        yield Named(wanted, what, *right, 3 * REQUESTS)


# -- traffic -----------------------------------------------------------------------------------------------------------


def cold(router: Process) -> Named:
    """Send prompts that share nothing to a simulated worker."""
    with _simulated("cold", router.word("ingest"), 4096), httpx.Client(timeout=60, trust_env=False) as client:
        _until_there(router.url, "cold")
        for number in range(REQUESTS):
            _complete(client, router.url, [100 + (number * 131 + at * 17) % 3000 for at in range(200)])
        return Named(Cause.COLD, "prompts share nothing", *Doctor(router.url).verdict("cold"), REQUESTS)


def foreign(_: Process) -> Named:
    """Send the requests of another router of the pool to a worker whose cache has no room for both."""
    with contextlib.ExitStack() as opened:
        consolidator = opened.enter_context(_process("consolidator", "--http-port", "0"))
        feeds = ("--feed-endpoint", consolidator.word("feed"), "--query-endpoint", consolidator.word("query"))
        router, other = (opened.enter_context(_process("router", "--port", "0", *feeds)) for _ in range(2))
        opened.enter_context(_simulated("foreign", consolidator.word("ingest"), 110))
        client = opened.enter_context(httpx.Client(timeout=60, trust_env=False))
        for each in (router, other):
            _until_there(each.url, "foreign")
        for number in range(REQUESTS):
            _complete(client, router.url, conversation(number))
            _complete(client, other.url, [3 + each for each in conversation(number + 1000)])
        told = Doctor(router.url).verdict("foreign")
    return Named(Cause.FOREIGN, "another router's requests evict", *told, REQUESTS)


def _simulated(name: str, ingest: str, blocks: int) -> contextlib.AbstractContextManager[Process]:
    return _process(
        "worker", "--worker-id", name, "--served-model-name", "tiny", "--vocabulary-size", "4096",
        "--consolidator", ingest, "--kv-block-size", str(BLOCK), "--total-kv-blocks", str(blocks),
    )  # fmt: skip


def _until_there(url: str, worker: str) -> None:
    def workers() -> list[str]:
        return [row["worker_id"] for row in httpx.get(f"{url}/v1/workers", timeout=30).json()["data"]]

    eventually(f"{worker} is alone in the pool", lambda: workers() == [worker])


def _complete(client: httpx.Client, url: str, prompt: list[int], **more: Any) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "ignore_eos": True, **more}
    until = time.monotonic() + PATIENCE_S
    while (answer := client.post(f"{url}/v1/completions", json=body)).status_code == 503:
        assert time.monotonic() < until, answer.text  # a worker on a busy machine misses heartbeats
        pause(PACE_S)
    assert answer.status_code == 200, answer.text


# -- all of them -------------------------------------------------------------------------------------------------------


def prove_verdicts(only: str = "", gateway: Gateway | None = None) -> Iterator[Named]:
    """Cause every verdict that can be; ``gateway`` is one that runs already."""
    with tempfile.TemporaryDirectory(prefix="poolgrid-verdicts-") as where, contextlib.ExitStack() as opened:
        directory = Path(where)
        router = opened.enter_context(_process("router", "--port", "0"))
        for fault in FAULTS:
            if only in fault.cause.value:
                yield cause(fault, router, directory)
        for wanted, act in ((Cause.COLD, cold), (Cause.FOREIGN, foreign)):
            if only in wanted.value:
                yield act(router)
        if any(only in wanted.value for wanted, _, _ in OF_TEXT):
            yield from behind_gateway(gateway or opened.enter_context(running_gateway(directory)), only)


def show(only: str, say: Callable[[str], None], gateway: Gateway | None = None) -> int:
    """Print what became of each fault; return how many were not named."""
    began, wrong = time.monotonic(), 0
    for named in prove_verdicts(only, gateway):
        wrong += not named.is_right
        verdict = named.told if named.told == named.shown else f"{named.told}, metric {named.shown or 'none'}"
        say(f"  {named.cause.value}: {'named' if named.is_right else f'WRONG: {verdict}'} ({named.what})")
    for each, why in NOT_CAUSED.items():
        say(f"  {each.value}: not caused here: {why}")
    say(f"{wrong} verdicts wrong, {time.monotonic() - began:.0f} s")
    return wrong
