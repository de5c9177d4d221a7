"""A router that is killed under load loses the requests that it held; those that come while it is away wait."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from poolgrid.server.frontend.models import TINY_MODEL_PATH
from poolgrid.server.transport.bound_socket import listen
from tests.e2e.processes import PATIENT, WAIT_TIMEOUT_S, Process, eventually
from tests.fakes.engine_server.threaded import servers_in_thread
from tests.fakes.engine_server.vllm import Options

pytestmark = pytest.mark.e2e

CLIENTS = 6
GRID = Path(__file__).parents[2] / "pool_configs" / "disagg_two_by_two.json"


@contextmanager
def before_servers() -> Iterator[Process]:
    with servers_in_thread(*(Options(block_size=16, step_s=0.01) for _ in range(2))) as running:
        fronts = [word for each in running.servers for word in ("--engine-url", each.url)]
        with Process("up", *fronts, "--port", "0", "--model-path", str(TINY_MODEL_PATH), *PATIENT) as up:
            yield up.wait_ready()


@contextmanager
def of_own_workers(*options: str) -> Iterator[Process]:
    with Process("up", "--port", "0", "--workers", "2", "--speedup", "4", *PATIENT, *options) as up:
        yield up.wait_ready()


@contextmanager
def fleet() -> Iterator[Process]:
    with Process("up", "--port", "0", "--speedup", "4", "--pools", str(GRID), *PATIENT) as up:
        yield up.wait_ready()


class Load:
    """Clients that each send one request after the other, on new connections; ``answers`` has what became of each."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[float, float, int | str]] = []
        """When it was sent, when it was over, and its status or what its client met."""
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def _run(self, number: int) -> None:
        sent = 0
        while not self._over.is_set():
            sent += 1
            body = {"model": "tiny", "prompt": f"client {number} asks for the {sent}. time", "max_tokens": 12}
            began_s = time.monotonic()
            try:
                outcome: int | str = httpx.post(
                    f"{self._url}/v1/completions", json=body, timeout=WAIT_TIMEOUT_S
                ).status_code
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            self.answers.append((began_s, time.monotonic(), outcome))

    def sent_after(self, moment_s: float) -> list[int | str]:
        return [outcome for began_s, _, outcome in list(self.answers) if began_s >= moment_s]


@pytest.mark.parametrize(
    ("pool", "command"),
    [
        (before_servers, "router"),
        (of_own_workers, "router"),
        (fleet, "global-router"),
    ],
    ids=["before servers", "own workers", "global router"],
)
def test_a_router_that_is_killed_under_load_loses_only_the_requests_that_it_held(
    pool: Callable[[], Iterator[Process]], command: str
) -> None:
    with pool() as up, Load(up.url) as load:  # type: ignore[attr-defined]
        eventually("requests are served", lambda: len(load.answers) > 2 * CLIENTS)
        router = up.child(command)
        killed_s = time.monotonic()
        router.kill()
        eventually("it is served again", lambda: load.sent_after(killed_s).count(200) > 4 * CLIENTS)
        first_s = min(over_s for began_s, over_s, outcome in load.answers if began_s >= killed_s and outcome == 200)
        sys.stdout.write(f"the first answer came {first_s - killed_s:.2f} s after the kill\n")

        assert set(load.sent_after(killed_s)) == {200}, "no later request is refused"
        lost = [answer for answer in load.answers if answer[2] != 200]
        assert all(began_s < killed_s for began_s, _, _ in lost)
        assert len(lost) <= CLIENTS


def test_a_pool_that_has_ended_keeps_no_connection_waiting() -> None:
    with of_own_workers() as up:
        host, port = up.url.removeprefix("http://").rsplit(":", 1)
        with Load(up.url) as load:
            eventually("requests are served", lambda: len(load.answers) > CLIENTS)
            status, errors = up.stop()
        assert status == 0, errors
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))


def test_systemd_can_keep_the_listening_socket_of_a_router() -> None:
    """As for a service with a socket unit: descriptor 3, named by the two variables, whatever the port option says."""
    with ExitStack() as opened:
        kept = opened.enter_context(listen("127.0.0.1", 0, "port"))
        host, port = kept.getsockname()
        start = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid()); "
            "os.execv(sys.executable, [sys.executable, '-m', 'poolgrid', *sys.argv[2:]])"
        )
        ports = [word for name in ("select", "ingest", "feed", "query") for word in (f"--{name}-port", "0")]
        urls = []
        for _ in range(2):
            router = subprocess.Popen(
                [sys.executable, "-c", start, str(kept.fileno()), "router", "--port", "1", *ports],
                pass_fds=(kept.fileno(),),
                env={**os.environ, "LISTEN_FDS": "1"},
                stdout=subprocess.PIPE,
            )
            assert router.stdout is not None
            opened.callback(router.wait)
            opened.callback(router.kill)
            urls.append(router.stdout.readline().decode().split()[1])
            assert httpx.get(f"{urls[-1]}/live").status_code == 200
            router.send_signal(signal.SIGKILL)
            router.wait()
            early = opened.enter_context(socket.create_connection((host, port)))
            early.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert urls == [f"http://{host}:{port}"] * 2


def test_processes_that_share_the_port_of_up_lose_only_what_one_of_them_held() -> None:
    with of_own_workers("--part-option", "router.http-workers=2") as up, Load(up.url) as load:
        eventually("requests are served", lambda: len(load.answers) > 2 * CLIENTS)
        members = [each for each in up.descendants() if _is_member(each)]
        assert len(members) == 2
        for member in members:
            member.kill()
        killed_s = time.monotonic()
        eventually("it is served again", lambda: load.sent_after(killed_s).count(200) > 4 * CLIENTS)
        assert set(load.sent_after(killed_s)) == {200}


def _is_member(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and all("router" in each.cmdline() for each in (process, parent))
