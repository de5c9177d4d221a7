"""Small valid documents, and ways to damage them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from poolgrid.kernel.pool_grids.grid_document import GridDocument, GridDocumentError
from poolgrid.server.global_router.document.reader import LoadedDocument, load_document

ROOT = Path(__file__).resolve().parents[2]
POOL_CONFIGS = sorted((ROOT / "pool_configs").glob("*.json"))


def disagg() -> dict[str, Any]:
    """Two prefill pools on 2 × 2 cells, two decode pools on 2 × 3 cells."""
    return {
        "version": 1,
        "mode": "disagg",
        "prefill": {
            "pools": [
                {"name": "p-fast", "url": "http://localhost:1", "priority": 0, "cost_per_hour": 4.0},
                {"name": "p-cheap", "url": "http://localhost:2", "priority": 1, "cost_per_hour": 1.0},
            ],
            "isl_min": 0,
            "isl_max": 2000,
            "isl_resolution": 2,
            "ttft_min_ms": 0,
            "ttft_max_ms": 1000,
            "ttft_resolution": 2,
            "mapping": [["p-fast", "p-cheap"], ["p-fast", "p-fast"]],
        },
        "decode": {
            "pools": [
                {"name": "d-fast", "url": "http://localhost:3", "priority": 0},
                {"name": "d-cheap", "url": "http://localhost:4", "priority": 1},
            ],
            "context_length_min": 0,
            "context_length_max": 4000,
            "context_length_resolution": 2,
            "itl_min_ms": 0,
            "itl_max_ms": 30,
            "itl_resolution": 3,
            "mapping": [["d-fast", "d-cheap", "d-cheap"], ["d-fast", "d-fast", "d-cheap"]],
        },
    }


def aggregated() -> dict[str, Any]:
    """Three pools on 2 × 2 × 2 cells."""
    return {
        "version": 1,
        "mode": "aggregated",
        "aggregated": {
            "pools": [
                {"name": "a", "priority": 0},
                {"name": "b", "priority": 1},
                {"name": "c", "priority": 2},
            ],
            "isl_min": 0,
            "isl_max": 2000,
            "isl_resolution": 2,
            "ttft_min_ms": 0,
            "ttft_max_ms": 1000,
            "ttft_resolution": 2,
            "itl_min_ms": 0,
            "itl_max_ms": 20,
            "itl_resolution": 2,
            "mapping": [[["a", "b"], ["b", "c"]], [["a", "a"], ["b", "b"]]],
        },
    }


def dynamo_disagg() -> dict[str, Any]:
    """A configuration of Dynamo's global router, disaggregated, with the older key names."""
    return {
        "num_prefill_pools": 2,
        "num_decode_pools": 1,
        "prefill_pool_dynamo_namespaces": ["${K8S_NAMESPACE}-gp-prefill-0", "${K8S_NAMESPACE}-gp-prefill-1"],
        "decode_pool_dynamo_namespaces": ["${K8S_NAMESPACE}-gp-decode-0"],
        "prefill_pool_selection_strategy": {
            "ttft_min": 10,
            "ttft_max": 3000,
            "ttft_resolution": 2,
            "isl_min": 0,
            "isl_max": 32000,
            "isl_resolution": 2,
            "prefill_pool_mapping": [[0, 1], [0, 1]],
        },
        "decode_pool_selection_strategy": {
            "itl_min": 10,
            "itl_max": 500,
            "itl_resolution": 2,
            "context_length_min": 0,
            "context_length_max": 32000,
            "context_length_resolution": 2,
            "decode_pool_mapping": [[0, 0], [0, 0]],
        },
    }


def dynamo_retry() -> dict[str, Any]:
    """Three pools of which the grid names only the slowest: the others are for priority retry."""
    return {
        "mode": "disagg",
        "enable_priority_retry": True,
        "num_prefill_pools": 3,
        "num_decode_pools": 3,
        "prefill_pool_dynamo_namespaces": ["prefill-fast", "prefill-mid", "prefill-slow"],
        "decode_pool_dynamo_namespaces": ["decode-fast", "decode-mid", "decode-slow"],
        "prefill_pool_priorities": [0, 1, 2],
        "decode_pool_priorities": [0, 1, 2],
        "prefill_pool_selection_strategy": {
            "isl_min": 0,
            "isl_max": 32000,
            "isl_resolution": 1,
            "ttft_min_ms": 10,
            "ttft_max_ms": 3000,
            "ttft_resolution": 1,
            "prefill_pool_mapping": [[2]],
            "priority_overrides": [{"min_priority": 10, "max_priority": 100, "target_pool": 0}],
        },
        "decode_pool_selection_strategy": {
            "context_length_min": 0,
            "context_length_max": 32000,
            "context_length_resolution": 1,
            "itl_min_ms": 10,
            "itl_max_ms": 500,
            "itl_resolution": 1,
            "decode_pool_mapping": [[2]],
        },
    }


def dynamo_agg() -> dict[str, Any]:
    """Aggregated pools with an isl axis, overlapping overrides and a pool that nothing refers to."""
    return {
        "mode": "agg",
        "num_agg_pools": 3,
        "agg_pool_dynamo_namespaces": ["agg-0", "agg-1", "agg-2"],
        "agg_pool_priorities": [1, 0, 2],
        "agg_pool_selection_strategy": {
            "ttft_min_ms": 10,
            "ttft_max_ms": 3000,
            "ttft_resolution": 2,
            "itl_min_ms": 5,
            "itl_max_ms": 500,
            "itl_resolution": 2,
            "isl_min": 0,
            "isl_max": 32000,
            "isl_resolution": 2,
            "agg_pool_mapping": [[[0, 1], [1, 0]], [[1, 1], [1, 1]]],
            "priority_overrides": [
                {"min_priority": 0, "max_priority": 10, "target_pool": 1},
                {"min_priority": 5, "max_priority": 20, "target_pool": 0},
            ],
        },
    }


DYNAMO_DOCUMENTS = {"disagg": dynamo_disagg, "retry": dynamo_retry, "agg": dynamo_agg}


def load(raw: dict[str, Any]) -> LoadedDocument:
    return load_document(json.dumps(raw))


def document(raw: dict[str, Any]) -> GridDocument:
    return load(raw).document


def problems(raw: Any) -> list[str]:
    """Return the errors of a document as lines; none when it is valid."""
    try:
        load_document(raw if isinstance(raw, str | bytes) else json.dumps(raw))
    except GridDocumentError as error:
        return [str(problem) for problem in error.problems]
    return []


def warnings(raw: Any) -> list[str]:
    return [str(warning) for warning in load(raw).warnings]


def changed(raw: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return a copy with one value set; ``...`` removes the key."""
    made = copy.deepcopy(raw)
    target: Any = made
    for step in path[:-1]:
        target = target[step]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return made
