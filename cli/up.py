"""`poolgrid up`: a whole pool on one machine, each part a process of its own, watched until the end.

Rules
    1. Parts start in the order consolidator, router, workers; ``ready URL`` is printed once every part is ready.
    2. A part that dies is started again where it was (same ports), at most ``RESTARTS_MAX`` times within
       ``RESTART_WINDOW_S``; a part that dies more often ends everything with status 1.
    3. At the end parts stop in the order router, workers, consolidator; whoever is not gone in time is killed. Parts
       also stop when this process disappears, whatever became of it: they hold the other end of a pipe.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import deque
from pathlib import Path

from pydantic import Field

from cli.service_process import PARENT_PIPE_VARIABLE, say_ready
from frontend.models import TINY_MODEL_PATH
from frontend.prompt_model import ModelDirectoryError, PromptModel
from runtime import lifecycle, logs
from runtime.settings import Settings

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""A part that is not ready by then is given up; on a loaded machine an interpreter may take ten seconds to start."""

STOP_TIMEOUT_S = 10.0
RESTARTS_MAX = 10
RESTART_WINDOW_S = 60.0


class UpSettings(Settings):
    """A pool of simulated workers on this machine."""

    workers: int = Field(4, ge=1, le=256, description="Simulated workers.")
    host: str = Field("127.0.0.1", description="Address that everything listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the OpenAI API; 0 takes any free one.")
    speedup: float = Field(1.0, gt=0, le=1e6, description="How many times faster than real engines the workers are.")
    data_dir: Path | None = Field(
        None, description="Directory of the journal; by default a temporary one that ends with the pool."
    )
    policy: str = Field("kv", description="How a worker is chosen; see poolgrid router --help.")
    model_path: Path = Field(TINY_MODEL_PATH, description="Hugging Face style model directory (no weights needed).")
    block_size: int = Field(32, ge=1, le=4096, description="Tokens in a KV block.")
    blocks_per_worker: int = Field(16_384, ge=16, le=1_048_576, description="KV blocks of each worker.")
    max_sequence_length: int = Field(
        131_072, ge=2, le=4_194_304, description="Prompt and output tokens of one request."
    )
    queue_limit: int = Field(1024, ge=0, le=1_000_000, description="Requests that may wait for a worker.")
    log_level: str = Field("warning", description="Least severe log lines shown: debug, info, warning or error.")


class PartFailed(RuntimeError):
    """A part could not be started, or died too often."""


