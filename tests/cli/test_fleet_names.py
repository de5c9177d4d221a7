"""What the pools of a fleet are called on NATS."""

from __future__ import annotations

import json

import pytest

from poolgrid.cli.fleet import nats_names
from poolgrid.global_router.core.document.grid_document import GridDocument
from poolgrid.global_router.core.document.reader import load_document


def document(*names: str) -> GridDocument:
    pools = [{"name": name, "url": f"http://h:{port}"} for port, name in enumerate(names, 1)]
    axes = {"ttft_min_ms": 0, "ttft_max_ms": 9, "ttft_resolution": 1, "itl_min_ms": 0, "itl_max_ms": 9}
    grid = {"pools": pools, **axes, "itl_resolution": len(names), "mapping": [list(names)]}
    return load_document(json.dumps({"version": 1, "mode": "aggregated", "aggregated": grid}).encode()).document


def test_a_pool_has_its_own_name_on_nats_where_that_is_one_there() -> None:
    names = nats_names(document("fast", "slow_b-2", "eu.west/a"))

    assert names == {"fast": "fast", "slow_b-2": "slow_b-2", "eu.west/a": "eu-west-a"}


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a.b", "a/b"), "pool 'a/b' would be 'a-b' on NATS, as 'a.b'"), (("x" * 65,), "at most 64 characters")],
)
def test_names_that_cannot_be_on_nats_are_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        nats_names(document(*names))
