"""Try client frameworks as their users have them, unmodified, against a fresh pool of simulated workers.

    python -m tests.clients                     all of them
    python -m tests.clients openai_agents       some, by the name of their suite
    python -m tests.clients --list

The clients live in environments of their own below ``.venv-clients``, each made from a file beside this one when it is
missing or that file has changed: ``requirements.txt`` for Python, ``requirements-SUITE.txt`` for a suite that cannot
share it, ``npm/package.json`` for Node. Suites are ``suites/NAME.py`` and ``npm/NAME.mjs``. They talk to loopback only:
a proxy that does not exist stands before all else.
The exit status is 0 when every check passed, 1 when one failed, 2 when it could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.e2e.processes import Process, running_pool

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements.txt"
NPM = HERE / "npm"
RUNNERS = {".py": HERE / "suites" / "run.py", ".mjs": NPM / "run.mjs"}
SUITES = {
    path.stem: path
    for path in sorted([*(HERE / "suites").glob("*.py"), *NPM.glob("*.mjs")], key=lambda path: path.stem)
    if path not in RUNNERS.values()
}
ENVIRONMENTS = ROOT / ".venv-clients"
NPM_ENVIRONMENT = ENVIRONMENTS / "npm"

SUITE_TIMEOUT_S = 600
"""Longest run of one suite; each takes some seconds on an idle machine."""

NOWHERE = "http://127.0.0.1:9"
"""Nobody listens on the port of the discard protocol."""

SETTINGS = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), NOWHERE),
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "CLIENTS_NPM": str(NPM_ENVIRONMENT),
    "POOLGRID_PYTHON": sys.executable,
    # These would ask elsewhere, and wait for it.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "ANONYMIZED_TELEMETRY": "False",
}

NONE: Mapping[str, str] = {}

Row = dict[str, Any]


def is_made_from(environment: Path, pins: Path) -> bool:
    """Return whether an environment was made from these pins, of which it keeps a copy."""
    made_from = environment / pins.name
    return made_from.exists() and made_from.read_bytes() == pins.read_bytes()


def python_of(suite: str) -> str:
    """Return the interpreter that has the clients of a Python suite; its environment is made if it has to be."""
    own = HERE / f"requirements-{suite}.txt"
    pins = own if own.exists() else REQUIREMENTS
    environment = ENVIRONMENTS / pins.stem
    interpreter = str(environment / "bin" / "python")
    if not is_made_from(environment, pins):
        venv.create(environment, with_pip=True, clear=True)
        # pip needs more than half an hour to resolve these pins, uv some seconds.
        pip = [interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check", "uv"]
        subprocess.run(pip, check=True)
        uv = [str(environment / "bin" / "uv"), "pip", "install", "-q", "--python", str(environment), "-r", str(pins)]
        subprocess.run(uv, check=True)
        shutil.copy(pins, environment)
    return interpreter


def make_npm_environment() -> None:
    """Install the npm packages if that has to be done, without their scripts, and copy the suites beside them.

    Node looks for a package beside the file that imports it.
    """
    if not is_made_from(NPM_ENVIRONMENT, NPM / "package.json"):
        shutil.rmtree(NPM_ENVIRONMENT, ignore_errors=True)
        with tempfile.TemporaryDirectory() as directory:
            shutil.copy(NPM / "package.json", directory)
            install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
            subprocess.run(install, check=True, cwd=directory, stdout=subprocess.DEVNULL)
            shutil.copytree(directory, NPM_ENVIRONMENT, symlinks=True)
    for path in NPM.glob("*.mjs"):
        shutil.copy(path, NPM_ENVIRONMENT)


def command_of(suite: str) -> list[str]:
    """Return the command that runs a suite, without the pool's URL; what it needs is installed."""
    path = SUITES[suite]
    if path.suffix == ".mjs":
        make_npm_environment()
        return ["node", str(NPM_ENVIRONMENT / "run.mjs"), suite]
    if "NPM_PACKAGE" in path.read_text():
        make_npm_environment()
    return [python_of(suite), str(RUNNERS[".py"]), suite]


def rows_of(suite: str, command: Sequence[str], url: str, variables: Mapping[str, str] = NONE) -> Iterator[Row]:
    """Run a suite and yield what became of each check; ``variables`` are of its environment besides."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    failed = {"suite": suite, "version": "", "check": "the suite", "passed": False, "seconds": 0.0}
    try:
        done = subprocess.run(
            [*command, url],
            env={**kept, **SETTINGS, **variables},
            capture_output=True,
            text=True,
            timeout=SUITE_TIMEOUT_S,
            check=False,
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
        commands = {suite: command_of(suite) for suite in options.suites or SUITES}
    except (OSError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"the clients' environments in {ENVIRONMENTS} cannot be made: {error}\n")
        return 2
    if options.url is not None:
        rows = [row for suite, command in commands.items() for row in rows_of(suite, command, options.url)]
    else:
        pool: Process
        with running_pool(workers=2) as pool:
            rows = [row for suite, command in commands.items() for row in rows_of(suite, command, pool.url)]
    show(rows)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
