"""CPU of the HTTP surface: ours and its peers, each pinned to one core, in front of mock engines, in one run.

    python -m benchmarks.http [--peers ours,dynamo,dynamo-fast,smg,vllm-router] [--tests short,stream,turns]
                              [--seconds 4] [--peer-python PYTHON] [--json OUT]

The process under test has one core to itself (the last); engines, consolidator and load generator share the first.
Figures are CPU time from the scheduler's counts, so other load on the machine changes them little. Tests:

``short``    completions, 64 tokens in, 1 out, 16 clients: CPU µs per request
``stream``   chat streams, 1,024 tokens in, 128 out, 16 clients, engines as fast as they can: CPU µs per token
``chunks``   chat streams, 16 tokens in, 512 out: the same with less of the request in it
``turns``    conversations of real growth: 8k tokens in the first turn, then 10 further turns: CPU ms per turn
``long``     short requests, 100 or so a second: TTFT alone, and while some 8 prompts of 60k tokens arrive a second
``flood``    the same, with one such prompt after the other, which takes all of the core

Peers run from the Python named by ``--peer-python`` and are skipped where their wheels are not installed: ours and
Dynamo route by KV cache, tokenize and detokenize; smg and vllm-router pass text through to mock OpenAI servers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.http_load import LoadSpec, family
from benchmarks.http_model import ensure_model

MODEL = "bench"
ENGINES = 4
START_TIMEOUT_S = 90.0
BLOCK_SIZE = 16
MODULE_OF = {"dynamo": "dynamo.frontend", "dynamo-fast": "dynamo.frontend", "smg": "smg", "vllm-router": "vllm_router"}

TESTS: dict[str, dict[str, Any]] = {
    "short": {"concurrency": 16, "isl": 64, "osl": 1},
    "stream": {"chat": True, "stream": True, "concurrency": 16, "isl": 1024, "osl": 128},
    "chunks": {"chat": True, "stream": True, "concurrency": 16, "isl": 16, "osl": 512},
    "turns": {"chat": True, "concurrency": 4, "isl": 8000, "osl": 32, "turns": 11, "turn_words": 200},
    "long": {"concurrency": 4, "isl": 64, "osl": 1, "pause_s": 0.04, "long_isl": 60_000, "long_pause_s": 0.1},
    "flood": {"concurrency": 4, "isl": 64, "osl": 1, "pause_s": 0.04, "long_isl": 60_000},
}


class Fleet:
    """Processes that are ended together."""

    def __init__(self, logs: Path, pin: bool) -> None:
        self._logs = logs
        self._pin = pin
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, name: str, command: list[str], cpu: int, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process on one CPU, its output in a log file (standard output piped for `ready` lines)."""
        log = (self._logs / f"{name}.log").open("ab")
        pinned = ["taskset", "-c", str(cpu), *command] if self._pin else command
        process = subprocess.Popen(
            pinned,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if "cli" in command else log,
            stderr=log,
            env={**os.environ, **(environment or {})},
        )
        self._processes.append(process)
        return process

    def ready_words(self, process: subprocess.Popen[bytes]) -> dict[str, str]:
        """Return what a ready line of ours says."""
        assert process.stdout is not None
        line = process.stdout.readline().decode().split()
        if not line or line[0] != "ready":
            raise RuntimeError(f"a process did not start; see {self._logs}")
        words = dict(word.split("=", 1) for word in line[1:] if "=" in word)
        words["http"] = next((word for word in line[1:] if word.startswith("http")), "")
        return words

    def close(self) -> None:
        """End everything, the last started first."""
        members = [pid for process in self._processes for pid in family(process.pid)[1:]]
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in members:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass  # ended with its parent


