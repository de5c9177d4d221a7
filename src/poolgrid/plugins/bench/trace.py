"""Mooncake-format traces: rows of arrival time, lengths and prefix-block ids, and what a perfect cache would reuse.

One JSON object a line: ``timestamp`` (ms since the start), ``input_length`` and ``output_length`` (tokens),
``hash_ids`` (one id per 512-token block of the prompt, the last usually partial). An id names the whole prefix up to
its block, so two rows share exactly the blocks of their common leading ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from poolgrid.plugins.bench.prompt import PlannedRequest

TRACE_BLOCK_TOKENS = 512
"""Tokens per ``hash_ids`` entry in the published traces."""

LINE_BYTES_MAX = 4 * 1024 * 1024
"""Longest trace line: the ids of a 100 M-token prompt, four orders above the longest published one."""

Count = Annotated[int, Meta(ge=0, le=2**53)]


class TraceError(ValueError):
    """A trace does not keep to the format; the message names file, line and field."""


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace, as it is written."""

    timestamp: Annotated[float, Meta(ge=0)]
    """Arrival, ms since the start of the trace."""
    input_length: Annotated[int, Meta(ge=1, le=2**53)]
    output_length: Count
    hash_ids: tuple[Count, ...]


_decoder = msgspec.json.Decoder(TraceRow)


def parse_row(line: bytes, place: str) -> TraceRow:
    """Return the row of one line, or raise ``TraceError`` that names ``place`` and the field."""
    if len(line) > LINE_BYTES_MAX:
        raise TraceError(f"{place}: {len(line)} bytes, allowed are at most {LINE_BYTES_MAX}; nothing was sent")
    try:
        row = _decoder.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # msgspec ends its message with the path of the field, e.g. "- at `$.input_length`".
        raise TraceError(f"{place}: {error}; nothing was sent") from None
    needed = -(-row.input_length // TRACE_BLOCK_TOKENS)
    if len(row.hash_ids) != needed:
        raise TraceError(
            f"{place}: hash_ids has {len(row.hash_ids)} entries, input_length {row.input_length} needs {needed} "
            f"(one per {TRACE_BLOCK_TOKENS} tokens); nothing was sent"
        )
    return row


def parse_trace(lines: Iterable[bytes], name: str, requests: int | None = None) -> list[TraceRow]:
    """Return the rows of a trace, at most ``requests`` of them; arrival times must not go backwards."""
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, start=1):
        if requests is not None and len(rows) >= requests:
            break
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        row = parse_row(line, place)
        if rows and row.timestamp < rows[-1].timestamp:
            raise TraceError(
                f"{place}: timestamp is {row.timestamp}, the row before has {rows[-1].timestamp}, "
                "allowed are times that do not go backwards; nothing was sent"
            )
        rows.append(row)
    if not rows:
        raise TraceError(f"{name}: no requests in it; nothing was sent")
    return rows


def read_trace(path: Path, requests: int | None = None) -> list[TraceRow]:
    """Read the first ``requests`` rows of a trace file (all by default)."""
    try:
        with path.open("rb") as lines:
            return parse_trace(lines, str(path), requests)
    except OSError as error:
        raise TraceError(f"reading the trace {path}: {error.strerror or error}; nothing was sent") from None


def plan_trace(
    rows: Sequence[TraceRow],
    *,
    speed: float = 1.0,
    length_scale: float = 1.0,
    isl_max: int | None = None,
    osl_max: int | None = None,
) -> list[PlannedRequest]:
    """Turn rows into requests: times divided by ``speed``, lengths times ``length_scale``, then cut to the maxima.

    The tokens per id scale like the lengths, so rows share the same leading ids, and the same share of their tokens,
    at every scale. ``length_scale`` must leave at least one token per id.
    """
    block_tokens = round(TRACE_BLOCK_TOKENS * length_scale)
    if block_tokens < 1:
        raise TraceError(
            f"length scale is {length_scale}, allowed are values from {1 / TRACE_BLOCK_TOKENS} "
            "(one token per trace block); nothing was sent"
        )
    planned = []
    for index, row in enumerate(rows):
        last = row.input_length - (len(row.hash_ids) - 1) * TRACE_BLOCK_TOKENS
        last_scaled = max(1, min(block_tokens, round(last * block_tokens / TRACE_BLOCK_TOKENS)))
        isl = (len(row.hash_ids) - 1) * block_tokens + last_scaled
        if isl_max is not None:
            isl = min(isl, isl_max)
        osl = max(1, round(row.output_length * length_scale))
        if osl_max is not None:
            osl = min(osl, osl_max)
        planned.append(
            PlannedRequest(
                index=index,
                at_ms=row.timestamp / speed,
                block_ids=row.hash_ids[: -(-isl // block_tokens)],
                block_tokens=block_tokens,
                isl=isl,
                osl=osl,
            )
        )
    return planned


def ideal_cached_tokens(requests: Iterable[PlannedRequest]) -> int:
    """Prompt tokens that one infinite cache would reuse, the requests taken in order.

    A request reuses its leading block ids that an earlier request had; the last block counts with the tokens it has.
    Source: the counting script that the Mooncake traces are described with, over tokens instead of blocks.
    """
    seen: set[int] = set()
    cached = 0
    for request in requests:
        lead = 0
        for block_id in request.block_ids:
            if block_id not in seen:
                break
            lead += 1
        cached += min(lead * request.block_tokens, request.isl)
        seen.update(request.block_ids)
    return cached


def ideal_cached_token_ratio(requests: Sequence[PlannedRequest]) -> float | None:
    """Share of all prompt tokens that one infinite cache would reuse; ``None`` without requests."""
    total = sum(request.isl for request in requests)
    return ideal_cached_tokens(requests) / total if total else None
