"""The rules of a pool grid that no single field shows: shapes, references, overlaps, reachability, order of speed.

They run on plain JSON in which every value that the models refuse is ``None`` (``reader.sound_part``), so that a
document with a typo in one place still has the problems of all the others found. A check that lacks what it compares
says nothing. ``check_document`` also returns the document with every reference replaced by the pool's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from poolgrid.kernel.pool_grids.axis import (
    AXIS,
    STAGES,
    STAGES_OF_MODE,
    STEP_MIN,
    TARGETS,
    AxisKind,
    StageName,
    axes_of,
)
from poolgrid.kernel.pool_grids.grid_document import (
    CELLS_MAX,
    RESOLUTION_MAX,
    Accepted,
    CircuitBreakerSettings,
    ClosedLoopSettings,
    DocumentModel,
    GridDocument,
    JsonPath,
    PoolSimulation,
    Problem,
    Severity,
    is_integer,
    path_text,
    suggestion,
    value_text,
)
from poolgrid.kernel.wire.addresses import http_url_problem, is_name, parse_name

RULES: frozenset[str] = frozenset(get_args(Accepted))
SUGGESTIONS_MAX = 16
"""Suggestions for misspelt pools; with 256 long names, one takes 0.1 s."""
_INVALID = "?"
"""Stands for a pool that could not be resolved; the document is refused before it is used."""


@dataclass(slots=True)
class _Findings:
    """Collects problems; a broken rule that the document accepts is a warning."""

    accepted: frozenset[str]
    problems: list[Problem] = field(default_factory=list)
    suggestions: int = 0

    def suggest(self, key: str, known: Sequence[str]) -> str:
        """Return a suggestion for the first few names that are wrong: finding one is the slowest thing here."""
        self.suggestions += 1
        return suggestion(key, known) if self.suggestions <= SUGGESTIONS_MAX else ""

    def error(self, path: JsonPath, text: str) -> None:
        self.problems.append(Problem(path, text))

    def warning(self, path: JsonPath, text: str) -> None:
        self.problems.append(Problem(path, text, Severity.WARNING))

    def broken(self, rule: Accepted, path: JsonPath, text: str) -> None:
        severity = Severity.WARNING if rule in self.accepted else Severity.ERROR
        self.problems.append(Problem(path, text, severity, rule))

    def above(self, path: JsonPath, low: Any, name: str, high: Any) -> bool:
        """Note a lower bound above its upper one, which is the field ``name``."""
        if low is None or high is None or low <= high:
            return False
        self.error(path, f"is {value_text(low)}, must be at most {name}, {value_text(high)}")
        return True


@dataclass(slots=True)
class _RawPools:
    """Facts of a stage's pools before they are known to be valid."""

    names: list[str]
    """One per pool; ``?`` when it has no usable name."""
    ranks: list[int]
    indices: dict[str, int]
    declared: bool
    """Whether the speed ranks are written in the document."""

    def index_of(self, reference: Any) -> int | None:
        if is_integer(reference):
            return reference if 0 <= reference < len(self.names) else None
        return self.indices.get(reference)


