"""`poolgrid up` when a part cannot come back for a while: the rest serves, and the part is there again afterwards."""

from __future__ import annotations

import contextlib
import socket

import httpx
import psutil
import pytest

from tests.e2e.processes import Process, eventually, ready_workers, running_pool

pytestmark = pytest.mark.e2e


def consolidators(up: Process) -> list[psutil.Process]:
    found = []
    for process in up.descendants():
        with contextlib.suppress(psutil.Error):
            if "consolidator" in process.cmdline():
                found.append(process)
    return found


def listening(port: int) -> socket.socket | None:
    """Return a stranger that listens on a port, once its owner is gone."""
    stranger = socket.socket()
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
    except OSError:
        stranger.close()
        return None
    return stranger


def ask(url: str) -> int:
    body = {"model": "tiny", "prompt": "still there?", "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body).status_code


def trouble(url: str) -> str:
    return str(httpx.get(f"{url}/v1/pool").json()["journal"]["trouble"])


def test_a_stranger_on_the_port_of_a_dead_part_costs_no_request_and_ends_nothing() -> None:
    with running_pool(workers=1) as up:
        (first,) = consolidators(up)
        (option,) = [word for word in first.cmdline() if word.startswith("--ingest-port=")]
        port = int(option.partition("=")[2])
        first.kill()
        strangers: list[socket.socket] = []

        def taken() -> bool:
            found = listening(port)
            strangers.extend([found] if found is not None else [])
            return found is not None

        eventually("the stranger has the port", taken)
        tried: set[int] = set()

        def tried_twice() -> bool:
            tried.update(process.pid for process in consolidators(up))
            assert ask(up.url) == 200
            return len(tried - {first.pid}) >= 2

        eventually("the part was started again, in vain", tried_twice)
        eventually("the router says that nothing reaches it", lambda: bool(trouble(up.url)))
        for stranger in strangers:
            stranger.close()
        eventually("the pool is whole again", lambda: not trouble(up.url) and ready_workers(up.url) == ["worker-0"])
        assert ask(up.url) == 200
