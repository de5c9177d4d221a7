"""Real processes for end-to-end tests: started, awaited by their ready line, killed at will, always reaped."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil
from click.testing import CliRunner

from poolgrid.server.cli.main import app
from tests.guard import guarded

READY_TIMEOUT_S = 180.0
"""A fleet of fourteen processes takes ten seconds of CPU to start, which a busy machine gives them in minutes."""
WAIT_TIMEOUT_S = 180.0
PATIENCE_MS = 60_000
PATIENT = (
    *("--part-option", f"consolidator.lease-ms={PATIENCE_MS}"),
    *("--part-option", f"router.worker-timeout-ms={PATIENCE_MS}"),
)
"""For pools whose tests are not about silence: on a busy machine a process may get no CPU for longer than the defaults
allow, and is not to be taken for gone. One that is killed is noticed by its connection."""
PATIENT_ROUTER = ("--lease-ms", str(PATIENCE_MS), "--worker-timeout-ms", str(PATIENCE_MS))
"""The same for a router with its consolidator inside."""
PAUSE_MIN_S, PAUSE_GROWTH, PAUSE_MAX_S = 0.02, 1.3, 0.2
"""Between two looks at what others do. A look takes 10 ms of CPU on both sides: every 20 ms it would be half a core."""


class Process:
    """One `poolgrid` command."""

    def __init__(
        self,
        *arguments: str,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        python: str | Path = sys.executable,
    ) -> None:
        """``log`` takes standard error, which a pipe takes otherwise: a process that says much waits at a full one.

        ``prefix`` are words before the command, which has to become the process; ``python`` is whose poolgrid it is.
        """
        self.arguments = arguments
        with contextlib.ExitStack() as opened:
            self._process = subprocess.Popen(
                [*prefix, python, "-m", "poolgrid", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if log is None else opened.enter_context(log.open("wb")),
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                start_new_session=True,
            )
        guarded(self._process.pid)
        self._log = log
        self._told_to_end = False
        self.ready_words: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> Process:
        """Wait for the ready line."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline().decode().split() if readable else []
        if not line or line[0] != "ready":
            self.kill()
            stderr = self._process.stderr
            said = self._log.read_bytes() if self._log is not None else b"" if stderr is None else stderr.read()
            raise AssertionError(f"{self.arguments} did not become ready: {said.decode()}")
        self.ready_words = line[1:]
        return self

    @property
    def url(self) -> str:
        return self.ready_words[0]

    def word(self, key: str) -> str:
        return next(word.partition("=")[2] for word in self.ready_words if word.startswith(f"{key}="))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def child(self, *words: str) -> psutil.Process:
        """Return the child whose command line holds all words."""
        for child in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                if all(word in child.cmdline() for word in words):
                    return child
        raise AssertionError(f"no child of {self.arguments} runs {words}")

    def children(self, *words: str) -> list[psutil.Process]:
        """Return the children whose command lines hold all words."""
        found = []
        for child in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                if all(word in child.cmdline() for word in words):
                    found.append(child)
        return found

    def signal(self, number: int) -> None:
        self._told_to_end = self._told_to_end or number == signal.SIGTERM
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(WAIT_TIMEOUT_S)

    def errors_so_far(self) -> str:
        """Take what standard error has now; `stop` returns the rest."""
        assert self._process.stderr is not None
        taken = b""
        while select.select([self._process.stderr], [], [], 0)[0]:
            part = os.read(self._process.stderr.fileno(), 65_536)
            if not part:
                break
            taken += part
        return taken.decode()

    def kill(self) -> None:
        """Kill -9, and everything below."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = self.descendants()
            self._process.kill()
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()

    def stop(self) -> tuple[int, str]:
        """SIGTERM, then the exit status and what was said on standard error.

        Only one: a second one ends a process without waiting for what it has.
        """
        if self._process.poll() is None and not self._told_to_end:
            self.signal(signal.SIGTERM)
        _, errors = self._process.communicate(timeout=WAIT_TIMEOUT_S)
        return self._process.returncode, (errors if self._log is None else self._log.read_bytes()).decode()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def becomes(read: Callable[[], object], wanted: object, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Wait until what is read is what is wanted; what it is instead is shown in the end."""
    found: object = None

    def is_so() -> bool:
        nonlocal found
        found = read()
        return found == wanted

    with contextlib.suppress(AssertionError):
        eventually("it is as wanted", is_so, timeout_s)
    assert found == wanted


def eventually(what: str, check: Callable[[], bool], timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Wait until a check over real processes holds; transport errors count as "not yet"."""
    deadline = time.monotonic() + timeout_s
    pause_s = PAUSE_MIN_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if check():
                return
        assert time.monotonic() < deadline, f"never came true: {what}"
        select.select([], [], [], pause_s)  # the other processes need the core more than we do
        pause_s = min(PAUSE_MAX_S, pause_s * PAUSE_GROWTH)


@contextlib.contextmanager
def running_pool(*arguments: str, speedup: float = 50.0, workers: int = 3) -> Iterator[Process]:
    """Run `poolgrid up` and end it in good order; nothing may be left behind."""
    up = Process("up", "--port", "0", "--workers", str(workers), "--speedup", str(speedup), *PATIENT, *arguments)
    with up:
        up.wait_ready()
        yield up
        below = up.descendants()
        status, errors = up.stop()
        assert status == 0, errors
        assert not [process for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def ready_workers(url: str) -> list[str]:
    rows = httpx.get(f"{url}/v1/workers").json()["data"]
    return [row["worker_id"] for row in rows if row["state"] == "ready"]


def worker_rows(url: str) -> dict[str, dict[str, object]]:
    return {row["worker_id"]: row for row in httpx.get(f"{url}/v1/workers").json()["data"]}


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    return sum_of(httpx.get(f"{url}/metrics").text, name, **labels)


def sum_of(metrics: str, name: str, **labels: str) -> float:
    total = 0.0
    for line in metrics.splitlines():
        if line.startswith((f"{name} ", f"{name}{{")) and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            total += float(line.rsplit(" ", 1)[1])
    return total


def index_equals_workers(url: str) -> bool:
    """Compare what the router believes of each worker with what the worker itself says it holds."""
    for name, row in worker_rows(url).items():
        believed = httpx.get(f"{url}/v1/workers/{name}/blocks").text.split("\n")
        held = httpx.get(f"{row['http_endpoint']}/blocks").text.split("\n")
        if believed != held:
            return False
    return True


def pool_is_quiet(url: str) -> bool:
    """Tell whether no request is on any worker or on any book."""
    rows = worker_rows(url).values()
    return all(
        row["running_requests"] == row["waiting_requests"] == row["active_requests"] == row["prefill_tokens"] == 0
        for row in rows
    )


def is_settled(url: str) -> bool:
    """Tell whether all that was asked of a pool is over, and its router knows what of it is cached, to the last block.

    Events come after the answer, the first block's before the last one's: whoever counts on the cache waits for this.
    """
    return pool_is_quiet(url) and index_equals_workers(url)


def assert_decisions_replay(directory: Path) -> int:
    """Replay what routers recorded below a data_dir; every derivable decision must be identical; return how many."""
    found = CliRunner().invoke(app, ["replay", str(directory), "--json"])
    assert found.exit_code == 0, found.output
    return sum(row["identical"] for row in json.loads(found.stdout)["routers"].values())
