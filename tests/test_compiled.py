"""Processes that tests start find compiled what they import: hundreds of them would compile it all, each for itself."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import os, sys
import poolgrid.cli.main as module
print(sys.dont_write_bytecode, os.path.exists(module.__cached__))
"""


def test_what_a_process_imports_is_compiled_for_the_next_one() -> None:
    told = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True).stdout

    assert told.split() == ["False", "True"]
