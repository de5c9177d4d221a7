"""The pool grid document: which pools there are, and which one serves which request.

The models describe a document after reading: pools are referred to by name, every rule of ``checks`` holds.
``reader.load_document`` is the way in. Every problem of a document is found there, not here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from poolgrid.kernel.pool_grids.axis import Axis, Mode, StageName, axes_of
from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.strict_json import read_strictly

POOLS_MAX = 256
"""Pools of one stage."""
RESOLUTION_MAX = 1024
"""Cells along one axis."""
CELLS_MAX = 65_536
"""Cells of one grid: 256 × 256, beyond which no person can review the cells."""
OVERRIDES_MAX = 256
TOKENS_MAX = 2**31 - 1
"""Prompt and context lengths; the longest context of any served model is 2,000 times shorter."""
TARGET_MS_MAX = 86_400_000.0
"""A day: the largest latency that an axis may end with."""
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1
"""``nvext.agent_hints.priority`` is a signed 32-bit integer."""
COST_MAX = 1e12
NAME_CHARS_MAX = 100

Accepted = Literal["unreachable-pool", "overlapping-overrides", "slower-pool-for-faster-target"]
"""Rules that a document may break knowingly: what breaks them is then a warning."""

_REFERENCE_SCHEMA: dict[str, Any] = {
    "description": "A pool of the same stage: its name (canonical) or its index.",
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0, "maximum": POOLS_MAX - 1}],
}


def _nested_schema(dimensions: int) -> dict[str, Any]:
    """Return the schema of a mapping over so many axes."""
    schema = _REFERENCE_SCHEMA
    for _ in range(dimensions):
        schema = {"type": "array", "minItems": 1, "maxItems": RESOLUTION_MAX, "items": schema}
    return schema


_NAME = r"[A-Za-z0-9._:/@${}-]*"
PoolName = Annotated[
    str, Field(min_length=1, max_length=NAME_CHARS_MAX, pattern=rf"^{_NAME}[A-Za-z._:/@${{}}-]{_NAME}$")
]
"""Letters, digits and ``._:/@${}-``, not digits alone: those are indices."""
URL_FORM = re.compile(r"^(https?://[^\s/?#]+/?|dyn://[^\s/?#]+)$")
PoolUrl = Annotated[str, Field(pattern=URL_FORM.pattern, max_length=2048)]
PoolReference = Annotated[Any, WithJsonSchema(_REFERENCE_SCHEMA)]
"""A pool's name, once ``checks`` has put names in the place of indices."""
References = Annotated[
    tuple[Any, ...], WithJsonSchema({"type": "array", "maxItems": POOLS_MAX, "items": _REFERENCE_SCHEMA})
]
PoolRows = Annotated[Any, WithJsonSchema(_nested_schema(2))]
PoolLayers = Annotated[Any, WithJsonSchema({"anyOf": [_nested_schema(dimensions) for dimensions in (2, 3, 4)]})]
Tokens = Annotated[int, Field(ge=0, le=TOKENS_MAX)]
TargetMs = Annotated[float, Field(ge=0.0, le=TARGET_MS_MAX)]
DurationMs = Annotated[int, Field(ge=1, le=86_400_000)]
Resolution = Annotated[int, Field(ge=1, le=RESOLUTION_MAX)]
Priority = Annotated[int, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)]


