"""What a client asks for besides the answer: latency targets, priority, expected output length.

Read from ``nvext.router.{ttft_target, itl_target}`` (milliseconds) and ``nvext.agent_hints.{priority, osl}``, the
field's extension, and from the headers ``x-ttft-target-ms`` and ``x-itl-target-ms``: one of each for every axis that is
a target (``document.axis``). The body wins over a header. 0
is a valid target. ``null`` never asks for anything. Keys that are not named here are ignored, as everywhere in a
request. A value that cannot be used is the client's error, with the field's name, and never ours.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from poolgrid.kernel.pool_grids.axis import TARGETS, AxisName
from poolgrid.kernel.pool_grids.grid_document import (
    PRIORITY_MAX,
    PRIORITY_MIN,
    TOKENS_MAX,
    OutputLengthSettings,
    value_text,
)

PRIORITY_FIELD = "nvext.agent_hints.priority"
OSL_FIELD = "nvext.agent_hints.osl"
HEADER_CHARS_MAX = 64
"""A number of milliseconds is shorter."""


class HintError(ValueError):
    """A hint of a client cannot be used; ``field`` names it (a body's path or a header), nothing was done."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        super().__init__(f"{field} is {value_text(value)}, must be {allowed}")


@dataclass(frozen=True, slots=True)
class Target:
    """A latency target in milliseconds and where it came from."""

    value_ms: float
    source: str


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What a client asked for; ``None`` where it did not."""

    targets: Mapping[AxisName, Target] = field(default_factory=dict)
    """By axis."""
    priority: int | None = None
    osl: int | None = None
    """Expected output length in tokens."""


NO_HINTS = RequestHints()
_TARGET_FORM = "a finite number of milliseconds, 0 or more"


def read_hints(nvext: Any, headers: Mapping[str, str] | None = None) -> RequestHints:
    """Return the hints of a request's ``nvext`` and headers (names in lower case); raise ``HintError``."""
    extension = _section(nvext, "nvext")
    router = _section(extension.get("router"), "nvext.router")
    agent = _section(extension.get("agent_hints"), "nvext.agent_hints")
    given = headers or {}
    targets: dict[AxisName, Target] = {}
    for kind in TARGETS:
        value = router.get(f"{kind.name}_target")
        target = _target(value, kind.hint_field, given.get(kind.hint_header), kind.hint_header)
        if target is not None:
            targets[kind.name] = target
    return RequestHints(
        targets,
        _integer(agent.get("priority"), PRIORITY_FIELD, PRIORITY_MIN, PRIORITY_MAX),
        _integer(agent.get("osl"), OSL_FIELD, 0, TOKENS_MAX),
    )


def _section(value: Any, field: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise HintError(field, value, "an object")
    return value


def _target(value: Any, field: str, header_value: str | None, header: str) -> Target | None:
    from_header = None if header_value is None else _header_target(header_value, header)
    if value is None:
        return from_header
    return Target(read_target(value, field), field)


def read_target(value: Any, field: str) -> float:
    """Return a target from a JSON value; raise ``HintError`` for anything but a finite number from 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise HintError(field, value, _TARGET_FORM)
    try:
        number = float(value)
    except OverflowError:
        raise HintError(field, value, _TARGET_FORM) from None
    if not math.isfinite(number) or number < 0:
        raise HintError(field, value, _TARGET_FORM)
    return number


def _header_target(text: str, header: str) -> Target:
    try:
        number = float(text) if len(text) <= HEADER_CHARS_MAX else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or "_" in text:
        raise HintError(header, text, _TARGET_FORM)
    return Target(number, header)


def _integer(value: Any, field: str, low: int, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise HintError(field, value, f"an integer from {low} to {high}")
    return value


MODELS_MAX = 1024
"""Served models and adapters of a large fleet; a client that invents names cannot take more memory."""


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """Tokens that an answer is expected to have, and where the number came from."""

    tokens: int
    source: str


@dataclass(slots=True)
class _Mean:
    requests: int = 0
    tokens: float = 0.0


class OutputLengths:
    """How long an answer is expected to be: the client's word, else what traffic taught, else the document's default.

    Rules
        1. A request's own ``osl`` is used as it is, except that no answer is longer than the request's own limit.
        2. A model's length is the mean over its finished requests; after ``memory_requests`` of them the mean forgets:
           each new length has the weight ``1/memory_requests``. It is used from ``learn_after_requests`` on.
        3. At most ``MODELS_MAX`` models are remembered; the one that was seen longest ago is forgotten.
    """

    def __init__(self, settings: OutputLengthSettings, models_max: int = MODELS_MAX) -> None:
        self._settings = settings
        self._models_max = models_max
        self._means: OrderedDict[str, _Mean] = OrderedDict()

    def finished(self, model: str, output_tokens: int) -> None:
        """Learn from a request that ran to its end; cancelled and failed ones teach nothing and are left out."""
        if not self._settings.learn or output_tokens < 0:
            return
        mean = self._means.setdefault(model, _Mean())
        self._means.move_to_end(model)
        mean.requests += 1
        weight = 1.0 / min(mean.requests, self._settings.memory_requests)
        mean.tokens += weight * (min(output_tokens, TOKENS_MAX) - mean.tokens)
        while len(self._means) > self._models_max:
            self._means.popitem(last=False)

    def expected(self, model: str, osl: int | None = None, max_tokens: int | None = None) -> ExpectedOutput:
        """Return the expected length of an answer of ``model`` to a request with these hints; changes nothing."""
        mean = self._means.get(model)
        if osl is not None:
            made = ExpectedOutput(osl, "nvext.agent_hints.osl")
        elif mean is not None and mean.requests >= self._settings.learn_after_requests:
            made = ExpectedOutput(round(mean.tokens), f"mean of {model}")
        else:
            made = ExpectedOutput(self._settings.default_tokens, "default of the document")
        if max_tokens is not None and max_tokens < made.tokens:
            return ExpectedOutput(max(0, max_tokens), "the request's own limit")
        return made

    def __len__(self) -> int:
        return len(self._means)
