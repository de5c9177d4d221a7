"""Dynamo's global router configuration, read unchanged and turned into our form.

Same grid, same rules of selection, other names: ``prefill_pool_dynamo_namespaces`` become pools,
``*_pool_selection_strategy`` the stages, ``agg`` is called aggregated. What Dynamo accepts with a defined meaning is
kept, with a warning: overlapping overrides (the first wins), pools that nothing refers to, a tighter target sent to a
slower pool. What has no meaning there is an error here: unknown keys, NaN, numbers of pools that are no integers, the
same namespace twice. Facts: the source of ai-dynamo 1.6.1 and its README; no code of it.

The translation works on plain JSON and keeps the place each value came from, so that problems found afterwards name
the place in Dynamo's document.

The parameters of the gateway's ``pool-selector`` plugin are such a grid too: one stage, which routes a whole request by
prompt length and TTFT target. They name no speed ranks: a pool that serves tighter targets counts as faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from poolgrid.kernel.pool_grids.axis import StageName, axes_of
from poolgrid.kernel.pool_grids.grid_document import (
    PROBLEMS_MAX,
    JsonPath,
    Problem,
    Severity,
    is_integer,
    path_text,
    suggestion,
    value_text,
)

KINDS: dict[str, StageName] = {"prefill": "prefill", "decode": "decode", "agg": "aggregated"}
"""Dynamo's word for a stage, and ours."""

_MODES = {"disagg": ("prefill", "decode"), "agg": ("agg",)}
_OVERRIDE_KEYS = ("min_priority", "max_priority", "target_pool")
_SELECTOR_AXES = {
    "sizeMin": "isl_min",
    "sizeMax": "isl_max",
    "sizeResolution": "isl_resolution",
    "latencyMinMs": "ttft_min_ms",
    "latencyMaxMs": "ttft_max_ms",
    "latencyResolution": "ttft_resolution",
}
_SELECTOR_OVERRIDES = {"minPriority": "min_priority", "maxPriority": "max_priority", "targetPool": "target_pool"}
_SELECTOR_KEYS = (*_SELECTOR_AXES, "mapping", "priorityOverrides", "poolLabel", "poolLabels")
_ONE_ITL_CELL = {"itl_min_ms": 0, "itl_max_ms": 1, "itl_resolution": 1}
_COMMENT_KEYS = ("$schema", "comment", "description")


def _kind_keys(kind: str) -> tuple[str, str, str, str]:
    return (
        f"num_{kind}_pools",
        f"{kind}_pool_dynamo_namespaces",
        f"{kind}_pool_priorities",
        f"{kind}_pool_selection_strategy",
    )


_TOP_KEYS = ("mode", "enable_priority_retry", *(key for kind in KINDS for key in _kind_keys(kind)))


def is_dynamo_document(raw: dict[str, Any]) -> bool:
    """Return whether a document is in Dynamo's form: it has a key that only that form has, and none of our stages."""
    if any(stage in raw for stage in KINDS.values()):
        return False
    return (
        raw.get("mode") == "agg" or "poolLabels" in raw or any(key in raw for kind in KINDS for key in _kind_keys(kind))
    )


@dataclass(slots=True)
class Translation:
    """A document in our form, still plain JSON, with the places its values came from."""

    data: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    places: dict[JsonPath, JsonPath] = field(default_factory=dict)
    absent: set[JsonPath] = field(default_factory=set)
    """Places of Dynamo's document that were no object or array: their content needs no further words."""

    def place(self, path: JsonPath) -> JsonPath:
        """Return the place in Dynamo's document for one in ours: the longest known beginning, then the rest."""
        for length in range(len(path), 0, -1):
            place = self.places.get(path[:length])
            if place is not None:
                return (*place, *path[length:])
        return path

    def is_explained(self, place: JsonPath) -> bool:
        """Return whether a place lies where the document's form itself was refused."""
        return any(place[: len(absent)] == absent for absent in self.absent)

    def error(self, path: JsonPath, text: str) -> None:
        self.problems.append(Problem(path, text))

    def warning(self, path: JsonPath, text: str) -> None:
        self.problems.append(Problem(path, text, Severity.WARNING))


