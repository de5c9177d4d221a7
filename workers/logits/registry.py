"""The logits processors of a worker by name: those of poolgrid, and those that its operator adds.

A client can only choose among registered names: what runs is the operator's decision, made at the start.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from poolgrid.wire.limits import LOGITS_PROCESSORS_MAX
from poolgrid.wire.requests import LogitsProcessorCall
from poolgrid.workers.core.refusal import UnsupportedError
from poolgrid.workers.logits.forced_prefix import forced_prefix
from poolgrid.workers.logits.processor import LogitsProcessor, LogitsProcessorFactory, RequestFacts
from poolgrid.workers.logits.token_sets import allowed_tokens, banned_tokens

BUILT_IN: Mapping[str, LogitsProcessorFactory] = {
    "allowed_tokens": allowed_tokens,
    "banned_tokens": banned_tokens,
    "forced_prefix": forced_prefix,
}

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


class RegistrationError(ValueError):
    """A processor cannot be registered; the message says which and why."""


class LogitsProcessorRegistry:
    """Processors by name, fixed when the worker starts."""

    def __init__(self, factories: Mapping[str, LogitsProcessorFactory] = BUILT_IN) -> None:
        self._factories = dict(factories)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use, sorted."""
        return tuple(sorted(self._factories))

    @classmethod
    def from_settings(cls, registrations: Iterable[str]) -> LogitsProcessorRegistry:
        """Return the built-in processors and those of ``NAME=package.module:factory`` words.

        The named modules are imported: this is the operator's code. Raises ``RegistrationError``.
        """
        factories = dict(BUILT_IN)
        for word in registrations:
            name, _, target = word.partition("=")
            module_name, _, attribute = target.partition(":")
            if not _NAME.fullmatch(name) or not module_name or not attribute.isidentifier():
                raise RegistrationError(
                    f"logits_processors has {word!r}, allowed is NAME=package.module:factory with a name of lower-case "
                    "letters, digits, - and _; the worker does not start"
                )
            if name in factories:
                raise RegistrationError(f"logits_processors names {name!r} twice (built in are {', '.join(BUILT_IN)})")
            try:
                factory = getattr(importlib.import_module(module_name), attribute)
            except (ImportError, AttributeError) as error:
                raise RegistrationError(
                    f"logits processor {name!r} cannot be loaded from {target!r}: {error}; the worker does not start"
                ) from error
            if not callable(factory):
                raise RegistrationError(f"logits processor {name!r}: {target!r} is not callable")
            factories[name] = factory
        return cls(factories)

    def make(self, calls: Sequence[LogitsProcessorCall], facts: RequestFacts) -> list[LogitsProcessor]:
        """Return the processors that a request asks for, in its order; raises ``RefusedError``."""
        if len(calls) > LOGITS_PROCESSORS_MAX:
            raise UnsupportedError(f"logits_processors has {len(calls)} entries, allowed are {LOGITS_PROCESSORS_MAX}")
        processors: list[LogitsProcessor] = []
        for index, call in enumerate(calls):
            factory = self._factories.get(call.name)
            if factory is None:
                raise UnsupportedError(
                    f"logits_processors[{index}].name is {call.name!r}, this worker has {', '.join(self.names)}"
                )
            try:
                arguments: dict[str, Any] = (
                    msgspec.json.decode(call.arguments, type=dict[str, Any]) if call.arguments else {}
                )
                processors.append(factory(arguments, facts))
            except Exception as error:  # a processor of the operator's must not end the worker
                raise UnsupportedError(
                    f"logits_processors[{index}] ({call.name}): {error}; the request was not run"
                ) from error
        return processors
