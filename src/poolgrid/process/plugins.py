"""Folders of the package that an installation may lack: looked up when they are used, and refused by name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from poolgrid.process.option_error import OptionError


def is_installed(module: str) -> bool:
    """Return whether a module is there; nothing of it is run but the packages that it is in."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def plugin(module: str, what: str) -> ModuleType:
    """Return a module; raises ``OptionError`` that begins with ``what`` (an option and its value) when it is absent."""
    if not is_installed(module):
        raise OptionError(f"{what}: not installed (there is no {module})")
    return import_module(module)
