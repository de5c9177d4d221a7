"""Each router of the comparison: how it is started before the same engine servers, with its own defaults.

    ours, ours-POLICY   this checkout: ``poolgrid up --engine-url`` for each server
    legs, apart         the same, half of the servers for prefill and half for decode: one leg or two by expected time,
                        and always two
    before              0a211ed, from a Python that has it: a process for each worker, and the consolidator's
    smg                 SGLang's gateway, ``--policy cache_aware``; ``-ids``: and a server for each session id
    vllm-router         its ``cache_aware``; ``-events`` and ``-robin`` behind the name: ``kv_aware``, round robin;
                        ``-affinity``: ``kv_aware`` with session affinity; ``-ids``: ``consistent_hash`` over session
                        ids; ``-programs``: scheduling of agents' programs, named by their session ids

Peers run from another Python, which has their wheels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from lab.benchmarks.fleet import Fleet, free_port
from lab.benchmarks.http_load import cpu_s, family, rss_mb
from lab.benchmarks.peers import MODULE_OF, import_fault, smg_command, vllm_router_command
from lab.comparison.engines import MODEL, Address

START_TIMEOUT_S = 90.0
SESSION_HEADER = "x-session-id"
"""One that every router here knows or can be told."""

PROGRAM_SCHEDULING = (
    "--enable-program-scheduling",
    "--program-scheduling-config-json",
    '{"program_scheduling_enable_key":"auto"}',
)
"""Without the key it schedules no program of a session id, and its diagnostics show none."""

SMG_OPTIONS = {"smg": (), "smg-ids": ("--routing-key-override", "--routing-key-headers", SESSION_HEADER)}
VLLM_ROUTER_OPTIONS = {
    "vllm-router": ("cache_aware",),
    "vllm-router-events": ("kv_aware",),
    "vllm-router-robin": ("round_robin",),
    "vllm-router-affinity": ("kv_aware", "--kv-aware-session-affinity-ttl-secs", "60"),
    "vllm-router-ids": ("consistent_hash",),
    "vllm-router-programs": ("cache_aware", *PROGRAM_SCHEDULING),
}
TWO_LEGS = {"legs": (), "apart": ("legs=two",)}
NAMES = ("ours", *TWO_LEGS, "before", *SMG_OPTIONS, *VLLM_ROUTER_OPTIONS)


class Python:
    """Where the Pythons are that have each router."""

    def __init__(self, peers: str, before: str) -> None:
        self.peers = peers
        self.before = before

    def absent_because(self, router: str) -> str:
        """Return why a router cannot be started; empty when it can."""
        python, package = self._of(router)
        return import_fault(python, MODULE_OF.get(package, package)) if python else "no Python is named that has it"

    def version(self, router: str) -> str:
        """Return the version of a router, from its package."""
        python, package = self._of(router)
        program = f"from importlib.metadata import version; print(version({package!r}))"
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() or "unknown"

    def _of(self, router: str) -> tuple[str, str]:
        """Return the Python that has a router, and the package's name."""
        if router.startswith("ours") or router in TWO_LEGS:
            return sys.executable, "poolgrid"
        if router == "before":
            return self.before, "poolgrid"
        return self.peers, "smg" if router in SMG_OPTIONS else "vllm-router"


