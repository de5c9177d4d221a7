"""What a page tells its reader to type, and what it promises to be shown: read from its Markdown, run, compared.

A comment before a block of code says what the block is (readers of the page do not see it):

- ``<!-- terminal: NAME -->`` the command stays, in a terminal of its own, until all pages are through; one that is
  there already, by its name, is left as it is. The README's ``<!-- run-command -->`` is the terminal ``pool``, without
  the installation before it
- ``<!-- run -->`` the commands, or the Python, run to their end
- ``<!-- shows -->`` what the command before shows: these lines, in this order; ``…`` stands for anything within a line,
  a line of nothing else for any lines
- ``<!-- not run: REASON -->`` no test runs the command, for that reason

Every block of commands on these pages has such a comment: ``unmarked`` names one that lacks it.

Ports are the only thing that is not as printed, so that tests do not get into each other's way: each port of the page
becomes a free one, in commands and in what is shown, and commands that name none find it in ``POOLGRID_PORT`` and
``POOLGRID_URL``. Commands run in an empty directory that has ``.venv/bin`` and what the repository has to offer.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OFFERED = ("pool_configs", "engine_configs", "launch", "tests", "src", "lab")
"""What commands on pages name, of the repository."""

RUN_TIMEOUT_S = 240.0
SHOWN_TIMEOUT_S = 180.0
"""Until a terminal shows what it is said to; machines that test are busy."""

_BLOCK = re.compile(
    r"<!-- (terminal: (?P<name>[\w-]+)|run-command|run|shows) -->\n\n?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d{4}|(?<=tcp://\*:)\d{4}|(?<=-port )\d{4}")
_COMMANDS = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n\n?)?^```(?:sh|bash|console)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARKS = re.compile(r"terminal: [\w-]+|run-command|test-command|bench|run|not run: .{10,}")


class Block(NamedTuple):
    """One block of a page."""

    kind: str
    """``terminal``, ``run`` or ``shows``."""
    name: str
    text: str
    language: str = "sh"


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page that are run or shown."""
    found = []
    for match in _BLOCK.finditer(page):
        kind, name, text = match[1].partition(":")[0], match["name"] or "", match["text"].rstrip("\n")
        if kind == "run-command":
            kind, name, text = "terminal", "pool", text.rpartition(" && ")[2]
        found.append(Block(kind, name, text, match["language"]))
    return found


def unmarked(page: str) -> list[str]:
    """Return the first line of each block of commands that no comment marks as run, or as not run with a reason."""
    found = _COMMANDS.finditer(page)
    return [each["text"].split("\n")[0] for each in found if not _MARKS.fullmatch(each["mark"] or "")]


def missing_line(promised: str, shown: str) -> str | None:
    """Return the first promised line that is not shown after those before it; ``None`` when all are."""
    rest = [_squeezed(line) for line in shown.splitlines()]
    for line in promised.splitlines():
        if line.strip() in ("", "…"):
            continue
        pattern = re.compile(".*".join(re.escape(_squeezed(part)) for part in line.split("…")))
        found = next((number for number, each in enumerate(rest) if pattern.search(each)), None)
        if found is None:
            return line
        del rest[: found + 1]
    return None


def _squeezed(line: str) -> str:
    """A line as it reads: without colours, and with single spaces."""
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", line).split())


class Terminal:
    """A command that stays."""

    def __init__(self, command: str, directory: Path, environment: dict[str, str]) -> None:
        self.command = command
        self.shown = ""
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_for(self, promised: str) -> str | None:
        """Wait until it shows what was promised; return the line that never came."""
        deadline = time.monotonic() + SHOWN_TIMEOUT_S
        assert self._process.stdout is not None
        while (missing := missing_line(promised, self.shown)) is not None and time.monotonic() < deadline:
            readable, _, _ = select.select([self._process.stdout], [], [], 0.5)
            if readable:
                part = os.read(self._process.stdout.fileno(), 65_536)
                if not part:
                    break
                self.shown += part.decode()
        return missing

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        """Wait until it has ended, and end it by force when it does not."""
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=90)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Transcript:
    """One reader at the machine: its directory, its terminals, its ports."""

    def __init__(
        self, directory: Path, programs: Mapping[str, str] | None = None, read: Mapping[str, str] | None = None
    ):
        """``programs`` are stand-ins for what is not installed, by name; ``read`` says what else to put for a text."""
        self.directory = directory
        self._read = read or {}
        self._programs = directory / "programs"
        self._programs.mkdir()
        for name, command in (programs or {}).items():
            (self._programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (self._programs / name).chmod(0o755)
        self.terminals: dict[str, Terminal] = {}
        self._ports: dict[str, str] = {}
        (directory / ".venv").mkdir()
        (directory / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        for name in OFFERED:
            (directory / name).symlink_to(ROOT / name)

    def follow(self, page: str) -> Iterator[str]:
        """Do all that a page says; yield what it promised and did not show."""
        terminal: Terminal | None = None
        command, shown = "", ""
        for block in blocks(page):
            text = self._with_ports(block.text)
            for printed, real in self._read.items():
                text = text.replace(printed, real)
            match block.kind:
                case "terminal":
                    if block.name not in self.terminals:
                        self.terminals[block.name] = Terminal(text, self.directory, self._environment())
                    command, terminal = text, self.terminals[block.name]
                case "run":
                    command, terminal, shown = text, None, self._run(text, block.language)
                case _:
                    missing = self._missing(text, command, shown) if terminal is None else terminal.wait_for(text)
                    if missing is not None:
                        shown = shown if terminal is None else terminal.shown
                        yield f"{missing!r} is not shown by\n{command}\nwhich shows\n{shown}"

    def _missing(self, promised: str, command: str, shown: str) -> str | None:
        """Return a promised line that is not shown; ``explain``, whose outcome comes after the answer, is run again."""
        missing = missing_line(promised, shown)
        *_, last = command.strip().splitlines()
        until = time.monotonic() + SHOWN_TIMEOUT_S
        while missing is not None and last.startswith("poolgrid explain") and time.monotonic() < until:
            missing = missing_line(promised, shown + self._run(last, "sh"))
        return missing

    def close(self) -> None:
        """End what is still there, the last first."""
        for terminal in reversed(self.terminals.values()):
            terminal.interrupt()
        for terminal in self.terminals.values():
            terminal.close()

    def _run(self, commands: str, language: str) -> str:
        program = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
        done = subprocess.run(
            [*program, commands],
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\nends with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("POOLGRID_")}
        port = self._free("8000")
        return {
            **mine,
            "PATH": f"{self._programs}:{Path(sys.executable).parent}:{mine['PATH']}",
            "POOLGRID_PORT": port,
            "POOLGRID_URL": f"http://127.0.0.1:{port}",
            "NO_PROXY": "127.0.0.1",
            "COLUMNS": "80",
        }

    def _with_ports(self, text: str) -> str:
        return _PORT.sub(lambda match: self._free(match[0]), text)

    def _free(self, printed: str) -> str:
        """Return the port that stands for a printed one."""
        if printed not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[printed] = str(probe.getsockname()[1])
        return self._ports[printed]
