"""The suite as tests, where upstream's files are given: ``POOLGRID_TRTLLM_UPSTREAM=DIR``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.trtllm_upstream import groups, stream, tenants
from tests.trtllm_upstream.conformance import CONTRADICTED, check
from tests.trtllm_upstream.files import EVENTS, HASH, PUBLISHER, UpstreamFiles

FOLDER = os.environ.get("POOLGRID_TRTLLM_UPSTREAM", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="needs TensorRT-LLM's own files: POOLGRID_TRTLLM_UPSTREAM=DIR, see CONTRIBUTING.md"
)


@pytest.fixture
def files() -> UpstreamFiles:
    return UpstreamFiles(Path(FOLDER))


def test_every_contradiction_of_upstream_is_handled(files: UpstreamFiles) -> None:
    assert not [str(fact) for fact in check(files) if fact.status == CONTRADICTED and not fact.handled]


@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_attributed_to_another_tenant_or_to_nobody(files: UpstreamFiles, seed: int) -> None:
    if files.text(EVENTS) is None or files.text(HASH) is None:
        pytest.skip(f"{EVENTS} or {HASH} is absent")
    assert not tenants.run(files, 3_000, seed).wrong


def test_promises_are_what_every_group_of_layers_can_resume(files: UpstreamFiles) -> None:
    if files.text(EVENTS) is None or files.text(HASH) is None:
        pytest.skip(f"{EVENTS} or {HASH} is absent")
    compared, wrong = groups.run(files, 60)
    assert compared
    assert not wrong


def test_upstreams_publisher_is_followed_through_gaps_replays_and_restarts(
    files: UpstreamFiles, tmp_path: Path
) -> None:
    if files.text(PUBLISHER) is None:
        pytest.skip(f"{PUBLISHER} is absent")
    assert sum((asyncio.run(stream.follow(files, 30, tmp_path)) or {}).values()) == 30