class Router:
    """One router that runs, with everything that belongs to it."""

    def __init__(
        self, name: str, engines: Sequence[Address], model: Path, block_size: int, python: Python, logs: Path
    ) -> None:
        """Start it; raises ``RuntimeError`` when it does not answer in time."""
        self.name = name
        self.port = free_port()
        self._logs = logs / name
        self._logs.mkdir(parents=True, exist_ok=True)
        self._fleet = Fleet(self._logs, pin=False)
        self._engines = engines
        self._model = model
        self._spent_s = 0.0
        self._is_ours = name in ("before", *TWO_LEGS) or name.startswith("ours")
        if name == "before":
            self._command = self._before(python.before)
        elif name in TWO_LEGS:
            half = len(engines) // 2
            roles = ["prefill="] * half + ["decode="] * (len(engines) - half)
            self._command = self._up(roles, [f"--part-option=router.{each}" for each in TWO_LEGS[name]])
        elif self._is_ours:
            policy = name.partition("-")[2]
            self._command = self._up([""] * len(engines), ["--policy", policy] if policy else [])
        elif name in SMG_OPTIONS:
            self._command = smg_command(python.peers, self.port, [each.url for each in engines])
            self._command += SMG_OPTIONS[name]
        else:
            policy, *more = VLLM_ROUTER_OPTIONS[name]
            self._command = vllm_router_command(python.peers, self.port, [each.url for each in engines], policy)
            self._command += more
            if policy == "kv_aware":
                for each in engines:
                    self._command += ["--kv-event-source", f"{each.url}={each.events}"]
                    self._command += ["--kv-event-replay-source", f"{each.url}={each.replay}"]
                self._command += ["--kv-event-block-size", str(block_size), "--kv-event-model", MODEL]
        self._process = self._fleet.start("router", self._command)
        try:
            self.wait()
        except RuntimeError:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _up(self, roles: Sequence[str], options: Sequence[str]) -> list[str]:
        """Return the command before engines of these roles; vLLM before 0.26 does not report where its events are."""
        command = [sys.executable, "-m", "poolgrid", "up", "--port", str(self.port), *options]
        for role, engine in zip(roles, self._engines, strict=True):
            command += ["--engine-url", f"{role}{engine.url}"]
            command += ["--part-option", f"worker.kv-events-endpoint={engine.events}"]
            command += ["--part-option", f"worker.kv-events-replay-endpoint={engine.replay}"]
        return command

    def _before(self, python: str) -> list[str]:
        """Start what stood between the engines and a router of ours at 0a211ed; return the router's command."""
        ours = [python, "-m", "poolgrid"]
        consolidator = self._fleet.start("consolidator", [*ours, "consolidator"])
        words = self._fleet.ready_words(consolidator)
        for number, engine in enumerate(self._engines):
            worker = [*ours, "worker", "--engine", "vllm", "--engine-url", engine.url, "--worker-id", f"gpu{number}"]
            worker += ["--kv-events-endpoint", engine.events, "--kv-events-replay-endpoint", engine.replay]
            self._fleet.start(f"worker-{number}", [*worker, "--consolidator", words["ingest"]])
        return [
            *(*ours, "router", "--port", str(self.port), "--model-path", str(self._model), "--model-name", MODEL),
            *("--feed-endpoint", words["feed"], "--query-endpoint", words["query"]),
        ]

    def _workers_ready(self) -> int:
        try:
            rows = httpx.get(f"{self.url}/v1/workers", timeout=5).json()["data"]
        except (httpx.TransportError, ValueError, KeyError):
            return 0
        return sum(row["state"] == "ready" for row in rows)

    def wait(self) -> None:
        """Wait until every engine has answered through it."""
        until = time.monotonic() + START_TIMEOUT_S
        while self._is_ours and self._workers_ready() < len(self._engines):
            if time.monotonic() > until:
                raise RuntimeError(f"{self.name} does not reach every engine: see {self._logs}")
            time.sleep(0.3)  # noqa: TID251 - a version of ours may not announce it
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
        answered = 0
        while answered < 2 * len(self._engines):
            try:
                answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=20)
                answered = answered + 1 if answer.status_code == 200 else 0
            except httpx.TransportError:
                answered = 0
            if not answered and time.monotonic() > until:
                raise RuntimeError(f"{self.name} does not answer after {START_TIMEOUT_S:.0f} s: see {self._logs}")
            time.sleep(0.1 if answered else 0.3)  # noqa: TID251 - another project's process, which announces nothing

    def restart(self) -> None:
        """Kill -9 the process that takes requests; start it again on the same port, where its parent does not."""
        if self._is_ours and self.name != "before":
            child = next(pid for pid in family(self._process.pid)[1:] if b"\0router\0" in _command_line(pid))
            self._spent_s += cpu_s(child)
            os.kill(child, 9)
            return
        self._spent_s += cpu_s(self._process.pid)
        os.kill(self._process.pid, 9)
        self._process.wait()
        self._process = self._fleet.start("router", self._command)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes."""
        return self._spent_s + sum(cpu_s(pid) for pid in self._fleet.running())

    def rss_mb(self) -> float:
        """Return the resident memory of all its processes."""
        return sum(rss_mb(pid) for pid in self._fleet.running())

    def stop(self) -> None:
        """End all of it."""
        self._fleet.close()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it ended meanwhile
