"""Work that is counted, not timed: lines of code that a call takes, each turn of a loop included."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any


class CountedLines:
    """The most lines of some modules that one call took, by the name of the call."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self.most: dict[str, int] = {}
        self._files = {module.__file__ for module in modules}
        self._lines = 0

    def count(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call and count its lines."""
        self._lines = 0
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            result = call(*arguments)
        finally:
            sys.settrace(before)
        name = call.__name__
        self.most[name] = max(self.most.get(name, 0), self._lines)
        return result

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self._lines += 1
        return self._line