class DocumentModel(BaseModel):
    """Immutable and strict: ``"1"``, ``1.0`` and ``true`` are no integers, an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PoolSimulation(DocumentModel):
    """How ``poolgrid up --pools FILE`` simulates a pool; a real deployment ignores it."""

    workers: int = Field(1, ge=1, le=256, description="Simulated workers of the pool.")
    speedup: float = Field(1.0, gt=0.0, le=1e6, description="Divides the simulated step times: how fast the pool is.")
    timing_table: str | None = Field(
        None, max_length=4096, description="JSON file of step times, relative to this document, instead of formulas."
    )
    block_size: int = Field(32, ge=1, le=4096, description="Tokens in a KV block; equal in all pools of a document.")
    total_kv_blocks: int = Field(16_384, ge=16, le=1_048_576, description="KV blocks of each worker.")
    max_batch_size: int = Field(256, ge=1, le=65_536, description="Requests that run at a time on a worker.")
    max_num_tokens: int = Field(8192, ge=1, le=1_048_576, description="Tokens in one engine step.")
    max_sequence_length: int = Field(131_072, ge=2, le=4_194_304, description="Prompt and output tokens of a request.")


class Pool(DocumentModel):
    """A set of workers behind one pool router."""

    name: PoolName = Field(description="Unique in the document; appears in headers, metrics and decision records.")
    url: PoolUrl | None = Field(
        None,
        description="Where the pool's router listens, or its name (dyn://NAMESPACE.router.select, where the global "
        "router has names); null = given at start, by pool name.",
    )
    priority: int | None = Field(
        None,
        ge=-1_000_000,
        le=1_000_000,
        description="Speed rank, lower is faster, equal is equally fast. All pools of a stage or none; without, "
        "the order in which they are listed.",
    )
    cost_per_hour: float | None = Field(None, ge=0.0, le=COST_MAX, description="What the whole pool costs per hour.")
    cost_per_million_tokens: float | None = Field(None, ge=0.0, le=COST_MAX, description="Instead of cost_per_hour.")
    description: str | None = Field(None, max_length=4096)
    simulate: PoolSimulation | None = None


class PriorityOverride(DocumentModel):
    """Requests with a priority in ``min_priority`` to ``max_priority`` (inclusive) go to ``target_pool``."""

    min_priority: Priority
    max_priority: Priority
    target_pool: PoolReference


class Fallback(DocumentModel):
    """Which pools are tried, and in what order, when the chosen one cannot be used."""

    rule: Literal["faster-then-slower", "faster-only", "none"] = Field(
        "faster-then-slower", description="Order for every pool that `order` does not name."
    )
    order: dict[str, References] = Field(
        default_factory=dict, max_length=POOLS_MAX, description="By pool, the pools tried instead, in this order."
    )


class GridStage(DocumentModel):
    """What the three kinds of stages have in common; a pool is named as in ``pools``."""

    name: ClassVar[StageName]
    pools: tuple[Pool, ...] = Field(min_length=1, max_length=POOLS_MAX)
    priority_overrides: tuple[PriorityOverride, ...] = Field(
        (), max_length=OVERRIDES_MAX, description="Looked at after the grid; the first match wins."
    )
    fallback: Fallback = Fallback()
    if TYPE_CHECKING:
        mapping: Any
        """The pools, nested as deep as there are axes."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        axes = []
        for kind in axes_of(self.name):
            low, high, resolution = (getattr(self, key) for key in kind.keys)
            if low is not None and high is not None and resolution is not None:
                axes.append(Axis(kind, low, high, resolution))
        return tuple(axes)

    def pool_at(self, cell: tuple[int, ...]) -> str:
        row: Any = self.mapping
        for index in cell:
            row = row[index]
        return str(row)

    def pool(self, name: str) -> Pool:
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def speed_ranks(self) -> dict[str, int]:
        """Return each pool's speed rank, lower is faster, in the order of the document."""
        return {pool.name: index if pool.priority is None else pool.priority for index, pool in enumerate(self.pools)}


class PrefillStage(GridStage):
    """Prefill pools by prompt length and TTFT target: ``mapping[isl][ttft]``."""

    name: ClassVar[StageName] = "prefill"
    isl_min: Tokens
    isl_max: Tokens
    isl_resolution: Resolution
    ttft_min_ms: TargetMs
    ttft_max_ms: TargetMs
    ttft_resolution: Resolution
    mapping: PoolRows = Field(description="isl_resolution rows of ttft_resolution pools.")


class DecodeStage(GridStage):
    """Decode pools by context length (prompt and expected output) and ITL target: ``mapping[context_length][itl]``."""

    name: ClassVar[StageName] = "decode"
    context_length_min: Tokens
    context_length_max: Tokens
    context_length_resolution: Resolution
    itl_min_ms: TargetMs
    itl_max_ms: TargetMs
    itl_resolution: Resolution
    mapping: PoolRows = Field(description="context_length_resolution rows of itl_resolution pools.")


