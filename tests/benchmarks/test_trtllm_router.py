"""The score of TensorRT-LLM's own router, as a peer: worked examples of its rules."""

from __future__ import annotations

import numpy as np
import pytest

from lab.benchmarks.trtllm_router import InstanceScore, RankScore
from poolgrid.kernel.decision.policy import Candidates, RoutingRequest
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey

REQUEST = RoutingRequest("r", "m", isl=320, block_size=32, blocks=10)


def candidates(overlap: list[float], requests: list[float], queued: list[float]) -> Candidates:
    columns = [np.array(each, dtype=np.float64) for each in (queued, [0.0] * len(queued), requests, overlap)]
    none = np.zeros(len(overlap))
    workers = tuple(WorkerKey(WorkerId(f"w{at}")) for at in range(len(overlap)))
    return Candidates(workers, columns[0], columns[1], columns[2], columns[3], none, none)


@pytest.mark.parametrize(
    ("overlap", "requests", "row"),
    [([4.0, 0.0], [0.0, 0.0], 0), ([4.0, 0.0], [17.0, 0.0], 1), ([4.0, 0.0], [15.0, 0.0], 0)],
)
def test_an_instance_is_worth_its_blocks_less_a_quarter_of_its_requests(
    overlap: list[float], requests: list[float], row: int
) -> None:
    assert InstanceScore().choose(REQUEST, candidates(overlap, requests, [0.0, 0.0])).row == row


def test_equal_instances_take_turns() -> None:
    policy, equal = InstanceScore(), candidates([1.0] * 3, [0.0] * 3, [0.0] * 3)
    assert [policy.choose(REQUEST, equal).row for _ in range(4)] == [0, 1, 2, 0]
    again = InstanceScore()
    again.restore(policy.checkpoint())
    assert again.choose(REQUEST, equal).row == policy.choose(REQUEST, equal).row


@pytest.mark.parametrize(
    ("overlap", "queued", "row"),
    [
        ([9.0, 0.0, 0.0], [900.0, 0.0, 0.0], 1),  # above twice the mean load
        ([9.0, 0.0, 0.0], [600.0, 300.0, 300.0], 0),
        ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], 1),  # a match of a tenth counts for nothing
    ],
)
def test_a_rank_is_capped_by_its_share_and_a_small_match_counts_for_nothing(
    overlap: list[float], queued: list[float], row: int
) -> None:
    assert RankScore().choose(REQUEST, candidates(overlap, [0.0] * 3, queued)).row == row