def check_document(
    raw: dict[str, Any], accepted_anyway: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the document with references by name, and what breaks the rules.

    ``accepted_anyway`` adds to the document's own ``accept``.
    """
    found = _Findings(frozenset(raw.get("accept") or ()) | accepted_anyway)
    clean = dict(raw)
    mode = _given(GridDocument, raw, "mode")
    for stage in STAGES if mode is not None else ():
        if stage not in raw and stage in STAGES_OF_MODE[mode]:
            found.error((stage,), f'is missing; mode "{mode}" needs it')
        elif raw.get(stage) is not None and stage not in STAGES_OF_MODE[mode]:
            found.error((stage,), f'is not used in mode "{mode}"; remove it or change $.mode')
    sections = {stage: raw[stage] for stage in STAGES if raw.get(stage) is not None}
    faster_reached = bool(raw.get("enable_priority_retry") or raw.get("adapt"))
    for stage, section in sections.items():
        clean[stage] = _check_stage(stage, section, faster_reached, found)
    _check_across_stages(sections, found)
    _check_defaults(raw.get("defaults") or {}, sections, found)
    _check_relations(raw, found)
    return clean, found.problems


def _check_stage(stage: StageName, raw: dict[str, Any], faster_reached: bool, found: _Findings) -> dict[str, Any]:
    clean = dict(raw)
    pools = None if raw.get("pools") is None else _check_pools(stage, raw["pools"], found)
    shape = _check_axes(stage, raw, found)
    reached: dict[int, None] = {}

    def resolve(reference: Any, path: JsonPath) -> str:
        index = _resolve(reference, path, pools, found)
        if index is None or pools is None:
            return _INVALID
        reached[index] = None
        return pools.names[index]

    if "mapping" in raw:
        before = len(found.problems)
        mapping = _check_mapping(stage, raw["mapping"], shape, resolve, found)
        clean["mapping"] = mapping if len(found.problems) == before and shape is not None else ()
        if pools is not None:
            _check_speed_order(stage, mapping, pools, shape, found)
    if raw.get("priority_overrides"):
        clean["priority_overrides"] = _check_overrides(stage, raw["priority_overrides"], resolve, found)
    order = (raw.get("fallback") or {}).get("order")
    if order:
        clean["fallback"] = {**raw["fallback"], "order": _check_fallback(stage, order, pools, resolve, found)}
    if pools is not None:
        _check_reachable(stage, pools, reached, faster_reached, found)
    return clean


def _url_problem(url: str) -> str | None:
    """Say why nothing can listen at a pool's ``url``, or ``None``."""
    if not is_name(url):
        return http_url_problem(url)
    try:
        parse_name(url)
    except ValueError as error:
        return f"is no name: {error}"
    return None


def _check_pools(stage: str, raw: list[Any], found: _Findings) -> _RawPools:
    entries: list[dict[str, Any]] = [entry or {} for entry in raw]
    names = [entry.get("name") or _INVALID for entry in entries]
    urls = [entry.get("url") for entry in entries]
    _check_distinct(stage, "name", names, found)
    _check_distinct(stage, "url", [_INVALID if url is None else url.rstrip("/") for url in urls], found)
    for index, url in enumerate(urls):
        if url is not None and (problem := _url_problem(url)) is not None:
            found.error((stage, "pools", index, "url"), f"is {value_text(url)}, which {problem}")
    ranks = [entry.get("priority") for entry in entries]
    missing = [index for index, entry in enumerate(entries) if "priority" not in entry]
    if missing and len(missing) < len(entries):
        found.error(
            (stage, "pools", missing[0], "priority"), "is missing; all pools of a stage have a priority, or none has"
        )
    kinds: dict[str, int] = {}
    for index, entry in enumerate(entries):
        given = [key for key in ("cost_per_hour", "cost_per_million_tokens") if entry.get(key) is not None]
        kinds |= dict.fromkeys(given, index)
        if len(given) == 2:
            found.error((stage, "pools", index, given[1]), "cannot be combined with cost_per_hour; give one of the two")
    if len(kinds) == 2:
        key, index = list(kinds.items())[-1]
        found.warning(
            (stage, "pools", index, key), "cannot be compared with the other pools' costs, which are of the other kind"
        )
    declared = [rank for rank in ranks if rank is not None]
    is_declared = len(declared) == len(entries)
    indices = {name: index for index, name in reversed(list(enumerate(names))) if name != _INVALID}
    return _RawPools(names, declared if is_declared else list(range(len(entries))), indices, is_declared)


def _check_distinct(stage: str, key: str, values: list[str], found: _Findings) -> None:
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        if value != _INVALID and first.setdefault(value, index) != index:
            found.error(
                (stage, "pools", index, key),
                f"is {value_text(value)} as in {path_text((stage, 'pools', first[value], key))}; pools must differ",
            )


def _check_across_stages(sections: dict[StageName, dict[str, Any]], found: _Findings) -> None:
    """Names are unique over all stages. Blocks move between pools and prefixes are compared across them: one block
    size for all."""
    first: dict[str, str] = {}
    size_of: tuple[JsonPath, int] | None = None
    for stage, section in sections.items():
        for index, pool in enumerate(section.get("pools") or ()):
            name = (pool or {}).get("name")
            if name is not None and first.setdefault(name, stage) != stage:
                found.error(
                    (stage, "pools", index, "name"),
                    f"is {value_text(name)}, which names a pool of {path_text((first[name],))} too; names are unique "
                    "in a document (urls need not be: one pool may serve both stages)",
                )
            hints = (pool or {}).get("simulate")
            size = None if hints is None else _given(PoolSimulation, hints, "block_size")
            if size is None:
                continue
            path: JsonPath = (stage, "pools", index, "simulate", "block_size")
            size_of = size_of or (path, size)
            if size != size_of[1]:
                other = f"{path_text(size_of[0])} is {value_text(size_of[1])}"
                found.error(path, f"is {value_text(size)}, {other}; they must be equal")


def _check_axes(stage: StageName, raw: dict[str, Any], found: _Findings) -> list[tuple[AxisKind, int]] | None:
    """Check ranges; return the axes with their resolutions, or ``None`` when the shape is not known."""
    shape: list[tuple[AxisKind, int]] | None = []
    cells = 1
    for axis in axes_of(stage):
        low_key, high_key, _ = keys = axis.keys
        if axis.stages[stage] == "optional":
            missing = [key for key in keys if raw.get(key) is None]
            if len(missing) == len(keys):
                continue
            for key in missing:
                found.error((stage, key), f"is missing; {', '.join(keys)} come together, or none of them")
        low, high, resolution = (raw.get(key) for key in keys)
        if low is not None and high is not None:
            if low >= high:
                found.error((stage, low_key), f"is {value_text(low)}, must be less than {high_key}, {value_text(high)}")
            elif resolution is not None and (high - low) / resolution < STEP_MIN:
                found.error((stage, high_key), f"leaves cells narrower than {STEP_MIN:g}; widen the range")
        if resolution is None:
            shape = None
            continue
        cells *= resolution
        if shape is not None:
            shape.append((axis, resolution))
    if cells > CELLS_MAX:
        found.error((stage,), f"has {cells} cells (the product of the resolutions), allowed are at most {CELLS_MAX}")
        return None
    return shape


def _resolve(reference: Any, path: JsonPath, pools: _RawPools | None, found: _Findings) -> int | None:
    """Return the index of the pool that a reference means; report what is wrong with it otherwise."""
    if not is_integer(reference) and not isinstance(reference, str):
        found.error(path, f"is {value_text(reference)}, must be a pool's name or its index (an integer)")
        return None
    if pools is None:
        return None
    index = pools.index_of(reference)
    if index is None and isinstance(reference, str):
        known = [name for name in pools.names if name != _INVALID]
        found.error(
            path, f"is {value_text(reference)}, which names no pool of this stage{found.suggest(reference, known)}"
        )
    elif index is None:
        found.error(path, f"is {value_text(reference)}, pools of this stage are 0 to {len(pools.names) - 1}")
    return index


Resolve = Callable[[Any, JsonPath], str]


def _check_mapping(
    stage: str, mapping: Any, shape: list[tuple[AxisKind, int]] | None, resolve: Resolve, found: _Findings
) -> tuple[Any, ...]:
    """Return the mapping by names, as far as it is one; every row and cell that is wrong is named."""
    budget = [CELLS_MAX]

    def nested(value: Any, depth: int, path: JsonPath) -> Any:
        if shape is not None and depth == len(shape):
            return resolve(value, path)
        if shape is None and not isinstance(value, tuple):
            return resolve(value, path)
        if not isinstance(value, tuple):
            assert shape is not None, "without a shape whatever is no array is a pool"
            axis, length = shape[depth]
            found.error(path, f"is {value_text(value)}, must be an array of {length} ({axis.keys[2]})")
            return ()
        if shape is not None and len(value) != shape[depth][1]:
            axis, length = shape[depth]
            what = _rows_word(depth, len(shape))
            found.error(path, f"has {len(value)} {what}, {axis.keys[2]} is {length}")
        children = []
        for index, child in enumerate(value):
            budget[0] -= 1
            if budget[0] < -RESOLUTION_MAX:
                break
            children.append(nested(child, depth + 1, (*path, index)))
        return tuple(children)

    if not isinstance(mapping, tuple):
        found.error((stage, "mapping"), f"is {value_text(mapping)}, must be an array of rows")
        return ()
    made = nested(mapping, 0, (stage, "mapping"))
    return made if isinstance(made, tuple) else ()


def _rows_word(depth: int, rank: int) -> str:
    """Return what the entries of one level of a mapping are called; from the fourth on, what they belong to."""
    words = ("columns", "rows", "layers")
    level = rank - 1 - depth
    return words[level] if level < len(words) else f"groups of {words[-1]}"


def _cells(mapping: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    if isinstance(mapping, tuple):
        for index, child in enumerate(mapping):
            yield from _cells(child, (*path, index))
    else:
        yield path, mapping


def _check_speed_order(
    stage: str, mapping: tuple[Any, ...], pools: _RawPools, shape: list[tuple[AxisKind, int]] | None, found: _Findings
) -> None:
    """A tighter target must not go to a slower pool: speed ranks do not fall along an axis that is a target."""
    if shape is None:
        return
    rank_of = {name: rank for name, rank in zip(pools.names, pools.ranks, strict=True) if name != _INVALID}
    pool_of = dict(_cells(mapping))
    for cell, pool in pool_of.items():
        if len(cell) != len(shape):
            continue
        for place, (axis, _) in enumerate(shape):
            if axis.faster_end is None:
                continue
            towards = 1 if axis.faster_end == "low" else -1
            looser = (*cell[:place], cell[place] + towards, *cell[place + 1 :])
            other = pool_of.get(looser)
            if other is None or rank_of.get(pool, 0) <= rank_of.get(other, 0) or _INVALID in (pool, other):
                continue
            text = (
                f"sends a tighter {axis.name} target to {value_text(pool)} (speed rank {rank_of[pool]}) than "
                f"{path_text((stage, 'mapping', *looser))}, which goes to the faster {value_text(other)} "
                f"(speed rank {rank_of[other]})"
            )
            path: JsonPath = (stage, "mapping", *cell)
            if pools.declared:
                found.broken("slower-pool-for-faster-target", path, text)
            else:
                found.warning(path, f"{text}; ranks are the order of the pools, give them a priority for another order")


def _check_overrides(stage: str, raw: Sequence[Any], resolve: Resolve, found: _Findings) -> list[Any]:
    clean: list[Any] = []
    ranges: list[tuple[int, int, int]] = []
    for index, entry in enumerate(raw):
        path: JsonPath = (stage, "priority_overrides", index)
        made = dict(entry or {})
        clean.append(made)
        if "target_pool" in made:
            made["target_pool"] = resolve(made["target_pool"], (*path, "target_pool"))
        low, high = made.get("min_priority"), made.get("max_priority")
        if low is None or high is None or found.above((*path, "min_priority"), low, "max_priority", high):
            continue
        for other_low, other_high, other in ranges:
            if low <= other_high and other_low <= high:
                both = f"{value_text(max(low, other_low))} to {value_text(min(high, other_high))}"
                found.broken(
                    "overlapping-overrides",
                    path,
                    f"overlaps {path_text((stage, 'priority_overrides', other))} in priorities {both}, where the "
                    "earlier one always wins",
                )
                break
        ranges.append((low, high, index))
    return clean


def _check_fallback(
    stage: str, order: dict[str, Any], pools: _RawPools | None, resolve: Resolve, found: _Findings
) -> dict[str, Any]:
    clean: dict[str, Any] = {}
    for key, targets in order.items():
        path: JsonPath = (stage, "fallback", "order", key)
        name = key
        if pools is not None:
            reference: Any = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key
            index = _resolve(reference, path, pools, found)
            name = key if index is None else pools.names[index]
        if name in clean:
            found.error(path, f"is given for pool {value_text(name)} more than once")
        resolved: list[str] = []
        for position, target in enumerate(targets or ()):
            pool = resolve(target, (*path, position))
            if pool != _INVALID and pool == name:
                found.error((*path, position), f"is {value_text(target)}, the pool itself")
            elif pool != _INVALID and pool in resolved:
                found.error((*path, position), f"is {value_text(target)}, which is in the list already")
            resolved.append(pool)
        clean[name] = tuple(resolved)
    return clean


def _check_reachable(
    stage: str, pools: _RawPools, reached: dict[int, None], faster_reached: bool, found: _Findings
) -> None:
    slowest = max((pools.ranks[index] for index in reached), default=None)
    for index, name in enumerate(pools.names):
        if index in reached or name == _INVALID or name in pools.names[:index]:
            continue
        if faster_reached and slowest is not None and pools.ranks[index] < slowest:
            continue
        found.broken(
            "unreachable-pool",
            (stage, "pools", index),
            f"{value_text(name)} is in no cell, no priority override and no fallback order; use it or remove it",
        )


def _check_defaults(defaults: dict[str, Any], sections: dict[StageName, dict[str, Any]], found: _Findings) -> None:
    for axis in TARGETS:
        value = defaults.get(axis.default_key)
        for stage, section in sections.items():
            low, high = (section.get(key) for key in axis.keys[:2])
            if value is not None and low is not None and high is not None and not low <= value <= high:
                found.warning(
                    ("defaults", axis.default_key),
                    f"is {value_text(value)}, outside {value_text(low)} to {value_text(high)} of "
                    f"{path_text((stage,))}: the outermost cells take it",
                )


def _given(model: type[DocumentModel], raw: dict[str, Any], key: str) -> Any:
    """Return a section's value, or its model's default; ``None`` for an invalid one."""
    return raw[key] if key in raw else model.model_fields[key].get_default()


def _check_relations(raw: dict[str, Any], found: _Findings) -> None:
    """Two fields of one section that bound each other."""
    breaker, aggregated, loop = (raw.get(key) for key in ("circuit_breaker", "aggregated", "closed_loop"))
    if breaker is not None:
        open_ms, most_ms = (_given(CircuitBreakerSettings, breaker, key) for key in ("open_ms", "open_max_ms"))
        found.above(("circuit_breaker", "open_ms"), open_ms, "open_max_ms", most_ms)
    if raw.get("isl_basis") == "uncached" and aggregated is not None and aggregated.get(AXIS["isl"].keys[0]) is None:
        found.warning(("isl_basis",), "has no effect, the aggregated grid has no isl axis")
    if loop is not None:
        step, most = (_given(ClosedLoopSettings, loop, key) for key in ("step_share", "share_max"))
        found.above(("closed_loop", "step_share"), step, "share_max", most)
        if _given(GridDocument, raw, "adapt") is False:
            found.warning(("closed_loop",), "has no effect, $.adapt is false")
