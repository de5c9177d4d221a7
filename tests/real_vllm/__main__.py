"""poolgrid in front of two real vLLM servers on this machine's CPU.

    python -m tests.real_vllm                    everything
    python -m tests.real_vllm index reuse        some checks, by name
    python -m tests.real_vllm --json OUT         also write what was measured
    python -m tests.real_vllm transparency --server URL --router URL
                                                 compare the answers of a server and a router that run already
    python -m tests.real_vllm upstream --vllm-source DIR
                                                 vLLM's own tests, from its source of the version that is installed

``POOLGRID_VLLM`` names the environment that has vLLM (``CONTRIBUTING.md`` says how to make one); without it
nothing is run, and the status is 0. ``POOLGRID_PEERS`` names a Python that has vllm-router and smg; without it they are
left out of the comparison. What moves KV between servers (``apart``) needs NIXL in the environment that has vLLM, and
is skipped without it, and ``upstream`` needs pytest, pytest-asyncio, pytest-timeout and tblib there. Everything ends
after ``TIMEOUT_S``.
The exit status is 0 when every check passed, 1 when one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from tests.real_vllm import checks
from tests.real_vllm.apart import NoNixl, apart
from tests.real_vllm.clients import clients
from tests.real_vllm.continued import continued
from tests.real_vllm.embeddings import embeddings
from tests.real_vllm.exactness import exactness
from tests.real_vllm.hybrid import hybrid
from tests.real_vllm.pool import Pool
from tests.real_vllm.servers import VllmServer, make_model
from tests.real_vllm.sessions import sessions
from tests.real_vllm.transparency import transparency, transparency_of
from tests.real_vllm.upstream import upstream

IN_POOL = ("reuse", "index", "client", "load", "kill", "started")
"""Checks of one pool in front of the same two servers."""

CHECKS = (
    *IN_POOL,
    "sessions",
    "apart",
    "hybrid",
    "embeddings",
    "exactness",
    "transparency",
    "continued",
    "clients",
    "upstream",
)
TIMEOUT_S = 10_800
"""Half an hour on an idle machine, and as much for upstream's tests; starting vLLM takes five minutes on a busy one."""


def main(arguments: Sequence[str]) -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.real_vllm", description=__doc__)
    parser.add_argument("checks", nargs="*", help=f"which of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--server", help="transparency: a vLLM server that runs already")
    parser.add_argument("--router", help="transparency: a router in front of --server")
    parser.add_argument("--vllm-source", type=Path, help="upstream: the source of the installed vLLM")
    parser.add_argument("--only", default="", help="cases, modules or suites whose name has this part")
    options = parser.parse_args(arguments)
    if unknown := set(options.checks) - set(CHECKS):
        parser.error(f"{', '.join(sorted(unknown))} is no check; there are {', '.join(CHECKS)}")
    if (options.server is None) != (options.router is None) or (options.server and options.checks != ["transparency"]):
        parser.error("--server and --router go together, with the check transparency alone")
    if "upstream" in options.checks and options.vllm_source is None:
        parser.error("upstream needs --vllm-source DIR, which has vLLM's folders tests and examples")
    console = Console(soft_wrap=True)
    if options.server is not None:
        running = partial(transparency_of, options.server, options.router, console, options.only)
        return 0 if _checked("transparency", running, console)["passed"] else 1
    names = options.checks or [name for name in CHECKS if name != "upstream" or options.vllm_source is not None]
    vllm = os.environ.get("POOLGRID_VLLM", "")
    if not vllm:
        console.print("skipped: POOLGRID_VLLM names no environment with vLLM; CONTRIBUTING.md says how to make one")
        return 0
    if not (Path(vllm) / "bin" / "vllm").exists():
        console.print(f"POOLGRID_VLLM is {vllm}, which has no bin/vllm")
        return 1
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGTERM, _told_to_end)
    signal.alarm(TIMEOUT_S)
    with tempfile.TemporaryDirectory(prefix="poolgrid-vllm-") as temporary:
        own = Given(options.vllm_source or Path(), options.only)
        measured = run(Path(vllm), names, Path(temporary), console, own)
    signal.alarm(0)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1))
    return 0 if all(each["passed"] for each in measured.values()) else 1


@dataclass(frozen=True, slots=True)
class Given:
    """Options of single checks."""

    source: Path = Path()
    only: str = ""


def run(vllm: Path, names: Sequence[str], directory: Path, console: Console, given: Given) -> dict[str, dict[str, Any]]:
    """Start the servers, run the checks in their order, end everything; return what was measured by check."""
    measured: dict[str, dict[str, Any]] = {}
    started = time.monotonic()
    model = directory / "model"
    model.mkdir()
    make_model(vllm, model)
    if of_pool := [name for name in IN_POOL if name in names]:
        servers = [VllmServer(number, vllm, model, directory) for number in range(2)]
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait()
            console.print(f"two vLLM servers run after {time.monotonic() - started:.0f} s")
            with Pool(servers, model, vllm) as pool:
                for name in of_pool:
                    peers = (os.environ.get("POOLGRID_PEERS", ""),) if name == "load" else ()
                    measured[name] = _checked(name, partial(getattr(checks, name), pool, *peers), console)
        finally:
            for server in servers:
                server.kill()
    own_servers: dict[str, partial[dict[str, Any]]] = {
        "sessions": partial(sessions, vllm, model, directory),
        "apart": partial(apart, vllm, model, directory),
        "hybrid": partial(hybrid, vllm, directory),
        "embeddings": partial(embeddings, vllm, model, directory),
        "exactness": partial(exactness, vllm, model, directory),
        "transparency": partial(transparency, vllm, model, directory, console, given.only),
        "continued": partial(continued, vllm, model, directory),
        "clients": partial(clients, vllm, directory, console, given.only),
        "upstream": partial(upstream, vllm, model, directory, given.source, given.only, console),
    }
    for name, check in own_servers.items():
        if name in names:
            measured[name] = _checked(name, check, console)
    return measured


def _checked(name: str, check: partial[dict[str, Any]], console: Console) -> dict[str, Any]:
    began = time.monotonic()
    try:
        found, passed = check(), True
    except NoNixl as reason:
        found, passed = {"skipped": str(reason)}, True
    except Exception:
        found, passed = {"failed": traceback.format_exc()}, False
    seconds = round(time.monotonic() - began, 1)
    came_to = "skipped" if "skipped" in found and len(found) == 1 else "passed" if passed else "FAILED"
    console.print(f"{came_to} {name} ({seconds} s): {check.func.__doc__}")
    for key, value in found.items():
        console.print(f"    {key}: {value}", markup=False)
    return {"passed": passed, "seconds": seconds, **found}


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the whole run took longer than {TIMEOUT_S} s")


def _told_to_end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # ends what was started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
