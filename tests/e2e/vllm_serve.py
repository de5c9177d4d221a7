"""``vllm serve MODEL …`` for pages that are followed: the stand-in server, which names its model's directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    arguments = ["-m", "tests.fakes.engine_server.process", *sys.argv[2:], "--keeps-root"]
    os.chdir(root)
    os.execv(sys.executable, [sys.executable, *arguments])
