"""Stand-ins for packages that cannot be installed on a test machine.

In a test's own process ``install_tensorrt_llm()`` makes ``import tensorrt_llm`` find the fake, the same modules as
``tests.fakes.tensorrt_llm``. A process that a test starts finds it with ``FAKES_PATH`` in its ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

FAKES_PATH = Path(__file__).parent
"""Directory that makes ``import tensorrt_llm`` find the fake."""


def install_tensorrt_llm() -> None:
    """Let ``import tensorrt_llm`` and its submodules find the fake in this process; again is harmless."""
    package = importlib.import_module("tests.fakes.tensorrt_llm")
    names = [package.__name__]
    names += [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in names:
        sys.modules[name.removeprefix("tests.fakes.")] = importlib.import_module(name)
