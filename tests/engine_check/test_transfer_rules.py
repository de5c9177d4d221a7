"""What vLLM's metrics tell of transfers of KV."""

from __future__ import annotations

import msgspec
import pytest

from poolgrid.plugins.engine_check.core.finding import FindingSeverity, Kind
from poolgrid.plugins.engine_check.core.transfer_rules import (
    TransferTotals,
    transfer_findings,
    transfer_totals,
    transfers_seen,
)

MEASURED = TransferTotals(663, 663 * 1.1e9, 663 * 0.162, 663 * 0.125, 663 * 37_000.0)
"""Four H200, vLLM 0.25 with NIXL 1.5.1, blocks of 16 tokens, UCX's defaults."""

METRICS = "".join(
    f'vllm:nixl_{name}{{engine="{engine}",model_name="m"}} {value}\n'
    for engine, share in ((0, 1 / 3), (1, 2 / 3))
    for name, value in (
        ("xfer_time_seconds_count", 663 * share),
        ("xfer_time_seconds_sum", 663 * 0.162 * share),
        ("bytes_transferred_count", 663 * share),
        ("bytes_transferred_sum", 663 * 1.1e9 * share),
        ("post_time_seconds_sum", 663 * 0.125 * share),
        ("num_descriptors_sum", 663 * 37_000 * share),
        ("num_failed_transfers_total", 0.0),
        ("num_kv_expired_reqs_total", 0.0),
    )
)
"""The same of two ranks, as Prometheus reads it."""


def kinds(totals: TransferTotals) -> list[Kind]:
    found = transfer_findings(totals)
    assert {each.severity for each in found} <= {FindingSeverity.WARNING}
    return [each.kind for each in found]


def test_the_sums_of_all_ranks_are_read() -> None:
    totals = transfer_totals("# HELP x y\nvllm:other 3\n" + METRICS)

    assert totals is not None
    assert transfers_seen(totals) == transfers_seen(MEASURED) == "663 transfers of 1,100 MB at 6.8 GB/s"
    assert kinds(totals) == kinds(MEASURED)


@pytest.mark.parametrize("page", ["", "<html>", "vllm:prompt_tokens_total 3\n", "vllm:nixl_x NaN\n", "vllm:nixl_{ 1"])
def test_a_page_without_transfers_tells_nothing(page: str) -> None:
    assert transfer_totals(page) is None


def test_what_was_measured_is_slow_and_in_small_pieces() -> None:
    slow, pieces = transfer_findings(MEASURED)

    assert "6.8 GB/s, as over TCP: 1,100 MB take 162 ms" in slow.words
    assert "37,000 pieces of 30 KB" in pieces.words
    assert "125 ms" in pieces.words
    assert "--block-size" in pieces.remedy


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"seconds": 663 * 0.011, "pieces": 663 * 4600.0, "post_seconds": 663 * 0.01}, []),
        ({"seconds": 663 * 0.011, "pieces": 663 * 4600.0}, [Kind.TRANSFERS_IN_PIECES]),
        ({"pieces": 663 * 4600.0, "post_seconds": 663 * 0.01}, [Kind.TRANSFERS_SLOW]),
        # A short prompt's transfer says nothing of the transport.
        ({"bytes_moved": 663 * 1e6, "pieces": 663.0, "post_seconds": 0.0}, []),
        ({"transfers": 0, "bytes_moved": 0.0, "seconds": 0.0, "pieces": 0.0, "expired": 3}, [Kind.TRANSFERS_FAILED]),
        ({"transfers": 0, "bytes_moved": 0.0, "seconds": 0.0, "pieces": 0.0}, []),
    ],
)
def test_each_cause_has_its_finding(change: dict[str, float], found: list[Kind]) -> None:
    assert kinds(msgspec.structs.replace(MEASURED, **change)) == found
