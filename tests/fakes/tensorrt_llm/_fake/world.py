"""The ranks of an engine over several processes, as unfriendly as MPI: whoever waits for a dead one waits for ever.

Rank 0 of MPI is ``mgmn_leader_node``, the others are ``mgmn_worker_node``. ``LLM`` is in a process of its own, without
MPI, and asks the leader for each collective call. With ``mpi4py`` under ``mpirun`` or ``srun --mpi`` the ranks are a
real MPI world; else sockets stand for it, at the address that ``FAKE_MPI_ADDRESS`` names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
from typing import Protocol

ADDRESS = "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"
WORLD_SIZE = "tllm_mpi_size"
STEP, STOP = b"s", b"q"
CONNECT_PATIENCE_S = 60.0


class World(Protocol):
    """All ranks, as one of them sees them."""

    def step(self, order: bytes) -> bytes:
        """Take part in a collective call; return the order that rank 0 gave. Never returns when a rank is dead."""
        ...


def hang() -> None:
    """Wait for ever, as in a collective call that a rank is missing from."""
    threading.Event().wait()


class MpiWorld:
    """The real thing."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD

    def step(self, order: bytes) -> bytes:
        order = self._world.bcast(order, root=0)
        self._world.Barrier()
        return order


class SocketLeader:
    """Rank 0 where there is no MPI."""

    def __init__(self, size: int) -> None:
        host, _, port = os.environ["FAKE_MPI_ADDRESS"].rpartition(":")
        with socket.create_server((host, int(port))) as server:
            self._ranks = [server.accept()[0] for _ in range(size - 1)]

    def step(self, order: bytes) -> bytes:
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.sendall(order)
        for rank in self._ranks:
            if not _received(rank):
                hang()
        return order


class SocketRank:
    """Another rank where there is no MPI."""

    def __init__(self) -> None:
        host, _, port = os.environ["FAKE_MPI_ADDRESS"].rpartition(":")
        self._leader = connected(host, int(port))

    def step(self, order: bytes) -> bytes:
        order = _received(self._leader)
        if not order:
            hang()
        self._leader.sendall(order)
        return order


def open_world(is_leader: bool) -> World:
    """Join the ranks, and wait for all of them."""
    if "FAKE_MPI_ADDRESS" not in os.environ and importlib.util.find_spec("mpi4py") is not None:
        return MpiWorld()
    return SocketLeader(int(os.environ[WORLD_SIZE])) if is_leader else SocketRank()


class Proxy:
    """``LLM``'s end of the line to the ranks."""

    def __init__(self, ranks: int) -> None:
        self.size = int(os.environ[WORLD_SIZE])
        if self.size != ranks:
            raise ValueError(f"External MPI session has {self.size} workers but the model needs world_size={ranks}.")
        self._leader = to_leader()

    def step(self) -> None:
        """Have all ranks take part in a collective call."""
        try:
            self._leader.sendall(STEP)
            answer = _received(self._leader)
        except OSError:
            answer = b""
        if not answer:
            hang()


def proxy_for(ranks: int) -> Proxy | None:
    """Return the line to ranks that a launcher has started; ``None`` = they are all pretended in this process."""
    return Proxy(ranks) if "TLLM_SPAWN_PROXY_PROCESS" in os.environ and ranks > 1 else None


def to_leader() -> socket.socket:
    """Connect to the leader node on this machine."""
    host, _, port = os.environ[ADDRESS].removeprefix("tcp://").rpartition(":")
    return connected(host, int(port))


def connected(host: str, port: int) -> socket.socket:
    """Return a connection to somebody who may not be there yet."""
    waited = threading.Event()
    for _ in range(int(CONNECT_PATIENCE_S / 0.05)):
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port))
        waited.wait(0.05)
    raise TimeoutError(f"nobody listens at {host}:{port}")


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except OSError:
        return b""
