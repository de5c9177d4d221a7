"""The examples are valid, canonical in meaning, and say how they are simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from poolgrid.global_router.core.document.history import document_text
from poolgrid.global_router.core.document.reader import load_document
from tests.global_router.documents import POOL_CONFIGS, ROOT


@pytest.mark.parametrize("path", POOL_CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_valid_without_a_warning(path: Path) -> None:
    loaded = load_document(path.read_bytes(), path.name)

    assert loaded.warnings == ()
    assert load_document(document_text(loaded.document)).document == loaded.document


@pytest.mark.parametrize("path", POOL_CONFIGS, ids=lambda path: path.stem)
def test_an_example_can_be_started_on_one_machine(path: Path) -> None:
    document = load_document(path.read_bytes()).document
    pools = [pool for stage in document.stages.values() for pool in stage.pools]

    assert all(pool.simulate is not None and pool.url is not None and pool.cost_per_hour for pool in pools)
    speeds = {pool.simulate.speedup for pool in pools if pool.simulate is not None}
    assert len(speeds) > 1


def test_every_example_is_described_in_the_readme() -> None:
    readme = (ROOT / "pool_configs" / "README.md").read_text()

    assert len(POOL_CONFIGS) >= 4
    assert [path.name for path in POOL_CONFIGS if path.name not in readme] == []


def test_every_key_of_the_format_is_documented() -> None:
    schema = json.loads((ROOT / "docs" / "schemas" / "pool_grid.schema.json").read_text())
    objects = [schema, *schema["$defs"].values()]
    keys = {key for part in objects for key in part.get("properties", {})}
    text = (ROOT / "docs" / "pool_grids.md").read_text()

    assert sorted(key for key in keys if f"`{key}`" not in text) == []
