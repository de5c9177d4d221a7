"""Tensors between workers by the real NIXL, over UCX on loopback; needs no GPU.

    python -m tests.nixl

NIXL's wheels (300 MB, without the torch that they ask for) are installed into ``build/nixl`` when they are missing
there. Then the tests of tensor transfers run with them, and the end-to-end tests of media with workers that hand
embeddings over by NIXL. The exit status is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "build" / "nixl"
PACKAGES = Path(sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT), "platbase": str(ENVIRONMENT)}))
REQUIREMENTS = ("nixl>=1.0", "nixl-cu12>=1.0")
TESTS = ("tests/workers/test_tensor_transfer.py", "tests/e2e/test_multimodal.py", "tests/e2e/test_trtllm.py")

LOOPBACK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
"""UCX would also use every other network that it finds."""


def main() -> int:
    """Install what is missing and run the tests; return pytest's exit status."""
    if not (PACKAGES / "nixl").is_dir():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", *REQUIREMENTS], check=True)
    environment = {
        **os.environ,
        **LOOPBACK,
        "PYTHONPATH": os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "POOLGRID_TRANSPORT_UNDER_TEST": "nixl",
    }
    command = [sys.executable, "-m", "pytest", "-q", *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
