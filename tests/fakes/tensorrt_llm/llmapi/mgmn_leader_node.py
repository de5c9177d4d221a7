# ruff: noqa: TID252 - relative, so that it imports as tensorrt_llm and as tests.fakes.tensorrt_llm
"""``python3 -m tensorrt_llm.llmapi.mgmn_leader_node``: rank 0 of MPI, which serves ``LLM`` in another process.

With ``--action stop`` it tells the one that runs to end.
"""

from __future__ import annotations

import os
import socket
import sys

from .._fake.world import ADDRESS, STOP, open_world, to_leader


def serve() -> None:
    """Hand the collective calls of ``LLM`` to all ranks, until told to stop."""
    host, _, port = os.environ[ADDRESS].removeprefix("tcp://").rpartition(":")
    world = open_world(is_leader=True)
    with socket.create_server((host, int(port))) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                while order := connection.recv(1):
                    world.step(order)
                    connection.sendall(order)
                    if order == STOP:
                        return


def main() -> None:
    """Serve, or stop the one that serves."""
    if sys.argv[1:] == ["--action", "stop"]:
        with to_leader() as leader:
            leader.sendall(STOP)
            leader.recv(1)
    else:
        serve()


if __name__ == "__main__":
    main()
