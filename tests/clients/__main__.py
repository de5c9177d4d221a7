"""Try client frameworks as their users have them, unmodified, against a fresh pool of simulated workers.

    python -m tests.clients                     all of them
    python -m tests.clients openai_agents       some, by the name of their suite
    python -m tests.clients --list

The clients live in an environment of their own (``.venv-clients``), made from ``requirements.txt`` beside this file
when it is missing or that file has changed. They talk to loopback only: a proxy that does not exist stands before all
else.
The exit status is 0 when every check passed, 1 when one failed, 2 when it could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.e2e.processes import Process, running_pool

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements.txt"
SUITES = sorted(path.stem for path in (HERE / "suites").glob("*.py") if path.stem != "run")
ENVIRONMENT = ROOT / ".venv-clients"
MADE_FROM = ENVIRONMENT / "requirements.txt"
"""A copy of what the environment was made from."""

SUITE_TIMEOUT_S = 600
"""Longest run of one suite; each takes some seconds on an idle machine."""

NOWHERE = "http://127.0.0.1:9"
"""Nobody listens on the port of the discard protocol."""

SETTINGS = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), NOWHERE),
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    # These would ask elsewhere, and wait for it.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "ANONYMIZED_TELEMETRY": "False",
}

Row = dict[str, Any]


def environment() -> Path:
    """Return the interpreter of the clients' environment, which is made if it has to be."""
    interpreter = ENVIRONMENT / "bin" / "python"
    if interpreter.exists() and MADE_FROM.exists() and MADE_FROM.read_bytes() == REQUIREMENTS.read_bytes():
        return interpreter
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    install = [str(interpreter), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    subprocess.run(install, check=True)
    MADE_FROM.write_bytes(REQUIREMENTS.read_bytes())
    return interpreter


def rows_of(interpreter: Path, suite: str, url: str) -> Iterator[Row]:
    """Run a suite and yield what became of each check."""
    command = [str(interpreter), str(HERE / "suites" / "run.py"), suite, url]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    failed = {"suite": suite, "version": "", "check": "the suite", "passed": False, "seconds": 0.0}
    try:
        done = subprocess.run(
            command, env={**kept, **SETTINGS}, capture_output=True, text=True, timeout=SUITE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield {**failed, "error": f"took more than {SUITE_TIMEOUT_S} s"}
        return
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"suite"')]
    yield from rows
    if done.returncode or not rows:
        yield {**failed, "error": done.stderr[-600:]}


def show(rows: Sequence[Row]) -> None:
    """Print a table of the clients, and under it what failed."""
    table = Table()
    for heading in ("client", "version", "passed", "failed", "seconds"):
        table.add_column(heading, justify="left" if heading in ("client", "version") else "right")
    for client, version in dict.fromkeys((row["suite"], row["version"]) for row in rows):
        own = [row for row in rows if (row["suite"], row["version"]) == (client, version)]
        passed = sum(row["passed"] for row in own)
        seconds = f"{sum(row['seconds'] for row in own):.1f}"
        table.add_row(client, version, str(passed), str(len(own) - passed), seconds)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for row in rows:
        if not row["passed"]:
            console.print(f"FAILED {row['suite']}: {row['check']}: {row['error']}")
    passed = sum(row["passed"] for row in rows)
    console.print(f"{passed} of {len(rows)} checks passed")


def main(arguments: Sequence[str]) -> int:
    """Run the suites that are named, or all; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description="Client frameworks against a pool.")
    parser.add_argument("suites", nargs="*", help="suites to run, all without any")
    parser.add_argument("--list", action="store_true", help="print the names of the suites")
    parser.add_argument("--url", help="a server that runs already, in place of a fresh pool")
    options = parser.parse_args(arguments)
    if options.list:
        sys.stdout.write("\n".join(SUITES) + "\n")
        return 0
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown:
        sys.stderr.write(f"there is no suite {unknown[0]!r}, allowed are {', '.join(SUITES)}\n")
        return 2
    try:
        interpreter = environment()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"the clients' environment {ENVIRONMENT} cannot be made: {error}\n")
        return 2
    chosen = options.suites or SUITES
    if options.url is not None:
        rows = [row for suite in chosen for row in rows_of(interpreter, suite, options.url)]
    else:
        pool: Process
        with running_pool(workers=2) as pool:
            rows = [row for suite in chosen for row in rows_of(interpreter, suite, pool.url)]
    show(rows)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
