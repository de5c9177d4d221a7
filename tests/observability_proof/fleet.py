"""The fleet that is looked at: pools in stages behind a global router, a pool of two roles, one of small workers.

- *fleet*: a global router over a prefill pool and two decode pools, with tenants and a closed loop.
- *staged*: a consolidator with a journal on disk, a router, a prefill and a decode worker.
- *lone*: a router with TLS, CURVE and a block manager beside a worker, and four workers with small caches.
- *streamed*: two consolidators on a NATS server.
- *gateway*: an Envoy in front of two engine servers, and a router that it asks.
- *stand-in*: series of engines and GPUs that cannot be had here, on a page that this process serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import trustme
import zmq
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from tests.consolidator.publisher_process import Publisher
from tests.e2e.processes import Process
from tests.endpoint_picker.gateway import Gateway, running_gateway
from tests.fakes import FAKES_PATH
from tests.nats.servers import NatsServer, one_server
from tests.observability_proof.stack import Stack

DOCUMENT = {
    "version": 1,
    "mode": "disagg",
    "prefill": {
        "pools": [{"name": "prompts", "url": "http://127.0.0.1:1"}],
        "isl_min": 0, "isl_max": 2000, "isl_resolution": 2,
        "ttft_min_ms": 0, "ttft_max_ms": 4000, "ttft_resolution": 2,
        "mapping": [["prompts", "prompts"], ["prompts", "prompts"]],
    },
    "decode": {
        "pools": [
            {"name": "quick", "url": "http://127.0.0.1:2", "priority": 0},
            {"name": "cheap", "url": "http://127.0.0.1:3", "priority": 1},
        ],
        "context_length_min": 0, "context_length_max": 4000, "context_length_resolution": 2,
        "itl_min_ms": 0, "itl_max_ms": 60, "itl_resolution": 2,
        "mapping": [["quick", "cheap"], ["quick", "cheap"]],
    },
    "adapt": True,
    "closed_loop": {"window_ms": 10000, "samples_min": 3, "spill_after_ms": 1000, "return_after_ms": 5000},
    "circuit_breaker": {"failures_to_open": 3, "failure_share": 0.05, "window_ms": 20000, "open_ms": 4000},
}  # fmt: skip

SPEEDS = {"prompts": "4", "quick": "4", "cheap": "0.15"}
"""``cheap`` takes some 60 ms a token: it misses the target of its cell, so that the closed loop spills."""

STAND_IN = """
poolgrid_worker_info{worker="stand-in",model="tiny",role="aggregated",engine="stand-in"} 1
vllm:num_requests_running{model_name="tiny",engine="0"} 3
vllm:num_requests_waiting{model_name="tiny",engine="0"} 1
vllm:kv_cache_usage_perc{model_name="tiny",engine="0"} 0.4
vllm:prefix_cache_queries_total{model_name="tiny",engine="0"} {tick}00
vllm:prefix_cache_hits_total{model_name="tiny",engine="0"} {tick}0
trtllm_num_requests_running{model_name="tiny",engine_type="trtllm"} 2
trtllm_num_requests_waiting{model_name="tiny",engine_type="trtllm"} 0
trtllm_kv_cache_utilization{model_name="tiny",engine_type="trtllm"} 0.3
"""
"""Of engines that are not on this machine; the names are those of their pages and of our own."""


class StandIn:
    """Serves that page."""

    def __init__(self) -> None:
        self.ticks = 0
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.ticks += 1
                page = STAND_IN.replace("{tick}", str(stand_in.ticks))
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(page.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Fleet:
    """All of its processes."""

    def __init__(self, stack: Stack, directory: Path) -> None:
        self.stack = stack
        self.directory = directory
        self.opened = contextlib.ExitStack()
        self.processes: dict[str, Process] = {}
        self.keys = directory / "keys.json"
        self.tenant_keys = {name: self._key(name) for name in ("acme", "globex", "initech")}
        self.nats: NatsServer
        self.gateway: Gateway
        self.stand_in = StandIn()
        self.opened.callback(self.stand_in.close)
        self.http = httpx.Client(timeout=120, trust_env=False, verify=False)
        self.opened.callback(self.http.close)

    # -- parts -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all of it, and have it scraped."""
        self._start_lone()
        self._start_staged()
        self._start_fleet()
        self._start_streamed()
        self._start_gateway()
        self.stack.scrape("stand-in", [self.stand_in.url], namespace="stand-in", pool="stand-in", component="worker")

    def provoke(self) -> None:
        """Ask for what is refused: by a server before any endpoint sees it, and by a worker."""
        with contextlib.suppress(httpx.HTTPError):
            self.http.get(f"{self.staged_url}/live", headers={"x-long": "a" * 500_000})
        # A guide, which workers without a tokenizer cannot keep to.
        message = {"role": "user", "content": "Say it as JSON."}
        body = {"model": "tiny", "messages": [message], "max_tokens": 4, "response_format": {"type": "json_object"}}
        self.http.post(f"{self.staged_url}/v1/chat/completions", json=body)

    def run(self, name: str, *arguments: str, environment: dict[str, str] | None = None) -> Process:
        """Start one process; it is awaited by ``ready``."""
        before = dict(os.environ)
        os.environ.update(environment or {})
        try:
            process = Process(*arguments, "--log-level", "error")
        finally:
            os.environ.clear()
            os.environ.update(before)
        self.processes[name] = self.opened.enter_context(process)
        return process

    def _worker(self, name: str, ingest: str, *options: str) -> Process:
        return self.run(
            name, "worker", "--worker-id", name, "--served-model-name", "tiny", "--vocabulary-size", "4096",
            "--output-tokens-mean", "0", "--consolidator", ingest, *options,
        )  # fmt: skip

    def _start_fleet(self) -> None:
        document = self.directory / "pools.json"
        document.write_text(json.dumps(DOCUMENT))
        routers = {name: self.run(f"router of {name}", "router", "--port", "0") for name in SPEEDS}
        workers = {}
        for name, router in routers.items():
            role = "prefill" if name == "prompts" else "decode"
            ingest = router.wait_ready().word("ingest")
            workers[name] = self._worker(f"{name}-0", ingest, "--role", role, "--speedup", SPEEDS[name])
        for name, router in routers.items():
            workers[name].wait_ready()
            labels = {"namespace": "fleet", "pool": name}
            self.stack.scrape(f"fleet-{name}-router", [router.url], **labels, component="router")
            self.stack.scrape(f"fleet-{name}-worker", [workers[name].url], **labels, component="worker")
        front = self.run(
            "global router", "global-router", "--config", str(document), "--port", "0",
            *(f"--pool-url={name}={router.url}" for name, router in routers.items()),
            "--api-keys", str(self.keys), "--worker-timeout-ms", "1000",
        ).wait_ready()  # fmt: skip
        self.stack.scrape("fleet-front", [front.url], namespace="fleet", component="global-router")

    def _start_staged(self) -> None:
        consolidator = self.run(
            "consolidator", "consolidator", "--http-port", "0", "--data-dir", str(self.directory / "journal"),
            "--lease-ms", "3000",
        ).wait_ready()  # fmt: skip
        router = self.run(
            "staged router", "router", "--port", "0", "--feed-endpoint", consolidator.word("feed"),
            "--query-endpoint", consolidator.word("query"), "--data-dir", str(self.directory / "decisions"),
            "--max-queue-requests", "24", "--worker-queue-factor", "1", "--ttft-target-ms", "1500", "--legs", "two",
        )  # fmt: skip
        ingest = consolidator.word("ingest")
        # Small batches, so that there is something to wait for.
        small = ("--max-batch-size", "4", "--speedup", "1")
        prefill = self._worker("staged-prefill", ingest, "--role", "prefill", *small)
        decode = self._worker("staged-decode", ingest, "--role", "decode", *small)
        labels = {"namespace": "staged", "pool": "staged"}
        workers = [prefill.wait_ready().url, decode.wait_ready().url]
        self.stack.scrape("staged-router", [router.wait_ready().url], **labels, component="router")
        self.stack.scrape("staged-consolidator", [consolidator.url], **labels, component="consolidator")
        self.stack.scrape("staged-workers", workers, **labels, component="worker")

    def _start_streamed(self) -> None:
        self.nats = self.opened.enter_context(one_server())
        plane = ("--event-plane", "nats", "--nats-url", self.nats.url)
        names = ("streamed consolidator", "second consolidator")
        consolidators = [self.run(name, "consolidator", "--http-port", "0", *plane) for name in names]
        urls = [consolidator.wait_ready().url for consolidator in consolidators]
        self.stack.scrape("streamed", urls, namespace="streamed", pool="streamed", component="consolidator")

    def _start_gateway(self) -> None:
        where = self.directory / "gateway"
        where.mkdir()
        self.gateway = self.opened.enter_context(running_gateway(where))
        labels = {"namespace": "gateway", "pool": "gateway"}
        self.stack.scrape("gateway", [self.gateway.router_url], **labels, component="router")

    def _start_lone(self) -> None:
        self.publisher = self.opened.enter_context(Publisher())
        sources = self.directory / "sources.json"
        entry = {"worker_id": "lone-0", "source": "kvbm"}
        entry |= {"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}
        sources.write_text(json.dumps([entry]))
        self._command("keys", "curve", str(self.directory / "curve"))
        self.curve = ("--curve-key", str(self.directory / "curve" / "poolgrid.key_secret"))
        self.authority = trustme.CA()
        self.certificate = self.directory / "server.pem"
        self.issue(days=90)
        router = self.run(
            "lone router", "router", "--port", "0", "--pub-sources", str(sources), "--lease-ms", "3000", *self.curve,
            "--tls-certificate", str(self.certificate), "--tls-key", str(self.directory / "server.key"),
            "--policy", "tests.observability_proof.cache_alone:CacheAlone",
        ).wait_ready()  # fmt: skip
        self.stack.scrape("lone-router", [router.url], namespace="lone", pool="lone", component="router")
        self.start_lone_workers()
        self._knock(router.word("ingest"))

    def start_lone_workers(self) -> None:
        """Start its workers, also those that were killed."""
        ingest = self.processes["lone router"].word("ingest")
        workers = [self.lone_worker(f"lone-{number}", ingest) for number in range(4)]
        urls = [worker.wait_ready().url for worker in workers]
        self.stack.scrape("lone-workers", urls, namespace="lone", pool="lone", component="worker")

    def lone_worker(self, name: str, ingest: str) -> Process:
        """Start one that has a small cache."""
        return self._worker(name, ingest, *self.curve, "--total-kv-blocks", "192", "--kv-block-size", "16")

    def issue(self, days: float) -> None:
        """Make a certificate for the lone router that ends in so many days."""
        issued = self.authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=days))
        parts = {"server.key": [issued.private_key_pem], "server.pem": issued.cert_chain_pems}
        for name, blobs in parts.items():
            fresh = self.directory / f"{name}.new"
            fresh.write_bytes(b"".join(blob.bytes() for blob in blobs))
            fresh.rename(self.directory / name)

    def start_trtllm(self, name: str, behaviour: dict[str, object], *options: str) -> Process:
        """Start a router with a worker whose engine is the contract fake of TensorRT-LLM."""
        router = self.run(f"{name} router", "router", "--port", "0").wait_ready()
        path = os.pathsep.join([str(FAKES_PATH), os.environ.get("PYTHONPATH", "")])
        worker = self.run(
            name, "worker", "--engine", "trtllm", "--model-path", "tiny", "--kv-block-size", "16", "--worker-id", name,
            "--consolidator", router.word("ingest"), *options,
            environment={"PYTHONPATH": path, "TRTLLM_FAKE": json.dumps(behaviour)},
        ).wait_ready()  # fmt: skip
        labels = {"namespace": name, "pool": name}
        self.stack.scrape(f"{name}-router", [router.url], **labels, component="router")
        self.stack.scrape(f"{name}-worker", [worker.url], **labels, component="worker")
        return router

    def _knock(self, endpoint: str) -> None:
        """Come without a key to a plane that wants one."""
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(endpoint)
        self.opened.callback(context.term)
        self.opened.callback(stranger.close)

    def _key(self, tenant: str) -> str:
        limits = ("--requests-per-minute", "6") if tenant == "initech" else ()
        return self._command("keys", "create", str(self.keys), tenant, *limits).split()[0]

    @staticmethod
    def _command(*arguments: str) -> str:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == 0, done.output
        return done.stdout

    # -- what it is asked --------------------------------------------------------------------------------------------

    @property
    def front_url(self) -> str:
        return self.processes["global router"].url

    @property
    def staged_url(self) -> str:
        return self.processes["staged router"].url

    @property
    def lone_url(self) -> str:
        return self.processes["lone router"].url

    def ask(self, url: str, tokens: list[int], output: int, key: str = "", **headers: str) -> int:
        """Send a request, read its stream to the end, and return the status; 0 when the connection broke."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": output, "stream": True, "ignore_eos": True}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            sent["authorization"] = f"Bearer {key}"
        try:
            with self.http.stream("POST", f"{url}/v1/completions", json=body, headers=sent) as answer:
                for _ in answer.iter_bytes():
                    pass
                return answer.status_code
        except httpx.HTTPError:
            return 0

    def close(self) -> None:
        """End everything."""
        self.opened.close()


class Load:
    """Requests of a calm day, from a few threads, until it is stopped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(each,), daemon=True)
            for each in (self._tenants, self._conversations, self._fresh, self._through_gateway)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, each: object) -> None:
        number = 0
        while not self._over.is_set():
            each(number)  # type: ignore[operator]  # one of those below
            number += 1
            self._over.wait(0.25)

    def _tenants(self, number: int) -> None:
        fleet = self._fleet
        names = list(fleet.tenant_keys)
        key = fleet.tenant_keys[names[number % len(names)]]
        targets = {"x_ttft_target_ms": str(500 + 3000 * (number % 2)), "x_itl_target_ms": ("10", "50")[number % 2]}
        fleet.ask(fleet.front_url, prompt(number % 7, 150 + 1200 * (number % 3 == 0)), 6, key, **targets)
        if number % 10 == 0:
            fleet.ask(fleet.front_url, prompt(1, 20), 2, "nobody's key")

    def _conversations(self, number: int) -> None:
        talk, turn = number // 6 % 5, number % 6
        self._fleet.ask(self._fleet.staged_url, prompt(1000 + talk, 300 + 60 * turn), 8)

    def _fresh(self, number: int) -> None:
        self._fleet.ask(self._fleet.lone_url, prompt(50_000 + number + time.time_ns() % 1_000_000, 64), 6)

    def _through_gateway(self, number: int) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self._fleet.gateway.complete(prompt(number % 5, 96))


def prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt; prompts of one seed begin alike."""
    return [5 + (seed * 7919 + place * (seed % 97 + 3)) % 900 for place in range(tokens)]


@contextlib.contextmanager
def running(stack: Stack, directory: Path) -> Iterator[Fleet]:
    """Run the fleet, and end it."""
    fleet = Fleet(stack, directory)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()