def translate_document(raw: dict[str, Any]) -> Translation:
    """Return Dynamo's document in our form."""
    made = Translation()
    if "poolLabels" in raw:
        _selector(made, raw)
        return made
    mode = raw.get("mode", "disagg")
    if not isinstance(mode, str) or mode not in _MODES:
        made.error(("mode",), f'is {value_text(mode)}, must be "disagg" or "agg"')
        kinds = tuple(kind for kind in KINDS if any(key in raw for key in _kind_keys(kind)))
        mode = "agg" if kinds == ("agg",) else "disagg"
    kinds = _MODES[mode]
    made.data["mode"] = "aggregated" if mode == "agg" else "disagg"
    if "enable_priority_retry" in raw:
        made.data["enable_priority_retry"] = raw["enable_priority_retry"]
    used = {"mode", "enable_priority_retry", *(key for kind in kinds for key in _kind_keys(kind))}
    for key in raw:
        if key in used:
            continue
        if key in _TOP_KEYS:
            made.warning((key,), f'is not used in mode "{mode}"')
        else:
            _unknown_key(made, (key,), key, _TOP_KEYS)
    for kind in kinds:
        made.data[KINDS[kind]] = _stage(made, raw, kind)
    return made


def _selector(made: Translation, raw: dict[str, Any]) -> None:
    """Translate the parameters of a pool-selector."""
    stage: StageName = "aggregated"
    for key in raw:
        if key not in _SELECTOR_KEYS:
            _unknown_key(made, (key,), key, _SELECTOR_KEYS)
    data: dict[str, Any] = dict(_ONE_ITL_CELL)
    for key, ours in _SELECTOR_AXES.items():
        made.places[(stage, ours)] = (key,)
        if key in raw:
            data[ours] = _whole(raw[key])
    made.places[(stage,)] = ()
    for key, ours in (("poolLabels", "pools"), ("mapping", "mapping"), ("priorityOverrides", "priority_overrides")):
        made.places[(stage, ours)] = (key,)
    labels, mapping, overrides = raw["poolLabels"], raw.get("mapping"), raw.get("priorityOverrides") or []
    if isinstance(labels, list):
        ranks = _ranks(mapping, len(labels))
        data["pools"] = [{"name": name, "priority": rank} for name, rank in zip(labels, ranks, strict=True)]
        made.places |= {(stage, "pools", index, "name"): ("poolLabels", index) for index in range(len(labels))}
    else:
        _not_there(made, raw, "poolLabels", "an array of labels")
    if isinstance(mapping, list):
        data["mapping"] = [
            [[_indices_only(made, cell, ("mapping", at, column))] for column, cell in enumerate(row)]
            if isinstance(row, list)
            else row
            for at, row in enumerate(mapping)
        ]
    else:
        _not_there(made, raw, "mapping", "an array of rows, one per size")
    if not isinstance(overrides, list) or not all(isinstance(each, dict) for each in overrides):
        made.error(("priorityOverrides",), f"is {value_text(overrides)}, must be an array of objects")
        overrides = []
    data["priority_overrides"] = [
        {ours: each[key] for key, ours in _SELECTOR_OVERRIDES.items() if key in each} for each in overrides
    ]
    for index, each in enumerate(overrides):
        for key in each:
            if key not in _SELECTOR_OVERRIDES:
                _unknown_key(made, ("priorityOverrides", index, key), key, tuple(_SELECTOR_OVERRIDES))
    made.data.update({"mode": "aggregated", stage: data})