class Bench:
    """One run over several peers."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._seconds: float = options.seconds
        self._peer_python: str = options.peer_python
        self._scratch = scratch
        self._model = ensure_model(options.model_dir)
        self._words = json.loads((self._model / "words.json").read_text())
        cpus = sorted(os.sched_getaffinity(0))
        self._side, self._peer = cpus[0], cpus[-1]
        self._pin = len(cpus) > 1 and shutil.which("taskset") is not None
        self._http_workers: int = options.http_workers
        self._profile: str = options.profile

    def is_installed(self, peer: str) -> bool:
        """Tell whether a peer's module can be found by its Python."""
        if peer == "ours":
            return True
        probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({MODULE_OF[peer]!r}) is None)"
        return subprocess.run([self._peer_python, "-c", probe], stderr=subprocess.DEVNULL, check=False).returncode == 0

    def run(self, peer: str, tests: list[str]) -> dict[str, Any]:
        """Return the figures of every test for one peer."""
        figures: dict[str, Any] = {}
        for test in tests:
            with ExitStack() as stack:
                fleet = Fleet(self._scratch, self._pin)
                stack.callback(fleet.close)
                start: Callable[[Fleet], tuple[int, int]] = {
                    "ours": self._start_ours,
                    "dynamo": lambda fleet: self._start_dynamo(fleet, "hf"),
                    "dynamo-fast": lambda fleet: self._start_dynamo(fleet, "fastokens"),
                    "smg": self._start_smg,
                    "vllm-router": self._start_vllm_router,
                }[peer]
                port, pid = start(fleet)
                self._await(port)
                shape = TESTS[test]
                alone = self._load({**shape, "long_isl": 0}, port, pid) if shape.get("long_isl") else None
                figures[test] = {**self._load(shape, port, pid), "alone": alone}
        return figures

    def _load(self, shape: dict[str, Any], port: int, pid: int) -> dict[str, Any]:
        path = "/v1/chat/completions" if shape.get("chat") else "/v1/completions"
        spec = LoadSpec(
            port=port, path=path, words=self._words, model=MODEL, duration_s=self._seconds, pids={"peer": pid}, **shape
        )
        file = self._scratch / "spec.json"
        file.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "benchmarks.http_load", str(file)]
        if self._pin:
            command = ["taskset", "-c", str(self._side), *command]
        profiler = None
        if self._profile:
            profiler = subprocess.Popen([*self._profile.split(), str(pid)])
        answer = subprocess.run(command, capture_output=True, timeout=600, check=False)
        if profiler is not None:
            profiler.wait()
        if answer.returncode:
            raise RuntimeError(answer.stderr.decode()[-2000:])
        measured: dict[str, Any] = json.loads(answer.stdout)
        cpu = measured["cpu_s"]["peer"]
        measured["us_per_request"] = cpu / max(1, measured["requests"]) * 1e6
        measured["us_per_token"] = cpu / max(1, measured["tokens"]) * 1e6
        measured["us_per_event"] = cpu / max(1, measured["events"]) * 1e6
        return measured

    def _await(self, port: int) -> None:
        body = json.dumps({"model": MODEL, "prompt": " a b c", "max_tokens": 1}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError as error:
                if time.monotonic() > until:
                    raise RuntimeError(f"port {port} never answered ({error}); logs: {self._scratch}") from error
                time.sleep(0.2)  # noqa: TID251 - another project's process, which announces nothing

    def _start_ours(self, fleet: Fleet) -> tuple[int, int]:
        ours = [sys.executable, "-m", "cli"]
        level = ["--log-level", "warning"]
        consolidator = fleet.start("consolidator", [*ours, "consolidator", *level], self._side)
        words = fleet.ready_words(consolidator)
        for number in range(ENGINES):
            command = [sys.executable, "-m", "benchmarks.http_worker", words["ingest"], f"worker-{number}"]
            fleet.start(f"worker{number}", [*command, str(BLOCK_SIZE)], self._side)
        planes = ["--feed-endpoint", words["feed"], "--query-endpoint", words["query"]]
        router = fleet.start(
            "router",
            [
                *ours,
                "router",
                "--port",
                "0",
                "--http-workers",
                str(self._http_workers),
                *planes,
                "--model-path",
                str(self._model),
                "--model-name",
                MODEL,
                *level,
            ],
            self._peer,
        )
        url = fleet.ready_words(router)["http"]
        return int(url.rpartition(":")[2]), router.pid

    def _engines(self, fleet: Fleet) -> list[str]:
        urls = []
        for number in range(ENGINES):
            port = free_port()
            fleet.start(f"engine{number}", [sys.executable, "-m", "benchmarks.http_engine", str(port)], self._side)
            urls.append(f"http://127.0.0.1:{port}")
        return urls

    def _start_smg(self, fleet: Fleet) -> tuple[int, int]:
        port = free_port()
        command = [self._peer_python, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "cache_aware", "--log-level", "error", "--max-concurrent-requests", "-1"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        process = fleet.start("smg", [*command, "--worker-urls", *self._engines(fleet)], self._peer)
        return port, process.pid

    def _start_vllm_router(self, fleet: Fleet) -> tuple[int, int]:
        port = free_port()
        command = [self._peer_python, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "cache_aware", "--log-level", "error"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        process = fleet.start("vllm-router", [*command, "--worker-urls", *self._engines(fleet)], self._peer)
        return port, process.pid

    def _start_dynamo(self, fleet: Fleet, tokenizer: str) -> tuple[int, int]:
        port = free_port()
        store = Path(tempfile.mkdtemp(dir=self._scratch))
        environment = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(store),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_HTTP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
        }
        if tokenizer == "fastokens":
            environment["DYN_TOKENIZER"] = "fastokens"
        planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        command = [self._peer_python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        command += ["--router-mode", "kv", "--kv-cache-block-size", str(BLOCK_SIZE), *planes]
        process = fleet.start("dynamo-frontend", command, self._peer, environment)
        command = [self._peer_python, "-m", "dynamo.mocker", "--model-path", str(self._model), "--model-name", MODEL]
        command += ["--block-size", str(BLOCK_SIZE), "--speedup-ratio", "1000000", "--num-workers", str(ENGINES)]
        command += ["--num-gpu-blocks-override", "16384", "--max-num-seqs", "256", *planes]
        fleet.start("dynamo-mocker", command, self._side, environment)
        return port, process.pid


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def show(figures: dict[str, dict[str, Any]], console: Console) -> None:
    """Print a table per test, with the ratio of each peer's CPU to ours."""
    for test, shape in TESTS.items():
        rows = {peer: found[test] for peer, found in figures.items() if test in found}
        if not rows:
            continue
        unit = "us_per_token" if shape.get("stream") else "us_per_request"
        ours = rows.get("ours", {}).get(unit)
        columns = ["peer", "CPU µs/request", "CPU µs/token", "CPU µs/event", "ratio to ours", "requests/s"]
        columns += ["p50 ms", "p99 ms", "TTFT p50 ms", "RSS MB", "failures"]
        table = Table(*columns, title=test)
        for peer, row in rows.items():
            table.add_row(
                peer,
                f"{row['us_per_request']:.0f}",
                f"{row['us_per_token']:.1f}" if shape.get("stream") else "",
                f"{row['us_per_event']:.1f}" if shape.get("stream") else "",
                f"{row[unit] / ours:.2f}" if ours else "",
                f"{row['requests_per_s']:.0f}",
                f"{row['latency_ms'].get('p50', 0):.2f}",
                f"{row['latency_ms'].get('p99', 0):.2f}",
                f"{row['ttft_ms'].get('p50', 0):.2f}",
                f"{row['rss_mb']['peer']:.0f}",
                f"{row['failures']} {row['failure'][:60]}",
            )
        console.print(table)
        if shape.get("long_isl"):
            show_long(rows, shape["long_isl"], console)


def show_long(rows: dict[str, dict[str, Any]], long_isl: int, console: Console) -> None:
    """Print what long prompts do to the TTFT of short ones."""
    columns = ["peer", "TTFT p50 ms alone", "among long", "ratio", "p99 ms alone", "among long", "ratio"]
    table = Table(*columns, "long prompts/s", title=f"short requests while prompts of {long_isl:,} tokens arrive")
    for peer, row in rows.items():
        cells = []
        for quantile in ("p50", "p99"):
            alone, among = row["alone"]["ttft_ms"].get(quantile, 0), row["ttft_ms"].get(quantile, 0)
            cells += [f"{alone:.2f}", f"{among:.2f}", f"{among / alone:.2f}" if alone else ""]
        table.add_row(peer, *cells, f"{row['long_requests'] / row['window_s']:.1f}")
    console.print(table)


def main() -> int:
    """Run it and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="ours,dynamo,dynamo-fast,smg,vllm-router")
    parser.add_argument("--tests", default="short,stream,chunks,turns,long,flood")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time per test")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has the peers' wheels")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "poolgrid-bench-model")
    parser.add_argument("--profile", default="", help="command that profiles a process; its pid is appended")
    parser.add_argument("--http-workers", type=int, default=1, help="processes of ours that share the port")
    parser.add_argument("--logs", type=Path, help="keep the processes' output here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    console = Console(width=160)
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="poolgrid-http-") as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, logs)
        for peer in options.peers.split(","):
            if not bench.is_installed(peer):
                console.print(f"{peer}: not installed for {options.peer_python}, skipped")
                continue
            figures[peer] = bench.run(peer, options.tests.split(","))
    show(figures, console)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
