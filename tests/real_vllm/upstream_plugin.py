"""A pytest plugin for vLLM's own tests, in vLLM's environment: their servers have the tiny model, perhaps a router.

A test's server keeps the options that the test gives it. It runs until the driver ends it, so that the same one serves
the tests alone and through a router. ``tests.real_vllm.upstream`` copies this file beside them and runs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

SETTINGS = json.loads(os.environ["POOLGRID_UPSTREAM"])
"""Of servers: ``model``, ``adapter``, ``folder``, ``arguments``, ``start_s``. ``router`` is the command before them,
``outcomes`` the file for what became of each test."""

FOLDER = Path(SETTINGS["folder"])
STOP_S = 60
"""For a router to end what a test has left."""
KEPT_SERVERS = 2
"""At a time: each takes a gigabyte."""
SHORT_TOKENS, LONGEST_TOKENS = 1024, 8192
"""A test that limits its server to fewer than the first is about the limit; every other prompt has to fit, which the
tiny model's tokenizer cuts into more tokens."""
NOT_HERE = {
    *("--dtype", "--tokenizer", "--revision", "--load-format", "--gpu-memory-utilization", "--kv-cache-dtype"),
    *("--max-num-seqs", "--tensor-parallel-size", "--attention-backend", "--port", "--host"),
}
"""Options of a GPU, of another model and of another address."""


def options_for_tiny(model: str, given: list[str]) -> list[str]:
    """Return a test's options as they fit the tiny model on a CPU, which has the name that the test expects."""
    kept: list[str] = []
    words = iter(given)
    for word in words:
        name, _, value = word.partition("=")
        if name in NOT_HERE or name == "--max-model-len":
            value = value or next(words)
        if name == "--max-model-len":
            kept += [name, value if int(value) < SHORT_TOKENS else str(LONGEST_TOKENS)]
        elif name not in NOT_HERE:
            kept.append(word)
    if "--max-model-len" not in kept:
        kept += ["--max-model-len", str(LONGEST_TOKENS)]
    if not any(word.startswith("--served-model-name") for word in kept):
        kept += ["--served-model-name", model]
    return [*kept, *SETTINGS["arguments"]]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def wait_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + float(SETTINGS["start_s"])
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        select.select([], [], [], 0.5)
    raise RuntimeError(f"{url} does not answer after {SETTINGS['start_s']} s")


def running_server(options: list[str], variables: dict[str, str]) -> int:
    """Return the port of a server with these options, started if none runs."""
    listed = FOLDER / "servers.json"
    servers: list[list[Any]] = json.loads(listed.read_text()) if listed.exists() else []
    key = hashlib.sha256(json.dumps([options, variables], sort_keys=True).encode()).hexdigest()
    for known, port, _ in servers:
        if known == key:
            return int(port)
    while len(servers) >= KEPT_SERVERS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(servers.pop(0)[2], signal.SIGKILL)
    port, events, replay = free_port(), free_port(), free_port()
    publishing = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""}
    publishing |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    with (FOLDER / f"server-{port}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("nice", "-n", "10", "vllm", "serve", SETTINGS["model"], "--host", "127.0.0.1", "--port", str(port)),
                *("--kv-events-config", json.dumps(publishing), *options),
            ],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    servers.append([key, port, process.pid])
    listed.write_text(json.dumps(servers))
    try:
        wait_healthy(process, f"http://127.0.0.1:{port}")
    except RuntimeError:
        listed.write_text(json.dumps(servers[:-1]))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return port


class RunningServer:
    """What a test gets in place of the server that it starts: its methods, and the address of another one."""

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        override_hf_configs: dict[str, Any] | None = None,
        **ignored: Any,
    ) -> None:
        options = options_for_tiny(model, vllm_serve_args)
        if override_hf_configs is not None:
            options += ["--hf-overrides", json.dumps(override_hf_configs)]
        self.host, self.uds = "127.0.0.1", None
        self.port = running_server(options, {key: str(value) for key, value in (env_dict or {}).items()})
        # What a run before has left in the cache is reported as cached, and some tests look for that.
        empty = urllib.request.Request(f"http://127.0.0.1:{self.port}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(empty, timeout=float(SETTINGS["start_s"])).close()
        self.show_hidden_metrics = False
        self.router: subprocess.Popen[bytes] | None = None
        if SETTINGS["router"]:
            self.port = self.start_router(self.port)

    def start_router(self, port: int) -> int:
        with (FOLDER / "router.log").open("ab") as log:
            command = [*SETTINGS["router"], "--engine-url", f"http://127.0.0.1:{port}", "--port", "0"]
            environment = {**os.environ, **SETTINGS["router_environment"]}
            self.router = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log)
        assert self.router.stdout is not None
        readable, _, _ = select.select([self.router.stdout], [], [], float(SETTINGS["start_s"]))
        words = self.router.stdout.readline().decode().split() if readable else []
        if words[:1] != ["ready"]:
            self.stop()
            raise RuntimeError(f"no router in front of the server: see {FOLDER / 'router.log'}")
        return int(words[1].rpartition(":")[2])

    def stop(self) -> None:
        if self.router is not None:
            self.router.terminate()
            try:
                self.router.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.router.kill()
                self.router.wait()
            self.router = None

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def adapter_in_place_of(*arguments: Any, **options: Any) -> str:
    """Return the tiny model's adapter: what tests fetch from the hub are adapters."""
    return str(SETTINGS["adapter"])


outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst of a test's parts."""
    if outcomes.get(report.nodeid, "passed") == "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: Any) -> None:
    Path(SETTINGS["outcomes"]).write_text(json.dumps(outcomes))


def pytest_configure(config: Any) -> None:
    """Put ours in place of what starts servers and of what fetches tokenizers."""
    theirs = importlib.import_module("tests.utils")
    for name in ("__init__", "__enter__", "__exit__", "start_router", "stop"):
        setattr(theirs.RemoteVLLMServer, name, getattr(RunningServer, name))
    tokenizers: Any = importlib.import_module("vllm.tokenizers")
    automatic = importlib.import_module("transformers").AutoTokenizer
    load, load_automatic = tokenizers.get_tokenizer, automatic.from_pretrained

    def of_tiny(tokenizer_name: str, *arguments: Any, **options: Any) -> Any:
        return load(SETTINGS["model"])

    def automatic_of_tiny(name: str, *arguments: Any, **options: Any) -> Any:
        return load_automatic(SETTINGS["model"])

    repositories: Any = importlib.import_module("vllm.transformers_utils.repo_utils")
    hub = repositories.hf_api()
    hub.snapshot_download = adapter_in_place_of
    repositories.hf_api = lambda *arguments, **options: hub
    tokenizers.get_tokenizer = of_tiny
    automatic.from_pretrained = automatic_of_tiny
