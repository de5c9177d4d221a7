"""Connections to a host that is cut off, of who says something and who does not; says in JSON which were given up.

python -m tests.hosts.silent_host
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from poolgrid.server.transport import zmq_socket
from poolgrid.server.transport.dealer import Dealer, ZmqDealer, connect_dealer
from poolgrid.server.transport.planes import PlaneContext, PlaneMetrics
from tests.hosts.network import is_inside, make_hosts, run_inside

TIMEOUT_S = 30.0
SAID_EVERY_S = 0.05

SERVER = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(f"tcp://{sys.argv[1]}:*")
print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
while True:
    socket.recv_multipart()
"""


class Owner:
    """Who connects."""

    def __init__(self) -> None:
        self.connected, self.gave_up = asyncio.Event(), asyncio.Event()

    def on_frame(self, frame: bytes) -> None:
        """Take nothing: the server says nothing."""

    def on_connected(self) -> None:
        self.connected.set()

    def on_disconnected(self) -> None:
        self.gave_up.set()

    def on_refused(self, why: str) -> None:
        """Do not mind: it is about the attempts that follow."""


async def _say_on(dealer: Dealer) -> None:
    while True:
        dealer.send(b"a word")
        await asyncio.sleep(SAID_EVERY_S)


async def _who_gives_up(endpoint: str, cut: Callable[[], None]) -> dict[str, bool]:
    context = PlaneContext.make(None, PlaneMetrics(CollectorRegistry()))
    owners: dict[str, Owner] = {}
    try:
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            talking = []
            for name in ("loop, listening", "loop, talking", "libzmq, listening", "libzmq, talking"):
                owner = owners[name] = Owner()
                make = connect_dealer if "loop" in name else ZmqDealer
                dealer = make(context, endpoint, owner)
                await owner.connected.wait()
                if "talking" in name:
                    talking.append(group.create_task(_say_on(dealer)))
            cut()
            for owner in owners.values():
                await owner.gave_up.wait()
            for task in talking:
                task.cancel()
    except TimeoutError:
        pass  # who has not given up is said below
    finally:
        context.destroy(linger=0)
    return {name: owner.gave_up.is_set() for name, owner in owners.items()}


def main() -> int:
    """Connect, cut the host off, and wait."""
    if not is_inside():
        return run_inside("tests.hosts.silent_host", sys.argv[1:])
    zmq_socket.PROBED_AFTER_S = zmq_socket.PROBED_EVERY_S = zmq_socket.PROBES_MAX = 1
    zmq_socket.UNACKNOWLEDGED_S = 2
    [host] = make_hosts(1)
    with subprocess.Popen(
        [*host.prefix, sys.executable, "-c", SERVER, host.address], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()

        sys.stdout.write(json.dumps(asyncio.run(_who_gives_up(endpoint, lambda: host.cut("silence")))) + "\n")
        server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
