"""A fault of the configuration ends a process with status 2 and one line; systemd restarts it for any other status."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from poolgrid.cli.part import PartFailed
from poolgrid.cli.service_process import start_status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("--policy foo: unknown"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/no"), 2),
        (PermissionError(errno.EACCES, "Permission denied", "/data"), 2),
        (PartFailed("router ended with status 2 before it was ready", 2), 2),
        (PartFailed("router was not ready within 60 s"), 1),
        (OSError(errno.EADDRINUSE, "Address already in use"), 1),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), 1),
        (RuntimeError("the engine broke"), 1),
    ],
)
def test_only_what_a_restart_cannot_help_is_status_2(error: Exception, status: int) -> None:
    assert start_status(error) == status


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("router", "--policy", "foo"), "--policy foo: unknown, allowed are kv,"),
        (("router", "--model-path", "/absent"), "--model-path /absent: not a directory"),
        (("router", "--api-keys", "/absent"), "--api-keys /absent: no such file"),
        (("router", "--feed-endpoint", "tcp://127.0.0.1:1"), "--feed-endpoint and --query-endpoint go together"),
        (("global-router",), "--config: must be given"),
        (("up", "--policy", "foo"), "router ended with status 2 before it was ready"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_wrong_configuration_ends_the_process_with_status_2_and_its_reason_last(
    tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    command = [sys.executable, "-m", "poolgrid", *arguments, "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 2
    assert line in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
