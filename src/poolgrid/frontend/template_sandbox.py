"""Where chat templates run: Jinja's immutable sandbox, with bounds on steps and time.

A template comes with a model and is as trusted as its weights; the messages come from any client. So what may not hang
is a template that was written in good faith, whatever it is given: turns of its loops and its calls are counted, and
the clock is read between them. A thread cannot be stopped from outside, so a single operation is not interrupted; over
the texts of a body, which is bounded, one takes milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEPS_MAX = 2_000_000
"""Turns of loops and calls of one rendering: a conversation of 10,000 messages takes some 100,000."""

STEPS_PER_LOOK = 8
"""The clock is read once in so many steps, and the turns of a loop are counted as often: one that is left early has up
to as many that are not."""


class TimeOver(SecurityError):
    """The time of a rendering is over."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment whose renderings are bounded; each thread renders one template at a time."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, **options: Any) -> None:
        # Not optimized: loops over constants would be counted while compiling.
        super().__init__(optimized=False, **options)
        self._monotonic = monotonic
        self._local = threading.local()
        self.filters["_turns"] = self._turns

    def begin(self, limit_s: float) -> None:
        self._local.steps = 0
        self._local.deadline_s = self._monotonic() + limit_s

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error that is handled as it is.

        Jinja would show lines of the template in its traceback, which is not shown here, by frames in a circle with the
        error: whatever the template had made would wait for the collector.
        """
        raise  # noqa: PLE0704 - Jinja calls this where it handles an error

    def call(
        self,
        context: Context,
        function: Any,
        *args: Any,
        _loop_vars: Mapping[str, Any] | None = None,
        _block_vars: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function, macro or method from a template.

        Jinja adds the variables of a loop or block to each call inside it, for functions that take the context. No
        template has one of these.
        """
        self._count(1)
        return super().call(context, function, *args, **kwargs)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_turns", [], [], None, None, lineno=loop.lineno, environment=self)
        return super()._generate(source, name, filename, defer_init)

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        turns = 0
        for turns, item in enumerate(items, 1):
            yield item
            if not turns % STEPS_PER_LOOK:
                self._count(STEPS_PER_LOOK)
        self._count(turns % STEPS_PER_LOOK)

    def _count(self, steps: int) -> None:
        """Count steps that were made."""
        spent = self._local
        before, spent.steps = spent.steps, spent.steps + steps
        if spent.steps > STEPS_MAX:
            raise SecurityError(f"more than {STEPS_MAX} steps, the limit")
        if before // STEPS_PER_LOOK < spent.steps // STEPS_PER_LOOK and self._monotonic() > spent.deadline_s:
            raise TimeOver("it takes too long: the time limit is over")