def _whole(value: Any) -> Any:
    """Return a number that JSON writes with a fraction of zero as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _ranks(mapping: Any, pools: int) -> list[int]:
    """Return the speed rank of each pool: of two pools in a row of the grid, that of the tighter target is faster."""
    faster: set[tuple[int, int]] = set()
    for row in mapping if isinstance(mapping, list) else []:
        known = list(dict.fromkeys(pool for pool in row if is_integer(pool))) if isinstance(row, list) else []
        faster |= {(left, right) for at, left in enumerate(known) for right in known[at + 1 :] if left != right}
    score = [sum((pool == left) - (pool == right) for left, right in faster) for pool in range(pools)]
    order = sorted(range(pools), key=lambda pool: -score[pool])
    return [order.index(pool) for pool in range(pools)]


def _unknown_key(made: Translation, path: JsonPath, key: str, known: tuple[str, ...]) -> None:
    if key.startswith("_") or key in _COMMENT_KEYS:
        made.warning(path, "is taken as a comment")
    else:
        hint = suggestion(key, known) if len(made.problems) < PROBLEMS_MAX else ""
        made.error(path, f"is not a key of Dynamo's form{hint}")


def _stage(made: Translation, raw: dict[str, Any], kind: str) -> dict[str, Any]:
    count_key, namespaces_key, priorities_key, strategy_key = _kind_keys(kind)
    stage = KINDS[kind]
    made.places[(stage,)] = (strategy_key,)
    made.places[(stage, "pools")] = (namespaces_key,)
    data: dict[str, Any] = {}
    namespaces = raw.get(namespaces_key)
    if isinstance(namespaces, list):
        data["pools"] = _pools(made, namespaces, raw.get(priorities_key), kind)
        count = raw.get(count_key)
        if not is_integer(count):
            text = f"is {value_text(count)}, must be an integer" if count_key in raw else "is missing"
            made.error((count_key,), text)
        elif count != len(namespaces):
            made.error((count_key,), f"is {value_text(count)}, {namespaces_key} has {len(namespaces)}")
    else:
        _not_there(made, raw, namespaces_key, "an array of namespaces")
    strategy = raw.get(strategy_key)
    if isinstance(strategy, dict):
        data.update(_strategy(made, strategy, kind))
    else:
        _not_there(made, raw, strategy_key, "an object")
    return data


def _not_there(made: Translation, raw: dict[str, Any], key: str, expected: str) -> None:
    made.error((key,), f"is {value_text(raw[key])}, must be {expected}" if key in raw else "is missing")
    made.absent.add((key,))


def _pools(made: Translation, namespaces: list[Any], priorities: Any, kind: str) -> list[dict[str, Any]]:
    _, namespaces_key, priorities_key, _ = _kind_keys(kind)
    stage = KINDS[kind]
    pools: list[dict[str, Any]] = [{"name": namespace} for namespace in namespaces]
    for index in range(len(pools)):
        made.places[(stage, "pools", index, "name")] = (namespaces_key, index)
        made.places[(stage, "pools", index, "priority")] = (priorities_key, index)
    if priorities is None:
        return pools
    if not isinstance(priorities, list):
        made.error((priorities_key,), f"is {value_text(priorities)}, must be an array of integers")
    elif len(priorities) != len(pools):
        made.error((priorities_key,), f"has {len(priorities)} priorities, {namespaces_key} has {len(pools)}")
    else:
        for index, (pool, priority) in enumerate(zip(pools, priorities, strict=True)):
            if is_integer(priority):
                pool["priority"] = priority
            else:
                made.error((priorities_key, index), f"is {value_text(priority)}, must be an integer")
                pool["priority"] = index
    return pools


def _strategy(made: Translation, strategy: dict[str, Any], kind: str) -> dict[str, Any]:
    strategy_key = _kind_keys(kind)[3]
    stage = KINDS[kind]
    mapping_key = f"{kind}_pool_mapping"
    data: dict[str, Any] = {}
    known = [mapping_key, "priority_overrides"]
    made.places[(stage, "mapping")] = (strategy_key, mapping_key)
    for axis in axes_of(stage):
        for key in () if stage in axis.not_in_dynamo else axis.keys:
            known.append(key)
            alias = key.removesuffix("_ms")
            if alias == key:
                if key in strategy:
                    data[key] = strategy[key]
                continue
            known.append(alias)
            if key in strategy and alias in strategy:
                made.warning((strategy_key, alias), f"is not used, {path_text((strategy_key, key))} is the newer name")
            written = alias if alias in strategy and key not in strategy else key
            made.places[(stage, key)] = (strategy_key, written)
            if written in strategy:
                data[key] = strategy[written]
    if mapping_key in strategy:
        data["mapping"] = _indices_only(made, strategy[mapping_key], (strategy_key, mapping_key))
    if "priority_overrides" in strategy:
        data["priority_overrides"] = _overrides(made, strategy["priority_overrides"], strategy_key)
    for key in strategy:
        if key not in known:
            _unknown_key(made, (strategy_key, key), key, tuple(known))
    return data


def _indices_only(made: Translation, value: Any, path: JsonPath) -> Any:
    """Return a mapping in which pools are indices; a name, which only our form has, is refused in its place."""
    if isinstance(value, list):
        return [_indices_only(made, child, (*path, index)) for index, child in enumerate(value)]
    if isinstance(value, str):
        made.error(path, f"is {value_text(value)}, must be a pool's index (an integer)")
        return 0
    return value


def _overrides(made: Translation, overrides: Any, strategy_key: str) -> Any:
    if not isinstance(overrides, list):
        return [] if overrides is None else overrides
    entries: list[Any] = []
    for index, entry in enumerate(overrides):
        path: JsonPath = (strategy_key, "priority_overrides", index)
        if not isinstance(entry, dict):
            entries.append(entry)
            continue
        made_entry = {key: entry[key] for key in _OVERRIDE_KEYS if key in entry}
        if "target_pool" in made_entry:
            made_entry["target_pool"] = _indices_only(made, made_entry["target_pool"], (*path, "target_pool"))
        for key in entry:
            if key not in _OVERRIDE_KEYS:
                _unknown_key(made, (*path, key), key, _OVERRIDE_KEYS)
        entries.append(made_entry)
    return entries
