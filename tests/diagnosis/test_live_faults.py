"""Faults on live processes: a router, a worker process for all servers, and an engine server for each fault."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import zmq.asyncio
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from poolgrid.server.diagnosis.causes import Cause
from poolgrid.server.frontend.models import TINY_MODEL_PATH
from tests.diagnosis.engine_faults import DraftCache
from tests.e2e.processes import Process, eventually
from tests.fakes.engine_server.cache import PagedCache, Running
from tests.fakes.engine_server.threaded import servers_in_thread
from tests.fakes.engine_server.vllm import Options, VllmServer
from tests.observability_proof.stack import pause
from tests.observability_proof.verdicts import conversation

BLOCK = 16
OPTIONS = Options(block_size=BLOCK, blocks=4096, root=str(TINY_MODEL_PATH))
SILENCE_S = 6.5
"""How long nothing must have come of prompts before that counts."""


class NoCache(PagedCache):
    """``--no-enable-prefix-caching``."""

    def begin(
        self, tokens: list[int], lora: str, salt: str, media: tuple[tuple[int, int, str], ...] = ()
    ) -> tuple[Running, int]:
        return Running(list(tokens), lora, salt), 0

    def fill(self, sequence: Running, computed: int) -> None:
        """Keep nothing."""


class BosServer(VllmServer):
    """Puts a token before each prompt."""

    async def _complete(self, request: Any, reply: Any) -> None:
        body = request.json()
        body["prompt"] = [1, *body["prompt"]]
        await self._answer_to(request, reply, body, ())


class SwappedServer(VllmServer):
    """Lists the publisher of another server."""

    other: VllmServer

    def _sources(self) -> Any:
        return VllmServer._sources(self.other)


@dataclass(frozen=True)
class LiveFault:
    cause: Cause
    options: Options = field(default_factory=lambda: OPTIONS)
    server: type[VllmServer] = VllmServer
    cache: type[PagedCache] = PagedCache


FAULTS = {
    "clean": LiveFault(Cause.AGREES),
    "uncached": LiveFault(Cause.CACHING_OFF, cache=NoCache),
    "bos": LiveFault(Cause.ADDED_TOKENS, server=BosServer),
    "drafting": LiveFault(Cause.RECOMPUTED, cache=DraftCache),
    "unreported": LiveFault(Cause.UNREPORTED, replace(OPTIONS, details=False)),
    "swapped": LiveFault(Cause.CROSSED, server=SwappedServer),
    "exchanged": LiveFault(Cause.CROSSED, server=SwappedServer),
}
"""By an adapter that its server alone has, so that requests can be sent there. The last two are followed at each
other's publishers."""


def made(context: zmq.asyncio.Context, options: Options) -> VllmServer:
    fault = FAULTS[options.adapters[0]]
    server = fault.server(context, options)
    server.cache_type = fault.cache
    return server


def test_live_faults_are_named_within_seconds() -> None:
    options = [replace(fault.options, adapters=(name,)) for name, fault in FAULTS.items()]
    with servers_in_thread(*options, make=made) as running:
        first, second = (each for each in running.servers if isinstance(each, SwappedServer))
        first.other, second.other = second, first
        urls = [f"--engine-url={each.url}" for each in running.servers]
        with Process("router", "--port", "0", "--log-level", "error") as router:
            ingest = router.wait_ready().word("ingest")
            with Process("worker", "--engine", "server", *urls, "--consolidator", ingest, "--log-level", "error"):
                told = verdicts_of(router.url, list(FAULTS))

    assert told == {name: fault.cause.value for name, fault in FAULTS.items()}


def verdicts_of(url: str, models: Sequence[str]) -> dict[str, str]:
    """Send conversations to each server, long enough for what is missing to be missed; return the verdicts."""

    def joined() -> int:
        return len(httpx.get(f"{url}/v1/workers", timeout=30).json()["data"])

    eventually("all servers are workers", lambda: joined() == len(models))
    server_of: dict[str, str] = {}
    began, number = time.monotonic(), 0
    with httpx.Client(timeout=60, trust_env=False) as client:
        while number < 40 or time.monotonic() < began + SILENCE_S + 2.0:
            for model in models:
                body = {"model": model, "prompt": conversation(number), "max_tokens": 3, "ignore_eos": True}
                answer = client.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                server_of[answer.headers["x-poolgrid-worker"]] = model
            number += 1
            pause(0.02 if number < 40 else 0.1)
    said = CliRunner().invoke(app, ["doctor", "--url", url, "--json"])
    return {server_of[row["worker"]]: row["cause"] for row in json.loads(said.stdout)["data"]}
