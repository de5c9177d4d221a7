"""A whole pool on this machine: what `poolgrid up` takes, and the parts that it starts.

Rules
    1. Parts start in the order consolidator, router, workers.
    2. A part that dies is started again where it was, at growing intervals (``poolgrid.cli.restart_pace``): its ports
       are held for it (``poolgrid.cli.held_port``), and the others go on. Only a part that does not start the first
       time ends everything.
    3. At the end parts stop in the order router, workers, consolidator; whoever is not gone in time is killed. Parts
       also stop when this process disappears, whatever became of it: they hold the other end of a pipe.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from poolgrid.cli.api_key import api_key_headers
from poolgrid.cli.held_port import HeldPorts
from poolgrid.cli.part import START_TIMEOUT_S, Part, part_environment, stop_parts
from poolgrid.frontend.models import TINY_MODEL_PATH
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.runtime.settings import Settings


class UpSettings(Settings):
    """A pool of simulated workers on this machine."""

    pools: Path | None = Field(
        None,
        description="Pool-grid document: run a whole fleet from it instead of one pool, each pool with a router and "
        "the workers that its `simulate` describes, and a global router before them. The urls in it are not used.",
    )
    workers: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Simulated workers that do the whole of a request; by default 4, and none beside decode workers.",
    )
    prefill: int = Field(
        0, ge=0, le=256, description="Simulated workers that compute prompts for decode workers, of which it takes one."
    )
    decode: int = Field(0, ge=0, le=256, description="Simulated workers that go on where prefill workers end.")
    encode: int = Field(
        0, ge=0, le=256, description="Simulated workers that encode images; with one, all workers take images."
    )
    host: str = Field("127.0.0.1", description="Address that everything listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the OpenAI API; 0 takes any free one.")
    speedup: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="How many times faster than real engines the workers are; with --pools, times the pool's own.",
    )
    data_dir: Path | None = Field(
        None,
        description="Directory of the journal and of the recorded decisions; by default a temporary one that ends with "
        "the pool. With --pools, one below it for each pool, and none by default.",
    )
    policy: str = Field("kv", description="How a worker is chosen; see poolgrid router --help.")
    model_path: Path = Field(TINY_MODEL_PATH, description="Hugging Face style model directory (no weights needed).")
    block_size: int = Field(32, ge=1, le=4096, description="Tokens in a KV block.")
    blocks_per_worker: int = Field(16_384, ge=16, le=1_048_576, description="KV blocks of each worker.")
    max_sequence_length: int = Field(
        131_072, ge=2, le=4_194_304, description="Prompt and output tokens of one request."
    )
    queue_limit: int = Field(
        1024, ge=0, le=1_000_000, description="Requests that may wait for a worker; with --pools, for a pool with room."
    )
    isolate_tenants: bool = Field(
        False,
        description="Clients share cached work only where they send the same cache_salt; see poolgrid router --help.",
    )
    log_level: str = Field("warning", description="Least severe log lines shown: debug, info, warning or error.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prefill and not self.decode:
            raise ValueError(f"prefill is {self.prefill} and decode is 0: prefill workers need a decode worker")
        if not self.whole_workers + self.decode:
            raise ValueError("workers and decode are 0: nobody would generate tokens")
        return self

    @property
    def front_end_arguments(self) -> list[str]:
        """Return what routers of both kinds are told of clients."""
        isolation = ["--isolate-tenants"] if self.isolate_tenants else []
        return ["--queue-limit", str(self.queue_limit), *isolation]

    @property
    def whole_workers(self) -> int:
        """Return how many workers do the whole of a request."""
        if self.workers is not None:
            return self.workers
        return 0 if self.decode else 4

    def workers_by_name(self) -> dict[str, str]:
        """Return the role of every worker, by its id."""
        counts = {"aggregated": self.whole_workers, "prefill": self.prefill, "decode": self.decode}
        return {
            f"{'worker' if role == 'aggregated' else role}-{number}": role
            for role, count in {**counts, "encode": self.encode}.items()
            for number in range(count)
        }


class LocalPool:
    """All parts of a pool on this machine."""

    def __init__(self, settings: UpSettings, data_dir: Path, model: PromptModel) -> None:
        self._settings = settings
        self._data_dir = data_dir
        self._model = model
        self._environment = part_environment()
        self._consolidator: Part | None = None
        self._router: Part | None = None
        self._workers: list[Part] = []
        self._ports = HeldPorts(settings.host)

    async def start(self) -> str:
        """Start everything; return the URL of the OpenAI API."""
        settings = self._settings
        common = ["--log-level", settings.log_level]
        planes = [f"--{key}-port={self._ports.hold()}" for key in ("ingest", "feed", "query")]
        consolidator = ["consolidator", "--host", settings.host, "--data-dir", str(self._data_dir), *planes, *common]
        self._consolidator = await self._start_part("consolidator", consolidator)
        port = self._ports.hold(settings.port)
        router = self._start_part(
            "router",
            [
                *("router", "--host", settings.host, "--port", str(port), "--policy", settings.policy),
                *("--select-port", str(self._ports.hold())),
                *("--model-path", str(settings.model_path), *settings.front_end_arguments),
                *("--data-dir", str(self._data_dir)),
                *("--feed-endpoint", self._consolidator.word("feed")),
                *("--query-endpoint", self._consolidator.word("query"), *common),
            ],
        )
        roles = settings.workers_by_name()
        workers = [self._start_part(name, self._worker_arguments(name, role)) for name, role in roles.items()]
        started = await asyncio.gather(router, *workers)
        self._router, self._workers = started[0], list(started[1:])
        url = self._router.ready_words[0]
        await _until_workers_are_known(url, len(roles))
        return url

    def greeting(self, url: str) -> str:
        """Return what a newcomer should know."""
        return (
            f"{len(self._settings.workers_by_name())} simulated workers serve model {self._model.name!r}. "
            f"Send requests to {url}/v1, for example:\n{example_request(url, self._model.name)}"
            f"Watch them with: poolgrid top --url {url}    Stop with Ctrl-C.\n"
        )

    def _worker_arguments(self, name: str, role: str) -> list[str]:
        settings = self._settings
        assert self._consolidator is not None
        first = max(self._model.tokenizer.get_added_tokens_decoder(), default=-1) + 1
        return [
            *("worker", "--worker-id", name, "--role", role, "--model", self._model.name, "--host", settings.host),
            *("--modality", "multimodal" if settings.encode else "text"),
            *("--consolidator", self._consolidator.word("ingest"), "--speedup", str(settings.speedup)),
            *("--block-size", str(settings.block_size), "--total-kv-blocks", str(settings.blocks_per_worker)),
            *("--max-sequence-length", str(settings.max_sequence_length)),
            *("--vocabulary-size", str(self._model.vocab_size), "--first-token-id", str(first)),
            *("--tokenizer-path", str(settings.model_path)),
            *("--drain-timeout-ms", "2000", "--log-level", settings.log_level),
        ]

    async def _start_part(self, name: str, arguments: list[str]) -> Part:
        part = Part(name, arguments, self._environment)
        if name == "consolidator":
            self._consolidator = part
        elif name == "router":
            self._router = part
        else:
            self._workers.append(part)
        await part.start()
        part.watch()
        return part

    async def stop(self) -> None:
        """End everything in order."""
        for parts in ([self._router], self._workers, [self._consolidator]):
            await stop_parts(parts)
        self._ports.close()


async def _until_workers_are_known(url: str, workers: int) -> None:
    """Wait until the router can reach every worker."""
    import httpx

    async with (
        httpx.AsyncClient(base_url=url, timeout=5.0, headers=api_key_headers()) as client,
        asyncio.timeout(START_TIMEOUT_S),
    ):
        while True:
            answer = (await client.get("/v1/workers")).json()
            if sum(row["state"] == "ready" for row in answer["data"]) >= workers:
                return
            await asyncio.sleep(0.02)


def example_request(url: str, model_name: str) -> str:
    """Return a request that a newcomer can paste."""
    return (
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' "
        f'-d \'{{"model": "{model_name}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}\'\n'
    )
