"""The logits processors of a worker by name: those of poolgrid, and those that its operator adds.

A client can only choose among registered names: what runs is the operator's decision, made at the start.

How processors that run in the engine's process report their failures to the worker's process.

A Unix datagram socket that the worker owns: a processor carries only its path, so it can be pickled, and a report never
waits. Overflow policy: a report that does not fit into the socket's buffer is dropped; the next ones count again.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from poolgrid.kernel.wire.limits import LOGITS_PROCESSORS_MAX, U32_MAX
from poolgrid.kernel.wire.requests import LogitsProcessorCall
from poolgrid.kernel.worker_protocol.refusal import UnsupportedError


class LogitsRow(Protocol):
    """One row of logits as an engine has it (a torch tensor of one dimension): read and changed in place by index."""

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


class LogitsProcessor(Protocol):
    """Changes the logits of one request before each of its tokens is chosen.

    Made for each request, so it may keep state. It must be picklable: an engine may run in another process.
    """

    def __call__(self, token_ids: Sequence[int], logits: LogitsRow, /) -> None:
        """Change ``logits`` (one value per token id) in place; ``token_ids`` is the prompt and the output so far.

        May raise: the logits then stay as they were for this token, and the failure is counted.
        """
        ...


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a processor is told about its request when it is made."""

    isl: int
    """Prompt tokens."""
    vocabulary_size: int
    """Token ids are below this; 0 = not known."""


LogitsProcessorFactory = Callable[[Mapping[str, Any], RequestFacts], LogitsProcessor]
"""Makes a processor from a request's arguments; raises ``ValueError`` that names a wrong argument."""


TOKEN_LIST_MAX = 65_536
"""Token ids that one argument may list: half of a large vocabulary, well below the bound of the arguments' bytes."""


def no_others(arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ``ValueError`` for an argument that the processor does not have."""
    for name in arguments:
        if name not in known:
            raise ValueError(f"argument {name!r} is unknown, allowed are {', '.join(known)}")


def token_list(arguments: Mapping[str, Any], name: str, vocabulary_size: int) -> list[int]:
    """Return an argument that lists token ids, or raise ``ValueError``; a vocabulary size of 0 is not known."""
    value = arguments.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= TOKEN_LIST_MAX:
        raise ValueError(f"argument {name!r} is wrong, allowed is a list of 1 to {TOKEN_LIST_MAX} token ids")
    highest = (vocabulary_size or U32_MAX + 1) - 1
    for index, token_id in enumerate(value):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id <= highest:
            raise ValueError(f"{name}[{index}] is {token_id!r}, allowed are token ids from 0 to {highest}")
    return value


NEVER = float("-inf")


class BannedTokens:
    """None of these tokens is ever chosen."""

    def __init__(self, banned: Sequence[int]) -> None:
        self._banned = list(banned)

    def __call__(self, token_ids: Sequence[int], logits: LogitsRow) -> None:
        logits[self._banned] = NEVER


class AllowedTokens:
    """Only these tokens are ever chosen."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self._allowed = list(allowed)

    def __call__(self, token_ids: Sequence[int], logits: LogitsRow) -> None:
        kept = logits[self._allowed]
        logits[:] = NEVER
        logits[self._allowed] = kept


def banned_tokens(arguments: Mapping[str, Any], facts: RequestFacts) -> LogitsProcessor:
    """Make a processor from ``{"token_ids": [...]}``."""
    no_others(arguments, ("token_ids",))
    return BannedTokens(token_list(arguments, "token_ids", facts.vocabulary_size))


def allowed_tokens(arguments: Mapping[str, Any], facts: RequestFacts) -> LogitsProcessor:
    """Make a processor from ``{"token_ids": [...]}``."""
    no_others(arguments, ("token_ids",))
    return AllowedTokens(token_list(arguments, "token_ids", facts.vocabulary_size))


class ForcedPrefix:
    """The first output tokens are these; what follows is free."""

    def __init__(self, prefix: Sequence[int], isl: int) -> None:
        self._prefix = tuple(prefix)
        self._isl = isl

    def __call__(self, token_ids: Sequence[int], logits: LogitsRow) -> None:
        position = len(token_ids) - self._isl
        if 0 <= position < len(self._prefix):
            logits[:] = NEVER
            logits[self._prefix[position]] = 0.0


def forced_prefix(arguments: Mapping[str, Any], facts: RequestFacts) -> LogitsProcessor:
    """Make a processor from ``{"token_ids": [...]}``."""
    no_others(arguments, ("token_ids",))
    return ForcedPrefix(token_list(arguments, "token_ids", facts.vocabulary_size), facts.isl)


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


REPORT_BYTES_MAX = 128
"""A processor's name."""


class FailureReporter:
    """The sending end, in whatever process the processor runs."""

    def __init__(self, path: str) -> None:
        self._path = path

    def report(self, name: str) -> None:
        """Say that the processor of this name failed once; never raises and never waits."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(name.encode()[:REPORT_BYTES_MAX], self._path)
        except OSError:
            pass  # the worker is gone, or has a full buffer of such reports already


class FailureChannel:
    """The receiving end; made on a running event loop, closed by ``close``."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="poolgrid-"))
        path = self._directory / "failures"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)
        self.reporter = FailureReporter(str(path))

    def _receive(self) -> None:
        while True:
            try:
                name = self._socket.recv(REPORT_BYTES_MAX)
            except OSError:
                return
            self._on_failure(name.decode(errors="replace"))

    def close(self) -> None:
        """Stop receiving and remove the socket."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)
