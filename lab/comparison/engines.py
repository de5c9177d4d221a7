"""The engine servers behind every router of the comparison: vLLM, one on each GPU, or stand-ins for a rehearsal.

They are started once and emptied before each run (``POST /reset_prefix_cache``). A level that wants less KV cache than
there is restarts them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lab.benchmarks.fleet import free_port

MODEL = "m"
START_TIMEOUT_S = 300.0
"""Three times what vLLM 0.25 needs to start with four servers on one host."""

SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

COUNTERS = (
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
)
"""What the report takes from an engine, as Prometheus names the families, sums of histograms too."""


class Address(NamedTuple):
    """Where one engine server is."""

    url: str
    events: str
    replay: str


class Engines:
    """All engine servers of a machine."""

    def __init__(
        self,
        command: list[str],
        model: Path,
        count: int,
        kv_bytes: int,
        block_size: int,
        arguments: list[str],
        logs: Path,
    ) -> None:
        """``command`` serves a model directory with the arguments of ``vllm serve``; empty = stand-ins."""
        self._command = command
        self._model = model
        self._kv_bytes = kv_bytes
        self._block_size = block_size
        self._arguments = arguments
        self._logs = logs
        self._ports = [(free_port(), free_port(), free_port()) for _ in range(count)]
        self._transfer_ports = [free_port() for _ in range(count)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._share = 0.0
        self.share_gpu = False
        """Whether all are on the first GPU; one on each otherwise."""

    @property
    def addresses(self) -> list[Address]:
        host = "127.0.0.1"
        return [
            Address(f"http://{host}:{http}", f"tcp://{host}:{events}", f"tcp://{host}:{replay}")
            for http, events, replay in self._ports
        ]

    def start(self, kv_share: float) -> None:
        """Have all run with this share of the KV cache; raises ``RuntimeError`` when one does not start."""
        if kv_share != self._share:
            self.stop()
            self._share = kv_share
        for number in range(len(self._ports)):
            if number not in self._processes or self._processes[number].poll() is not None:
                self._processes[number] = self._started(number)
        self.wait()

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        http, events, replay = self._ports[number]
        publisher = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
            "topic": "",
        }
        arguments = [
            *(str(self._model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(http)),
            *("--block-size", str(self._block_size), "--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-cache-memory-bytes", str(int(self._kv_bytes * self._share))),
            *("--kv-events-config", json.dumps(publisher), *self._arguments),
        ]
        command = self._command or [sys.executable, "-m", "lab.comparison.stand_in"]
        caches = {
            name: f"{self._logs}/cache-{number}/{name.lower()}"
            for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        }
        with (self._logs / f"engine-{number}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *arguments],
                env={
                    **(SERVER | caches | os.environ),
                    "CUDA_VISIBLE_DEVICES": "0" if self.share_gpu else str(number),
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._transfer_ports[number]),  # read with a KV connector
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until all answer; raises ``RuntimeError`` when one ends, or is not ready in time."""
        until = time.monotonic() + START_TIMEOUT_S
        for number, address in enumerate(self.addresses):
            while not _answers(f"{address.url}/health"):
                log = self._logs / f"engine-{number}.log"
                if self._processes[number].poll() is not None:
                    raise RuntimeError(f"engine {number} ended: see {log}")
                if time.monotonic() > until:
                    raise RuntimeError(f"engine {number} does not answer after {START_TIMEOUT_S:.0f} s: see {log}")
                time.sleep(0.3)  # noqa: TID251 - another project's process, which announces nothing

    def warm_up(self) -> None:
        """Compute long and short prompts on each, so that kernels are compiled and graphs captured."""
        tokens = [300 + 7 * at % 20_000 for at in range(8000 if self._command else 400)]
        for address in self.addresses:
            for length in (len(tokens), len(tokens) // 3, 100):
                body = {"model": MODEL, "prompt": tokens[:length], "max_tokens": 16, "temperature": 0}
                httpx.post(f"{address.url}/v1/completions", json=body, timeout=120).raise_for_status()

    def empty(self) -> None:
        """Have all forget what they hold, and say so in their event streams."""
        for address in self.addresses:
            until = time.monotonic() + 30
            while httpx.post(f"{address.url}/reset_prefix_cache", timeout=30).status_code != 200:
                if time.monotonic() > until:
                    raise RuntimeError(f"{address.url} does not empty its cache")
                time.sleep(0.2)  # noqa: TID251 - as above
            # An engine publishes that with its next step.
            body = {"model": MODEL, "prompt": [7] * 20, "max_tokens": 2, "temperature": 0}
            httpx.post(f"{address.url}/v1/completions", json=body, timeout=60).raise_for_status()

    def counters(self) -> list[dict[str, float]]:
        """Return the counters of each server; those of one that is down are all 0."""
        return [_counters(f"{address.url}/metrics") for address in self.addresses]

    def kill(self, number: int) -> None:
        """Kill -9 one server, with all that it started."""
        process = self._processes.pop(number)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def restart(self, number: int) -> None:
        """Start a server again that was killed; it is not waited for."""
        self._processes[number] = self._started(number)

    def stop(self) -> None:
        """End all."""
        for process in self._processes.values():
            os.killpg(process.pid, signal.SIGTERM)
        for number in list(self._processes):
            try:
                self._processes[number].wait(15)
            except subprocess.TimeoutExpired:
                self.kill(number)
        self._processes.clear()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _counters(url: str) -> dict[str, float]:
    found: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
    try:
        text = httpx.get(url, timeout=10).text
    except httpx.TransportError:
        return found
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if name in COUNTERS:
                found[name] += sample.value
    return found


def difference(before: list[dict[str, float]], after: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return how far each server's counters went; a server that was started again counts from 0."""
    return [
        {name: late[name] - early[name] if late[name] >= early[name] else late[name] for name in COUNTERS}
        for early, late in zip(before, after, strict=True)
    ]
