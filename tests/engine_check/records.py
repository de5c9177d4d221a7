"""Recorded checks of real engines, and ways to make them wrong."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from poolgrid.plugins.engine_check.core.evidence import Evidence, Heard, ProbeExchange

DIRECTORY = Path(__file__).parents[1] / "data" / "engine_records"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in DIRECTORY.glob("vllm-*.json.gz"))

Batch = list[Any]
"""A decoded payload: [timestamp, events, dp_rank]."""


@cache
def record(name: str) -> Evidence:
    return Evidence.from_json(gzip.decompress((DIRECTORY / f"{name}.json.gz").read_bytes()))


def with_batches(evidence: Evidence, change: Callable[[Batch], Any]) -> Evidence:
    """The same check, with every payload changed, of the replays too."""

    def changed(message: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return (*message[:-1], msgspec.msgpack.encode(change(msgspec.msgpack.decode(message[-1]))))

    return msgspec.structs.replace(
        evidence,
        heard=tuple(msgspec.structs.replace(each, message=changed(each.message)) for each in evidence.heard),
        replays=tuple(
            msgspec.structs.replace(each, messages=tuple(map(changed, each.messages))) for each in evidence.replays
        ),
    )


def with_events(evidence: Evidence, change: Callable[[dict[str, Any]], Any]) -> Evidence:
    """The same check, with every event changed; ``None`` leaves it out, a list puts several in its place."""

    def of_batch(batch: Batch) -> Batch:
        events: list[Any] = []
        for event in batch[1]:
            made = change(dict(event))
            events += made if isinstance(made, list) and made and isinstance(made[0], dict) else [made]
        return [batch[0], [event for event in events if event is not None], *batch[2:]]

    return with_batches(evidence, of_batch)


def with_stored(evidence: Evidence, change: Callable[[dict[str, Any]], Any]) -> Evidence:
    return with_events(evidence, lambda event: change(event) if event["type"] == "BlockStored" else event)


def with_exchanges(evidence: Evidence, change: Callable[[ProbeExchange], ProbeExchange]) -> Evidence:
    return msgspec.structs.replace(evidence, exchanges=tuple(map(change, evidence.exchanges)))


def with_messages(evidence: Evidence, change: Callable[[int, tuple[bytes, ...]], Sequence[bytes]]) -> Evidence:
    """The same check, with every live message changed, by its number."""
    return msgspec.structs.replace(
        evidence,
        heard=tuple(
            Heard(each.rank, tuple(change(number, each.message)), each.at_ms)
            for number, each in enumerate(evidence.heard)
        ),
    )


def without_messages(evidence: Evidence, lost: Sequence[int]) -> Evidence:
    """The same check, where some live messages did not arrive."""
    gone = set(lost)

    def moved(count: int) -> int:
        return count - sum(number < count for number in gone)

    heard = tuple(each for number, each in enumerate(evidence.heard) if number not in gone)
    lacking = msgspec.structs.replace(evidence, heard=heard)
    return with_exchanges(
        lacking,
        lambda each: msgspec.structs.replace(
            each, heard_before=moved(each.heard_before), heard_after=moved(each.heard_after)
        ),
    )


def numbered(message: tuple[bytes, ...], sequence: int) -> tuple[bytes, ...]:
    return (*message[:-2], sequence.to_bytes(8, "big"), message[-1])


def first_salted(evidence: Evidence) -> ProbeExchange:
    return next(each for each in evidence.exchanges if each.probe.salt)
