"""Large blocks are returned when they are freed, in a process of their own: the setting is for its whole life."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from runtime.allocation import return_large_blocks

PROGRAM = """
import sys
from pathlib import Path
from runtime.allocation import return_large_blocks

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

if sys.argv[1] == "told":
    assert return_large_blocks()
before = resident_mb()
body = b"x" * 30_000_000
del body
for _ in range(3):
    body = b"x" * 20_000_000
    kept = [b"y" * 1000 for _ in range(1000)]  # lies behind it
    del body
sys.stdout.write(str(resident_mb() - before))
"""


def grown_mb(how: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not keep large blocks")
def test_a_large_body_is_returned_although_something_small_came_after_it() -> None:
    assert grown_mb("told") < 10
    assert grown_mb("untold") > 15, "or this test could not tell"


def test_what_the_operator_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")

    assert not return_large_blocks()
