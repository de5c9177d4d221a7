"""A timing table of an engine from what a client of its server can see: times to the first token, and between tokens.

Prefill: the time to the first token of prompts that no cache has, one at a time, less the time that a request of next
to no work takes. Decode: the time between tokens of requests that run together, by the share of KV blocks that they
hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

SHARES_APART_MIN = 0.002
"""Decode points whose used shares are nearer than this are one point."""

LEAST_MS = 0.001
"""Times are above zero in a table."""


class PrefillSample(msgspec.Struct, frozen=True):
    """Prompts of one length."""

    tokens: int
    ttft_ms: tuple[float, ...]


class DecodeSample(msgspec.Struct, frozen=True):
    """Requests that decoded together."""

    requests: int
    context_tokens: int
    """Tokens of each request's prompt."""
    used_share: float
    """Of the server's KV blocks, in the middle of the measurement."""
    gap_ms: tuple[float, ...]
    """Mean time between the tokens of each request, while all of them were decoding."""


class Measured(msgspec.Struct, frozen=True):
    """All samples of a server."""

    overhead_ms: float
    """Time of a request in addition to its prefill: the network, the server's own work."""
    prefill: tuple[PrefillSample, ...]
    decode: tuple[DecodeSample, ...]


def prefill_points(measured: Measured) -> list[list[float]]:
    """Return [tokens, ms] by rising tokens: medians, less the overhead."""
    return [
        [sample.tokens, _rounded(median(sample.ttft_ms) - measured.overhead_ms)]
        for sample in sorted(measured.prefill, key=lambda each: each.tokens)
        if sample.ttft_ms
    ]


def decode_points(measured: Measured) -> list[list[float]]:
    """Return [used share, ms] by rising share; points that are too near to be distinguished become one."""
    found = sorted((min(1.0, sample.used_share), median(sample.gap_ms)) for sample in measured.decode if sample.gap_ms)
    groups: list[list[tuple[float, float]]] = []
    for share, ms in found:
        if groups and share - groups[-1][0][0] < SHARES_APART_MIN:
            groups[-1].append((share, ms))
        else:
            groups.append([(share, ms)])
    return [[round(group[0][0], 4), _rounded(median(ms for _, ms in group))] for group in groups]


def timing_table(measured: Measured, source: str) -> dict[str, Any]:
    """Return the table that ``--timing`` reads; raises ``ValueError`` when a part has no points."""
    table = {"source": source, "prefill": prefill_points(measured), "decode": decode_points(measured)}
    for part in ("prefill", "decode"):
        if not table[part]:
            raise ValueError(f"making a timing table: no {part} was measured")
    return table


def gaps_while_all_decode(arrivals_ms: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean time between tokens of each request, while every request was decoding.

    ``arrivals_ms`` are when the tokens of each request arrived. Tokens that a busy client reads together, or that a
    server sends together, show nothing of the steps between them, so it is the whole of a request's time that counts,
    over all the tokens that were made in it: those that came with the first were made before.
    """
    if not arrivals_ms or any(len(each) < 2 for each in arrivals_ms):
        return []
    begin = max(each[0] for each in arrivals_ms)
    end = min(each[-1] for each in arrivals_ms)
    gaps = []
    for arrivals in arrivals_ms:
        within = [at for at in arrivals if begin <= at <= end]
        if made := sum(at > within[0] for at in within):
            gaps.append((within[-1] - within[0]) / made)
    return gaps


def _rounded(ms: float) -> float:
    return max(LEAST_MS, round(ms, 3))
