"""Stand-ins for packages that cannot be installed on a test machine.

With ``POOLGRID_TRTLLM_MODEL`` set nothing is installed: the tests marked ``trtllm`` then ask the real package. Else,
in a test's own process, ``install_tensorrt_llm()`` makes ``import tensorrt_llm`` find the fake, the same modules as
``tests.fakes.tensorrt_llm``. A process that a test starts finds it with ``FAKES_PATH`` in its ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

FAKES_PATH = Path(__file__).parent
"""Directory that makes ``import tensorrt_llm`` find the fake."""

_NAME = "tensorrt_llm"


def install_tensorrt_llm() -> None:
    """Let ``import tensorrt_llm`` and its submodules find the fake in this process; again is harmless."""
    if os.environ.get("POOLGRID_TRTLLM_MODEL") or _is_another_release():
        return  # the real one is asked for, or a test has installed another release for a while
    package = importlib.import_module("tests.fakes.tensorrt_llm")
    names = [package.__name__]
    names += [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in names:
        sys.modules[name.removeprefix("tests.fakes.")] = importlib.import_module(name)


@contextmanager
def tensorrt_llm_of(version: str) -> Iterator[ModuleType]:
    """Let ``import tensorrt_llm`` find the fake as another release (``1.1``, ``1.2.1``, ``1.3``) inside the block.

    Yields the package. Its modules are others than those of ``tests.fakes.tensorrt_llm``, its behaviour too.
    """
    modules = _modules_of(version)
    before = _taken_out()
    sys.modules.update(modules)
    try:
        yield modules[_NAME]
    finally:
        _taken_out()
        sys.modules.update(before)


@cache
def _modules_of(version: str) -> dict[str, ModuleType]:
    before = _taken_out()
    environment = os.environ.get("TRTLLM_FAKE")
    os.environ["TRTLLM_FAKE"] = json.dumps({"version": version})
    sys.path.insert(0, str(FAKES_PATH))
    try:
        package = importlib.import_module(_NAME)
        for each in pkgutil.walk_packages(package.__path__, f"{_NAME}."):
            importlib.import_module(each.name)
        return _taken_out()
    finally:
        sys.path.remove(str(FAKES_PATH))
        if environment is None:
            del os.environ["TRTLLM_FAKE"]
        else:
            os.environ["TRTLLM_FAKE"] = environment
        _taken_out()
        sys.modules.update(before)


def _taken_out() -> dict[str, ModuleType]:
    """Forget every module of the package; return them."""
    names = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    return {name: sys.modules.pop(name) for name in names}


def _is_another_release() -> bool:
    installed = sys.modules.get(_NAME)
    return installed is not None and installed is not sys.modules.get("tests.fakes.tensorrt_llm")
