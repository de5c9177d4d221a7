"""`poolgrid up --pools FILE`: a whole simulated fleet on this machine, from one pool-grid document.

Rules
    1. Each pool is a router with the consolidator inside, and the workers that the pool's ``simulate`` describes. The
       global router is told where the pools' routers really are; the document's urls are for real deployments.
    2. Routers start first, then workers, then the global router; ``ready URL`` follows once every pool can be used.
    3. At the end parts stop in the order global router, workers, routers. What dies before is started again in place.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

from poolgrid.cli.api_key import api_key_headers
from poolgrid.cli.held_port import HeldPorts
from poolgrid.cli.local_pool import UpSettings, example_request
from poolgrid.cli.part import START_TIMEOUT_S, Part, part_environment, stop_parts
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.global_router.core.document.axis import StageName
from poolgrid.global_router.core.document.grid_document import GridDocument, Pool, PoolSimulation
from poolgrid.workers.engines.simulated.settings import SimulatedWorkerSettings


class LocalFleet:
    """All parts of a fleet on this machine."""

    def __init__(self, settings: UpSettings, path: Path, document: GridDocument, model: PromptModel) -> None:
        self._settings = settings
        self._path = path
        self._document = document
        self._model = model
        self._environment = part_environment()
        self._routers: dict[str, Part] = {}
        self._workers: list[Part] = []
        self._global_router: Part | None = None
        self._ports = HeldPorts(settings.host)

    async def start(self) -> str:
        """Start everything; return the URL of the OpenAI API once every pool can be used."""
        settings = self._settings
        pools = [(stage, pool) for stage, found in self._document.stages.items() for pool in found.pools]
        common = ["--host", settings.host, "--log-level", settings.log_level]
        model = ["--model-path", str(settings.model_path)]
        for _, pool in pools:
            ports = [f"--{name}={self._ports.hold()}" for name in ("port", "select-port", "ingest-port")]
            arguments = ["router", *ports, "--policy", settings.policy]
            arguments += [*settings.front_end_arguments, *model, *common]
            if settings.data_dir is not None:
                arguments += ["--data-dir", str(settings.data_dir / quote(pool.name, safe=""))]
            self._routers[pool.name] = Part(f"router of {pool.name}", arguments, self._environment)
        await asyncio.gather(*(self._start_part(router) for router in self._routers.values()))
        for stage, pool in pools:
            for number in range((pool.simulate or PoolSimulation()).workers):
                name = f"{pool.name}-{number}"
                arguments = [*self._worker_arguments(stage, pool, name), *common]
                self._workers.append(Part(name, arguments, self._environment))
        await asyncio.gather(*(self._start_part(worker) for worker in self._workers))
        port = str(self._ports.hold(settings.port))
        urls = [f"--pool-url={name}={router.ready_words[0]}" for name, router in self._routers.items()]
        arguments = ["global-router", "--config", str(self._path), "--port", port, *urls, *model, *common]
        arguments += settings.front_end_arguments
        self._global_router = Part("global router", arguments, self._environment)
        await self._start_part(self._global_router)
        url = self._global_router.ready_words[0]
        await _until_pools_are_complete(
            url, {pool.name: (pool.simulate or PoolSimulation()).workers for _, pool in pools}
        )
        return url

    def greeting(self, url: str) -> str:
        """Return what a newcomer should know."""
        return (
            f"{len(self._routers)} pools with {len(self._workers)} simulated workers serve model "
            f"{self._model.name!r} behind a global router. Send requests to {url}/v1, for example:\n"
            f"{example_request(url, self._model.name)}"
            f"Pools: {url}/v1/pools    Decisions: {url}/v1/decisions    Stop with Ctrl-C.\n"
        )

    def _worker_arguments(self, stage: StageName, pool: Pool, name: str) -> list[str]:
        simulate = pool.simulate or PoolSimulation()
        first = max(self._model.tokenizer.get_added_tokens_decoder(), default=-1) + 1
        table = []
        if simulate.timing_table is not None:
            table = ["--timing-table", str(self._path.parent / simulate.timing_table)]
        # Workers that know roles are given the one of their stage; those that do not serve every stage.
        role = [] if stage == "aggregated" or "role" not in SimulatedWorkerSettings.model_fields else ["--role", stage]
        return [
            *("worker", "--worker-id", name, "--model", self._model.name, *table, *role),
            *("--consolidator", self._routers[pool.name].word("ingest")),
            *("--speedup", str(simulate.speedup * self._settings.speedup)),
            *("--block-size", str(simulate.block_size), "--total-kv-blocks", str(simulate.total_kv_blocks)),
            *("--max-batch-size", str(simulate.max_batch_size), "--max-num-tokens", str(simulate.max_num_tokens)),
            *("--max-sequence-length", str(simulate.max_sequence_length)),
            *("--vocabulary-size", str(self._model.vocab_size), "--first-token-id", str(first)),
            *("--tokenizer-path", str(self._settings.model_path)),
            *("--drain-timeout-ms", "2000"),
        ]

    async def _start_part(self, part: Part) -> None:
        await part.start()
        part.watch()

    async def given_up(self) -> str:
        """Wait for ever: parts of a fleet are started again without a bound."""
        await asyncio.Event().wait()
        return ""

    async def stop(self) -> None:
        """End everything in order."""
        await stop_parts([self._global_router])
        await stop_parts(self._workers)
        await stop_parts(self._routers.values())
        self._ports.close()


async def _until_pools_are_complete(url: str, workers: dict[str, int]) -> None:
    """Wait until the global router sees every worker of every pool."""
    import httpx

    async with (
        httpx.AsyncClient(base_url=url, timeout=5.0, headers=api_key_headers()) as client,
        asyncio.timeout(START_TIMEOUT_S),
    ):
        while True:
            rows = (await client.get("/v1/pools")).json()["data"]
            ready = {
                row["name"]: sum(role["ready"] for model in row["models"] for role in model["roles"].values())
                for row in rows
            }
            if all(ready.get(name, 0) >= wanted for name, wanted in workers.items()):
                return
            await asyncio.sleep(0.02)