class AggregatedStage(GridStage):
    """Pools that do both, by TTFT and ITL target: ``mapping[ttft][itl]``.

    With ``isl_*`` or ``context_length_*`` or both, ``mapping[isl][context_length][ttft][itl]``.
    """

    name: ClassVar[StageName] = "aggregated"
    isl_min: Tokens | None = None
    isl_max: Tokens | None = None
    isl_resolution: Resolution | None = None
    context_length_min: Tokens | None = None
    context_length_max: Tokens | None = None
    context_length_resolution: Resolution | None = None
    ttft_min_ms: TargetMs
    ttft_max_ms: TargetMs
    ttft_resolution: Resolution
    itl_min_ms: TargetMs
    itl_max_ms: TargetMs
    itl_resolution: Resolution
    mapping: PoolLayers = Field(
        description="ttft_resolution rows of itl_resolution pools; with isl_* or context_length_*, layers of them, and "
        "with both, isl_resolution groups of context_length_resolution layers."
    )


class TargetDefaults(DocumentModel):
    """Targets of requests that name none; without them, the middle of the grid's range."""

    ttft_target_ms: TargetMs | None = None
    itl_target_ms: TargetMs | None = None


class OutputLengthSettings(DocumentModel):
    """The output length that enters the context length of a request that names none (``nvext.agent_hints.osl``)."""

    default_tokens: Tokens = Field(256, description="Expected output of a model nothing is known of yet.")
    learn: bool = Field(True, description="Learn the mean output length per model from traffic.")
    learn_after_requests: int = Field(
        32, ge=1, le=1_000_000, description="Finished requests from which on the learned mean is used."
    )
    memory_requests: int = Field(
        1000, ge=1, le=1_000_000, description="Requests over which the mean forgets: the weight of a new one is 1/this."
    )


class CircuitBreakerSettings(DocumentModel):
    """When a pool that fails is left alone, and how it comes back."""

    failures_to_open: int = Field(5, ge=1, le=1000, description="Failures within the window that open the breaker.")
    failure_share: float = Field(0.5, gt=0.0, le=1.0, description="And the share of the window that must have failed.")
    window_ms: DurationMs = Field(10_000, description="How long a result counts.")
    open_ms: DurationMs = Field(2000, description="How long the pool is left alone; doubles each time in a row.")
    open_max_ms: DurationMs = Field(60_000, description="Longest time that doubling reaches.")
    probes: int = Field(1, ge=1, le=1000, description="Requests that may try the pool at a time while half open.")
    probe_timeout_ms: DurationMs = Field(30_000, description="A probe without a result by then has failed.")
    successes_to_close: int = Field(2, ge=1, le=1000, description="Probes in a row that close the breaker.")


class ClosedLoopSettings(DocumentModel):
    """When traffic of a cell spills to the next faster pool, and how it returns; in force with ``adapt``."""

    window_ms: DurationMs = Field(30_000, description="How long a measurement counts.")
    samples_min: int = Field(20, ge=1, le=512, description="Measurements that a percentile needs.")
    spill_after_ms: DurationMs = Field(15_000, description="How long the target must be missed before each step.")
    return_after_ms: DurationMs = Field(60_000, description="How long it must be met before each step back.")
    return_below: float = Field(
        0.8, gt=0.0, le=1.0, description="Met means: p95 at most this share of the target. Between, nothing changes."
    )
    step_share: float = Field(0.25, gt=0.0, le=1.0, description="Share of the cell's traffic that a step moves.")
    share_max: float = Field(
        0.9, gt=0.0, le=0.95, description="Largest share that spills: the rest shows when the pool has recovered."
    )