class Part:
    """One child process, started again when it dies."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.arguments = arguments
        self.ready_words: list[str] = []
        self._environment = environment
        self._process: Process | None = None
        self._restarts: deque[float] = deque(maxlen=RESTARTS_MAX)
        self._watch: asyncio.Task[None] | None = None
        self.stopping = False

    async def start(self) -> None:
        """Start the process and wait until it says that it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            # Not from the current directory, which may hold a package of the same name: from where this code is.
            "-P",
            "-m",
            "cli",
            *self.arguments,
            stdin=PIPE,
            stdout=PIPE,
            env=self._environment,
            # Ctrl-C reaches this process only, which then ends its parts in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = (await self._process.stdout.readline()).decode().split()
        except TimeoutError:
            raise PartFailed(f"{self.name} was not ready within {START_TIMEOUT_S:.0f} s") from None
        if not line or line[0] != "ready":
            status = await self._process.wait()
            raise PartFailed(f"{self.name} ended with status {status} before it was ready; its own words are above")
        self.ready_words = line[1:]

    def watch(self, failed: asyncio.Event) -> None:
        """Start the process again whenever it dies; ``failed`` is set when it dies too often."""
        self._watch = asyncio.ensure_future(self._keep_alive(failed))

    async def _keep_alive(self, failed: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while not self.stopping:
            assert self._process is not None
            status = await self._process.wait()
            if self.stopping:
                return
            now = loop.time()
            if len(self._restarts) == RESTARTS_MAX and now - self._restarts[0] < RESTART_WINDOW_S:
                log.error("%s died %d times within %.0f s: giving up", self.name, RESTARTS_MAX + 1, RESTART_WINDOW_S)
                failed.set()
                return
            self._restarts.append(now)
            log.warning("%s ended with status %s: starting it again", self.name, status)
            try:
                await self.start()
            except PartFailed as error:
                log.warning("%s", error)
                await self._kill()

    def word(self, key: str) -> str:
        """Return what the ready line says about ``key`` (``key=value``)."""
        for word in self.ready_words:
            if word.startswith(f"{key}="):
                return word.removeprefix(f"{key}=")
        raise PartFailed(f"{self.name} did not say where its {key} is")

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        self.stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def stopped(self) -> None:
        """Wait for the end, and make it when it does not come."""
        if self._watch is not None:
            self._watch.cancel()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            log.warning("%s did not end within %.0f s: killing it", self.name, STOP_TIMEOUT_S)
            await self._kill()

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()


class LocalPool:
    """All parts of a pool on this machine."""

    def __init__(self, settings: UpSettings, data_dir: Path, model: PromptModel) -> None:
        self._settings = settings
        self._data_dir = data_dir
        self._model = model
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            **os.environ,
            PARENT_PIPE_VARIABLE: "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self._consolidator: Part | None = None
        self._router: Part | None = None
        self._workers: list[Part] = []
        self.failed = asyncio.Event()

    async def start(self) -> str:
        """Start everything; return the URL of the OpenAI API."""
        settings = self._settings
        common = ["--log-level", settings.log_level]
        self._consolidator = await self._start_part(
            "consolidator", ["consolidator", "--host", settings.host, "--data-dir", str(self._data_dir), *common]
        )
        ports = {key: self._consolidator.word(key).rpartition(":")[2] for key in ("ingest", "feed", "query")}
        for key, port in ports.items():
            self._consolidator.arguments += [f"--{key}-port", port]
        router = self._start_part(
            "router",
            [
                *("router", "--host", settings.host, "--port", str(settings.port), "--policy", settings.policy),
                *("--model-path", str(settings.model_path), "--queue-limit", str(settings.queue_limit)),
                *("--feed-endpoint", self._consolidator.word("feed")),
                *("--query-endpoint", self._consolidator.word("query"), *common),
            ],
        )
        workers = [
            self._start_part(f"worker-{number}", self._worker_arguments(number)) for number in range(settings.workers)
        ]
        started = await asyncio.gather(router, *workers)
        self._router, self._workers = started[0], list(started[1:])
        url = self._router.ready_words[0]
        self._router.arguments += ["--port", url.rpartition(":")[2]]
        return url

    def _worker_arguments(self, number: int) -> list[str]:
        settings = self._settings
        assert self._consolidator is not None
        first = max(self._model.tokenizer.get_added_tokens_decoder(), default=-1) + 1
        return [
            *("worker", "--worker-id", f"worker-{number}", "--model", self._model.name, "--host", settings.host),
            *("--consolidator", self._consolidator.word("ingest"), "--speedup", str(settings.speedup)),
            *("--block-size", str(settings.block_size), "--total-kv-blocks", str(settings.blocks_per_worker)),
            *("--max-sequence-length", str(settings.max_sequence_length)),
            *("--vocabulary-size", str(self._model.vocab_size), "--first-token-id", str(first)),
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
        part.watch(self.failed)
        return part

    async def stop(self) -> None:
        """End everything in order."""
        for parts in ([self._router], self._workers, [self._consolidator]):
            running = [part for part in parts if part is not None]
            for part in running:
                part.ask_to_stop()
            await asyncio.gather(*(part.stopped() for part in running))


async def _until_workers_are_known(url: str, workers: int) -> None:
    """Wait until the router can reach every worker."""
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=5.0) as client, asyncio.timeout(START_TIMEOUT_S):
        while True:
            answer = (await client.get("/v1/workers")).json()
            if sum(row["state"] == "ready" for row in answer["data"]) >= workers:
                return
            await asyncio.sleep(0.02)


def run_up(settings: UpSettings) -> int:
    """Run a pool until SIGINT or SIGTERM; return the exit status."""
    try:
        logs.configure("up", settings.log_level)
        model = PromptModel.load(settings.model_path)
    except (ValueError, ModelDirectoryError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    status = 0

    async def main(stop: asyncio.Event) -> None:
        nonlocal status
        with tempfile.TemporaryDirectory(prefix="poolgrid-") as temporary:
            pool = LocalPool(settings, settings.data_dir or Path(temporary), model)
            stopping = asyncio.ensure_future(stop.wait())
            failing = asyncio.ensure_future(pool.failed.wait())
            starting = asyncio.ensure_future(_start(pool, settings, model))
            try:
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    await starting
                    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
                status = 1 if pool.failed.is_set() else 0
            except (PartFailed, TimeoutError, OSError) as error:
                log.error("%s", error or "the workers did not join in time")
                status = 1
            finally:
                for task in (starting, stopping, failing):
                    task.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                await pool.stop()

    lifecycle.run(main)
    return status


async def _start(pool: LocalPool, settings: UpSettings, model: PromptModel) -> None:
    url = await pool.start()
    await _until_workers_are_known(url, settings.workers)
    sys.stderr.write(
        f"{settings.workers} simulated workers serve model {model.name!r}. Send requests to {url}/v1, for example:\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' "
        f'-d \'{{"model": "{model.name}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}\'\n'
        f"Watch them with: poolgrid top --url {url}    Stop with Ctrl-C.\n"
    )
    sys.stderr.flush()
    say_ready(url)
