"""The shim in the C library's place delays writes below one directory, when it is told, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.attacks import slow_disk

WRITER = "import os, sys; f = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); os.write(f, b'a'); os.fdatasync(f)"


@pytest.fixture
def shim(tmp_path: Path) -> dict[str, str]:
    reason = slow_disk.missing()
    if reason:
        pytest.skip(reason)
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    return slow_disk.environment(tmp_path)


def write(path: Path, shim: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", WRITER, str(path)], env={**os.environ, **shim}, check=True, timeout=60)
    assert path.read_bytes() == b"a", "it was written all the same"


def test_every_write_below_the_directory_is_delayed_and_no_other(tmp_path: Path, shim: dict[str, str]) -> None:
    slow_disk.say(tmp_path, "all 1")

    write(tmp_path / "data" / "journal", shim)
    assert slow_disk.delayed(tmp_path) == 2, "the write and the sync"
    write(tmp_path / "elsewhere" / "journal", shim)
    assert slow_disk.delayed(tmp_path) == 2


def test_one_write_is_delayed_once(tmp_path: Path, shim: dict[str, str]) -> None:
    (tmp_path / "data" / "decisions").mkdir()
    slow_disk.say(tmp_path, "once 1")

    write(tmp_path / "data" / "decisions" / "journal", shim)
    assert slow_disk.delayed(tmp_path) == 0, "only the event journal's"
    for name in ("one", "two"):
        write(tmp_path / "data" / name, shim)
    assert slow_disk.delayed(tmp_path) == 1


def test_without_a_word_nothing_is_delayed(tmp_path: Path, shim: dict[str, str]) -> None:
    write(tmp_path / "data" / "journal", shim)

    assert slow_disk.delayed(tmp_path) == 0


def test_syncs_fail_when_told_to_and_writes_do_not(tmp_path: Path, shim: dict[str, str]) -> None:
    slow_disk.say(tmp_path, "fail 1")
    path = tmp_path / "data" / "journal"
    command = [sys.executable, "-c", WRITER, str(path)]

    ended = subprocess.run(command, env={**os.environ, **shim}, capture_output=True, text=True, timeout=60, check=False)

    assert "Input/output error" in ended.stderr
    assert path.read_bytes() == b"a"
    assert slow_disk.delayed(tmp_path) == 1, "the sync alone"