class GridDocument(DocumentModel):
    """A whole pool grid."""

    version: Literal[1] = 1
    description: str | None = Field(None, max_length=65_536)
    mode: Mode = Field("disagg", description="disagg: stages prefill and decode; aggregated: one stage of that name.")
    prefill: PrefillStage | None = None
    decode: DecodeStage | None = None
    aggregated: AggregatedStage | None = None
    defaults: TargetDefaults = TargetDefaults()
    output_length: OutputLengthSettings = OutputLengthSettings()
    isl_basis: Literal["total", "uncached"] = Field(
        "total", description="Prompt length on the isl axis: all of it, or what a pool has not cached."
    )
    enable_priority_retry: bool = Field(
        False, description="Retry towards faster pools before the first token, on errors that a retry can fix."
    )
    adapt: bool = Field(False, description="Closed loop: spill to the next faster pool while a cell misses its target.")
    closed_loop: ClosedLoopSettings = ClosedLoopSettings()
    circuit_breaker: CircuitBreakerSettings = CircuitBreakerSettings()
    accept: tuple[Accepted, ...] = Field((), max_length=3, description="Rules that this document breaks knowingly.")

    def with_defaults(self, defaults: TargetDefaults) -> GridDocument:
        """Return the document with targets in the place of those that it has no default for."""
        own = self.defaults.model_dump(exclude_none=True)
        return self.model_copy(update={"defaults": defaults.model_copy(update=own)})

    @property
    def stages(self) -> dict[StageName, GridStage]:
        """Return the stages that there are, in the order in which a request passes them."""
        named: list[tuple[StageName, GridStage | None]] = [
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("aggregated", self.aggregated),
        ]
        return {name: stage for name, stage in named if stage is not None}


PROBLEMS_MAX = 200
"""More problems than an operator reads; the rest is counted."""


class Severity(StrEnum):
    """Whether a document with the problem is refused."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding at one place of a document."""

    path: JsonPath
    text: str
    severity: Severity = Severity.ERROR
    rule: str = ""
    """The rule that is broken, when it is one that a document may accept."""

    def __str__(self) -> str:
        mark = "warning: " if self.severity is Severity.WARNING else ""
        return f"{path_text(self.path)}: {mark}{self.text}"


class GridDocumentError(Exception):
    """A pool grid document cannot be used; ``problems`` holds every reason, ``warnings`` what else was noticed.

    It is the only exception with which reading a document fails.
    """

    def __init__(self, problems: tuple[Problem, ...], warnings: tuple[Problem, ...] = (), source: str = "") -> None:
        self.problems = problems[:PROBLEMS_MAX]
        self.warnings = warnings[:PROBLEMS_MAX]
        self.left_off = len(problems) - len(self.problems)
        self.source = source
        count = len(problems)
        head = f"reading the pool grid {source or 'document'}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *map(str, self.problems)]))


JsonPath = tuple[str | int, ...]
"""Keys and indices from the root of a document."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_TEXT_MAX = 60
"""A value in a message is cut here: the place is named anyway, and a line stays a line."""


def path_text(path: JsonPath) -> str:
    """Return a path as text; a key that is not a plain word is quoted: ``$["a b"]``."""
    parts = ["$"]
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif _PLAIN_KEY.fullmatch(step) and len(step) <= _TEXT_MAX:
            parts.append(f".{step}")
        else:
            parts.append(f"[{json.dumps(step if len(step) <= _TEXT_MAX else step[:_TEXT_MAX] + '…')}]")
    return "".join(parts)


def value_text(value: Any) -> str:
    """Return a value as a short piece of JSON for a message: ``0.5``, ``true``, ``NaN``, ``an array of 3``."""
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and "://" in value:
        value = without_credentials(value)
    text = json.dumps(value) if isinstance(value, str | bool | int | float | None) else repr(value)
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "…"


def suggestion(key: str, known: Sequence[str]) -> str:
    """Return ``; did you mean "..."?`` or nothing."""
    near = get_close_matches(key[:64], known, n=1, cutoff=0.6)
    return f"; did you mean {value_text(near[0])}?" if near else ""


DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
"""The largest grid (``CELLS_MAX`` cells with names of 100 characters) takes 7 MB."""

DEPTH_MAX = 16
"""A document is six levels deep."""


def read_json(text: bytes | str) -> tuple[Any, list[Problem]]:
    """Return the value of a JSON text, arrays as lists, and its problems; the value is ``None`` if it is no JSON.

    Numbers that are not finite are kept for the check that reports what was expected there.
    """
    value, faults = read_strictly(text, bytes_max=DOCUMENT_BYTES_MAX, depth_max=DEPTH_MAX)
    return value, [Problem(*fault) for fault in faults]


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value is an integer; ``true`` and ``1.0`` are none."""
    return isinstance(value, int) and not isinstance(value, bool)
