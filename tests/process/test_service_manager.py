"""What systemd is told, at a real socket, by the protocol and by a whole process."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from poolgrid.server.process.service_manager import ServiceManager
from tests.e2e.processes import Process


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        yield listening


def heard(listening: socket.socket, timeout_s: float = 30.0) -> str:
    assert select.select([listening], [], [], timeout_s)[0], "nothing was said"
    return listening.recv(4096).decode()


async def test_a_loop_that_turns_says_so_again_and_again(systemd: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "30000", "OTHER": "stays"}
    manager = ServiceManager.taken_from(environment)
    assert manager is not None
    assert environment == {"OTHER": "stays"}, "what this process starts does not speak in its name"
    systemd.setblocking(False)

    manager.begin_signs_of_life()
    said = [await asyncio.get_running_loop().sock_recv(systemd, 64) for _ in range(3)]
    manager.close()
    while select.select([systemd], [], [], 0)[0]:  # on a busy machine the fourth comes before the end
        assert systemd.recv(64) == b"WATCHDOG=1"
    await asyncio.sleep(0.1)  # several intervals: what should not come is not there to be waited for
    assert said == 3 * [b"WATCHDOG=1"]
    assert not select.select([systemd], [], [], 0)[0]


@pytest.mark.parametrize(
    ("environment", "is_managed"),
    [
        ({}, False),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, False),
        ({"NOTIFY_SOCKET": "@poolgrid-no-such-socket", "WATCHDOG_USEC": "x"}, True),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, True),
    ],
    ids=["nobody", "unknown family", "no watchdog", "another process is watched"],
)
def test_who_is_not_watched_gives_no_signs(environment: dict[str, str], is_managed: bool) -> None:
    manager = ServiceManager.taken_from(environment)

    assert (manager is not None) is is_managed
    if manager is not None:
        manager.begin_signs_of_life()  # it would need a loop
        manager.tell_ready()  # nobody is there: that is said in the log, and no more
        manager.close()


@pytest.mark.e2e
def test_a_process_tells_systemd_that_it_is_ready_that_it_lives_and_that_it_ends(systemd: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "300000"}
    with Process("consolidator", environment=environment) as process:
        process.wait_ready()
        said = [heard(systemd)]
        while "READY=1" not in said:
            said.append(heard(systemd))
        assert said[0] == "WATCHDOG=1"
        assert heard(systemd) == "WATCHDOG=1"

        assert process.stop()[0] == 0

        while heard(systemd) != "STOPPING=1":
            pass
