"""Run the checks of one suite in the environment of the clients, and print a line of JSON for each.

    python run.py SUITE URL

A suite is a module beside this one with the name of what it tries (``PACKAGE``, or ``NPM_PACKAGE`` for a command of
npm that the suite starts) and functions ``check_...``, each of which gets the pool's URL and raises when a client saw
what it should not. Nothing here imports poolgrid: the environment has the clients and nothing of ours.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType

ERROR_CHARS_MAX = 600


def run(name: str, url: str) -> None:
    """Run every check, in the order of the module."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        suite = importlib.import_module(name)
        package, version = _package(suite)
    except Exception as error:
        _tell(suite=name, version="", check="import", passed=False, seconds=0.0, error=_words(error))
        return
    for check in [value for key, value in vars(suite).items() if key.startswith("check_")]:
        began = time.monotonic()
        error = ""
        try:
            outcome = check(url)
            if inspect.isawaitable(outcome):
                asyncio.run(_wait(outcome))
        except Exception as raised:
            error = _words(raised)
        seconds = round(time.monotonic() - began, 2)
        words = check.__name__.removeprefix("check_").replace("_", " ")
        _tell(suite=package, version=version, check=words, passed=not error, seconds=seconds, error=error)


def _package(suite: ModuleType) -> tuple[str, str]:
    """Return the name and the version of the package that a suite tries."""
    name: str | None = getattr(suite, "NPM_PACKAGE", None)
    if name is None:
        return suite.PACKAGE, metadata.version(suite.PACKAGE)
    manifest = Path(os.environ["CLIENTS_NPM"]) / "node_modules" / name / "package.json"
    return name, json.loads(manifest.read_text())["version"]


async def _wait(outcome: object) -> None:
    await outcome  # type: ignore[misc]


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]


def _tell(**row: object) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
