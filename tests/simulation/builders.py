"""Small builders, so that tests of the simulator read as sentences."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from poolgrid.plugins.bench.trace import TRACE_BLOCK_TOKENS, TraceRow
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation.workload import Workload

CONVERSATION = Path(__file__).parents[1] / "data" / "conversation_1000.jsonl"


def row(*hash_ids: int, last: int = TRACE_BLOCK_TOKENS, at: float = 0.0, osl: int = 4) -> TraceRow:
    return TraceRow(at, (len(hash_ids) - 1) * TRACE_BLOCK_TOKENS + last, osl, hash_ids)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRow]:
    """Rows as published: an id names its whole prefix and the number of tokens in its block; times never go back."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    at = 0.0
    for _ in range(draw(st.integers(1, 10))):
        at += draw(st.integers(0, 500))
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        partial = draw(st.sampled_from([1, 100, 300, TRACE_BLOCK_TOKENS]))
        hash_ids = []
        for end in range(1, len(path) + 1):
            name = (*path[:end], partial if end == len(path) else TRACE_BLOCK_TOKENS)
            hash_ids.append(ids.setdefault(name, len(ids)))
        rows.append(row(*hash_ids, last=partial, at=at, osl=draw(st.integers(0, 40))))
    return rows


def limits(
    workload: Workload, blocks: int | None = None, host_blocks: int = 0, max_num_tokens: int = 8192
) -> SimulatedLimits:
    """Engines that hold everything, or ``blocks``."""
    roomy = workload.total_tokens // workload.block_size + 2 * len(workload.requests) + 1
    return SimulatedLimits(
        block_size=workload.block_size,
        total_kv_blocks=blocks or roomy,
        host_kv_blocks=host_blocks,
        max_batch_size=16,
        max_num_tokens=max_num_tokens,
        max_sequence_length=workload.longest + 1,
        max_waiting_requests=len(workload.requests),
    )
