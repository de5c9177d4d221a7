"""Hosts as network namespaces on a bridge, all of it in namespaces of the command's own.

Rules
    1. The command runs itself again under ``unshare``: with a network, mounts and processes of its own. The names of
       its hosts are below a ``/run`` that nobody else sees, and its bridge reaches nothing but its hosts.
    2. So the kernel removes everything when the command ends, however it ends: its first process takes all others
       with it, and a network without processes goes.
    3. A host is cut off in two ways, neither of which closes a connection: ``cable`` takes the carrier away, which the
       host's kernel sees; ``silence`` drops every frame at the bridge, which nobody sees.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

INSIDE = "POOLGRID_TEST_HOSTS_INSIDE"
"""Set in the environment of the command that has its own namespaces."""

PROGRAMS = ("setpriv", "unshare", "ip", "bridge", "mount")
BRIDGE = "hosts"
NETWORK = "10.77.0."
WAYS = ("cable", "silence")

REACH_S = 0.5
"""Without a connection by then a host is not reached."""

HEALED_S = 20.0

LISTEN = """
import signal, socket, sys
listening = socket.create_server((sys.argv[1], 80), backlog=64)
print(flush=True)
signal.pause()
"""
"""What a host runs for ``main``: a port that connections reach."""


def why_not() -> str:
    """Return why no hosts can be made here; empty when they can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian's packages iproute2 and util-linux)"
    done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    return f"no namespaces can be made here: {done.stderr.strip()}" if done.returncode else ""


def _unshare() -> list[str]:
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return own if os.geteuid() == 0 else [*own, "--map-root-user"]


def run_inside(module: str, arguments: Sequence[str]) -> int:
    """Run a module again in namespaces of its own; return its exit status. They end with this process, however it ends:
    by an interrupt, SIGTERM or kill -9."""
    command = ["setpriv", "--pdeathsig", "KILL", *_unshare(), sys.executable, "-m", module, *arguments]
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        # Whatever is raised meanwhile kills the child first.
        return subprocess.call(command, env={**os.environ, INSIDE: "1"})
    finally:
        signal.signal(signal.SIGTERM, before)


def is_inside() -> bool:
    """Return whether this process has namespaces of its own."""
    return INSIDE in os.environ


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one address."""

    number: int

    @property
    def name(self) -> str:
        """Return its name, which its namespace has too."""
        return f"host-{self.number}"

    @property
    def address(self) -> str:
        """Return where it is reached."""
        return f"{NETWORK}{self.number}"

    @property
    def port(self) -> str:
        """Return the name of its port on the bridge."""
        return f"port-{self.number}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return what before a command has it run there; the process is the command's own."""
        return ("ip", "netns", "exec", self.name)

    def cut(self, way: str) -> None:
        """Cut it off in one of ``WAYS``."""
        if way == "cable":
            _do("ip", "link", "set", self.port, "down")
        else:
            _do("bridge", "link", "set", "dev", self.port, "state", "disabled")

    def heal(self, way: str) -> None:
        """Connect it again."""
        if way == "cable":
            _do("ip", "link", "set", self.port, "up")
        else:
            _do("bridge", "link", "set", "dev", self.port, "state", "forwarding")


def make_hosts(count: int) -> list[Host]:
    """Make hosts on a bridge, where this process is too; only inside."""
    assert is_inside(), "hosts are made in namespaces of the command's own"
    _do("mount", "-t", "tmpfs", "tmpfs", "/run")
    _do("ip", "link", "set", "lo", "up")
    _do("ip", "link", "add", BRIDGE, "type", "bridge", "stp_state", "0")
    _do("ip", "address", "add", f"{NETWORK}254/24", "dev", BRIDGE)
    _do("ip", "link", "set", BRIDGE, "up")
    hosts = [Host(number) for number in range(1, count + 1)]
    for host in hosts:
        _do("ip", "netns", "add", host.name)
        _do("ip", "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _do("ip", "link", "set", host.port, "master", BRIDGE, "up")
        for words in ("link set lo up", f"address add {host.address}/24 dev eth0", "link set eth0 up"):
            _do("ip", "-netns", host.name, *words.split())
    return hosts


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


def main() -> int:
    """Cut one of two hosts off in each way and say, in JSON, which are reached then."""
    if not is_inside():
        return run_inside("tests.hosts.network", sys.argv[1:])
    hosts = make_hosts(2)
    listening = [
        subprocess.Popen([*host.prefix, sys.executable, "-S", "-c", LISTEN, host.address], stdout=subprocess.PIPE)
        for host in hosts
    ]
    for each in listening:
        assert each.stdout is not None
        each.stdout.readline()
    if "hold" in sys.argv[1:]:
        sys.stdout.write("held\n")
        sys.stdout.flush()
        signal.pause()
    _say_who_is_reached("", hosts)
    for way in WAYS:
        hosts[0].cut(way)
        _say_who_is_reached(way, hosts)
        hosts[0].heal(way)
        _until_reached(hosts[0])
        _say_who_is_reached("", hosts)
    return 0


def _until_reached(host: Host) -> None:
    """A carrier that is back is taken up a moment later: until then what is sent is lost."""
    deadline_s = monotonic() + HEALED_S
    while not _is_reached(host):
        assert monotonic() < deadline_s, f"{host.name} is not reached {HEALED_S:.0f} s after it was healed"


def _is_reached(host: Host) -> bool:
    try:
        socket.create_connection((host.address, 80), timeout=REACH_S).close()
    except OSError:
        return False
    return True


def _say_who_is_reached(way: str, hosts: Sequence[Host]) -> None:
    reached = {host.number: _is_reached(host) for host in hosts}
    sys.stdout.write(json.dumps({"way": way, "reached": reached}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
