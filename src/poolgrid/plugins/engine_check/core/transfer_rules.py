"""Transfers of KV between vLLM servers with NIXL: what their metrics count, and what is slow about them.

vLLM counts transfers where they arrive: on decode servers. Its metrics do not name the transport that UCX chose, so
its speed has to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from poolgrid.plugins.engine_check.core.finding import Finding, Kind, warning
from poolgrid.server.process.figures import counted, milliseconds

PREFIX: Final = "vllm:nixl_"

SAMPLES_MAX: Final = 4096
"""Lines of a page of metrics that are read: 16 buckets of four histograms for 64 engines."""

TCP_BYTES_PER_S: Final = 12.5e9
"""A network of 100 Gbit/s. TCP is below: 6.8 GB/s were measured on one host with UCX's defaults. NVLink and RDMA over
400 Gbit/s are far above."""

TELLING_BYTES: Final = 16e6
"""Smaller transfers take their time to set up, whatever carries them."""

PIECE_BYTES: Final = 64e3
"""Blocks of 16 tokens made pieces of 30 KB (37,000 for 1.1 GB), and posting those took longer than a decode step."""

POST_MS: Final = 20.0
"""What a decode server's step may be delayed by: two steps of a usual batch."""

PLACE: Final = "/metrics"


class TransferTotals(msgspec.Struct, frozen=True):
    """What a server has counted since its start, over all of its ranks."""

    transfers: int
    bytes_moved: float
    seconds: float
    post_seconds: float
    """Of the engine's own steps, to hand transfers to the network."""
    pieces: float
    """Memory ranges that were moved one by one."""
    failed: int = 0
    expired: int = 0
    """Requests whose KV was not fetched in time; counted on prefill servers."""


def transfer_totals(page: str) -> TransferTotals | None:
    """Return what a page of metrics counts of transfers; ``None`` without any, or when it cannot be read."""
    lines = [line for line in page.splitlines() if line.startswith(PREFIX)]
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines[:SAMPLES_MAX])):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                if not 0.0 <= sample.value < 1e18:
                    return None
                sums[name] = sums.get(name, 0.0) + sample.value
    except ValueError:
        return None
    return _totals(sums) if sums else None


def _totals(sums: Mapping[str, float]) -> TransferTotals:
    def of(name: str) -> float:
        return sums.get(name, 0.0)

    return TransferTotals(
        int(of("xfer_time_seconds_count")),
        of("bytes_transferred_sum"),
        of("xfer_time_seconds_sum"),
        of("post_time_seconds_sum"),
        of("num_descriptors_sum"),
        int(of("num_failed_transfers_total")),
        int(of("num_kv_expired_reqs_total")),
    )


def transfers_seen(totals: TransferTotals) -> str:
    """Return the figures of transfers in words; empty = there were none."""
    if not totals.transfers:
        return ""
    mean_mb = totals.bytes_moved / totals.transfers / 1e6
    speed = f" at {totals.bytes_moved / totals.seconds / 1e9:,.1f} GB/s" if totals.seconds else ""
    return f"{counted(totals.transfers, 'transfer')} of {mean_mb:,.0f} MB{speed}"


def transfer_findings(totals: TransferTotals) -> list[Finding]:
    """Return what is slow or wrong about transfers."""
    findings = []
    if totals.failed or totals.expired:
        findings.append(
            warning(
                Kind.TRANSFERS_FAILED,
                PLACE,
                f"{counted(totals.failed, 'transfer')} failed, the KV of {counted(totals.expired, 'request')} was not "
                "fetched in time",
                "VLLM_NIXL_SIDE_CHANNEL_HOST to an address that the other servers reach",
            )
        )
    if not totals.transfers:
        return findings
    speed, size = totals.bytes_moved / max(totals.seconds, 1e-9), totals.bytes_moved / totals.transfers
    if size >= TELLING_BYTES and speed < TCP_BYTES_PER_S:
        findings.append(
            warning(
                Kind.TRANSFERS_SLOW,
                PLACE,
                f"KV moves at {speed / 1e9:,.1f} GB/s, as over TCP: {size / 1e6:,.0f} MB take "
                f"{milliseconds(1000 * totals.seconds / totals.transfers)}; NVLink and RDMA are several times as fast",
                "UCX_TLS so that it has cuda_ipc (one host) or rc (RDMA); UCX_PROTO_INFO=y logs what UCX uses",
            )
        )
    post_ms = 1000 * totals.post_seconds / totals.transfers
    if (totals.pieces and totals.bytes_moved / totals.pieces < PIECE_BYTES) or post_ms > POST_MS:
        findings.append(
            warning(
                Kind.TRANSFERS_IN_PIECES,
                PLACE,
                f"a transfer is {totals.pieces / totals.transfers:,.0f} pieces of "
                f"{totals.bytes_moved / max(1.0, totals.pieces) / 1e3:,.0f} KB, and posting them takes the engine "
                f"{milliseconds(post_ms)}, in which no request gets a token",
                "--block-size 64 or more, the same on all servers",
            )
        )
    return findings
