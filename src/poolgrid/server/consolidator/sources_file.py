"""The sources file: publishers of KV events over ZMQ PUB, each with its worker.

A JSON list of two kinds of entries. One with a ``card`` is an engine that publishes itself: it becomes a worker of the
pool. One with a ``source`` is a further source of a worker that joins by itself, under that worker's name and rank; it
brings no card, for the worker has one.

Every problem is a ``ValueError`` that names file, entry, field, value and what is allowed; nothing of the file is used
then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from poolgrid.kernel.consolidation.consolidator import SOURCES_PER_WORKER_MAX
from poolgrid.kernel.wire.addresses import zmq_endpoint_problem
from poolgrid.kernel.wire.card import SHOWN_CHARS_MAX, WorkerCard, WorkerLimits, card_problem, name_problem
from poolgrid.kernel.wire.feed import CONSOLIDATOR_SOURCE, WORKER_SOURCE
from poolgrid.kernel.wire.identifiers import WorkerId, WorkerKey
from poolgrid.kernel.wire.limits import IDENTIFIER_BYTES_MAX, U32_MAX

SOURCES_MAX = 4096
"""Publishers in one sources file."""

REPLAY_TIMEOUT_MS_MAX = 3_600_000
"""Longest wait for a replay that a sources file may ask for: beyond an hour it is a mistake in the unit."""


class Publisher(msgspec.Struct, frozen=True, kw_only=True):
    """What every entry has: where it publishes, and which worker rank it is about."""

    worker_id: str
    endpoint: str
    """ZMQ endpoint of its PUB socket."""
    replay_endpoint: str = ""
    """ZMQ endpoint of its replay socket; empty = it has none."""
    topic: str = ""
    dp_rank: int = 0
    replay_timeout_ms: int = 1000

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(WorkerId(self.worker_id), self.dp_rank)


class PubSource(Publisher, frozen=True, kw_only=True):
    """An engine that publishes itself."""

    card: WorkerCard


class FurtherPub(Publisher, frozen=True, kw_only=True):
    """A publisher of events about a worker that joins by itself."""

    source: str
    """Its name among the sources of the worker."""
    outlives_worker: bool = False
    """Whether its blocks can still be used when the worker has begun another epoch."""


_FIELDS: dict[str, type] = {
    "worker_id": str,
    "endpoint": str,
    "replay_endpoint": str,
    "topic": str,
    "dp_rank": int,
    "replay_timeout_ms": int,
    "card": dict,
    "source": str,
    "outlives_worker": bool,
}
_WORDS = {str: "a string", int: "an integer", dict: "an object", bool: "true or false"}
_NEEDED = ("worker_id", "endpoint")


def load_sources(path: Path | None) -> list[PubSource | FurtherPub]:
    """Return the entries of a sources file; raises ``ValueError``."""
    if path is None:
        return []
    try:
        sources = decode_sources(path.read_bytes())
        _check_together(sources)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"reading the PUB sources {path}: {error}") from error
    return sources


def decode_sources(data: bytes) -> list[PubSource | FurtherPub]:
    """Return the entries of a JSON list in which cards are objects with the card's field names."""
    entries = msgspec.json.decode(data)
    if not isinstance(entries, list):
        raise ValueError(f"the file holds {_shown(entries)}, allowed is a list of entries")
    if len(entries) > SOURCES_MAX:
        raise ValueError(f"{len(entries)} entries, allowed are at most {SOURCES_MAX}")
    sources: list[PubSource | FurtherPub] = []
    for position, entry in enumerate(entries):
        try:
            sources.append(_source(entry))
        except ValueError as error:
            raise ValueError(f"entry {position}: {error}") from None
    return sources


def _source(entry: Any) -> PubSource | FurtherPub:
    if not isinstance(entry, dict):
        raise ValueError(f"is {_shown(entry)}, allowed is an object with {', '.join(_FIELDS)}")
    for name, value in entry.items():
        kind = _FIELDS.get(name)
        if kind is None:
            raise ValueError(f"has the unknown field {_shown(name)}; allowed are {', '.join(_FIELDS)}")
        if type(value) is not kind:
            raise ValueError(f"{name} is {_shown(value)}, allowed is {_WORDS[kind]}")
    for name in _NEEDED:
        if name not in entry:
            raise ValueError(f"lacks {name}, which every entry needs")
    if "source" in entry:
        if "card" in entry:
            raise ValueError(
                f"has card and source {_shown(entry['source'])}; a further source reports on a worker that joins "
                "with its own card: remove one of the two"
            )
        source: PubSource | FurtherPub = FurtherPub(**entry)
    elif "card" in entry:
        if "outlives_worker" in entry:
            raise ValueError(
                f"has outlives_worker {_shown(entry['outlives_worker'])} and card; it is for entries with source, "
                "which report on another process"
            )
        source = PubSource(**{**entry, "card": _card(entry["card"])})
    else:
        raise ValueError(
            "has neither card (an engine that publishes itself) nor source (a further source of a worker that joins by "
            "itself); one of the two is needed"
        )
    problem = _problem(source)
    if problem is not None:
        raise ValueError(problem)
    return source


def _problem(source: PubSource | FurtherPub) -> str | None:
    """Say what is wrong with an entry, or ``None``."""
    problem = _name_problem("worker_id", source.worker_id)
    if problem is not None:
        return problem
    for field, endpoint in (("endpoint", source.endpoint), ("replay_endpoint", source.replay_endpoint)):
        problem = zmq_endpoint_problem(endpoint, local=True) if endpoint or field == "endpoint" else None
        if problem is not None:
            return f"{field} is {_shown(endpoint)}, which {problem}; allowed are tcp://host:port and ipc://path"
    if not 1 <= source.replay_timeout_ms <= REPLAY_TIMEOUT_MS_MAX:
        return f"replay_timeout_ms is {source.replay_timeout_ms}, allowed are 1 to {REPLAY_TIMEOUT_MS_MAX}"
    if isinstance(source, FurtherPub):
        if source.source in (WORKER_SOURCE, CONSOLIDATOR_SOURCE):
            return (
                f"source is {source.source!r}, the name of the worker's own stream or of what the consolidator "
                "says; allowed is any other"
            )
        if not 0 <= source.dp_rank <= U32_MAX:
            return f"dp_rank is {source.dp_rank}, allowed are 0 to {U32_MAX}"
        return _name_problem("source", source.source)
    problem = card_problem(source.card)
    if problem is not None:
        return problem
    ranks = source.card.dp_size
    if not 0 <= source.dp_rank < ranks:
        return f"dp_rank is {source.dp_rank}, the card's dp_size {ranks} allows 0 to {ranks - 1}"
    return None


def _name_problem(field: str, name: str) -> str | None:
    if len(name.encode()) > IDENTIFIER_BYTES_MAX:
        return f"{field} has {len(name.encode())} bytes, allowed are 1 to {IDENTIFIER_BYTES_MAX}"
    return name_problem(field, name, needed=True)


def _check_together(sources: list[PubSource | FurtherPub]) -> None:
    """Raise for entries that are valid alone and not together."""
    engines: dict[WorkerKey, int] = {}
    named: dict[tuple[WorkerKey, str], int] = {}
    counted: dict[WorkerKey, int] = {}
    for position, source in enumerate(sources):
        if isinstance(source, PubSource):
            first = engines.setdefault(source.key, position)
            if first != position:
                raise ValueError(
                    f"entry {position}: worker {source.key} is listed twice, entry {first} lists it already"
                )
    for position, source in enumerate(sources):
        if not isinstance(source, FurtherPub):
            continue
        if source.key in engines:
            raise ValueError(
                f"entry {position}: source {source.source!r} reports on worker {source.key}, which entry "
                f"{engines[source.key]} lists with a card; allowed are workers that join by themselves"
            )
        first = named.setdefault((source.key, source.source), position)
        if first != position:
            raise ValueError(
                f"entry {position}: source {source.source!r} of worker {source.key} is listed twice, entry {first} "
                "lists it already; allowed is each name once a worker"
            )
        counted[source.key] = counted.get(source.key, 0) + 1
        if counted[source.key] >= SOURCES_PER_WORKER_MAX:
            raise ValueError(
                f"entry {position}: source {source.source!r} is number {counted[source.key]} of worker {source.key}, "
                f"allowed are at most {SOURCES_PER_WORKER_MAX - 1} in addition to its own"
            )


def _card(card: dict[str, Any]) -> WorkerCard:
    limits = card.get("limits")
    if isinstance(limits, dict):
        limits = _by_name("limits", limits, WorkerLimits.__struct_fields__)
    fields = _by_name("card", {**card, "limits": limits}, WorkerCard.__struct_fields__)
    try:
        return msgspec.convert(fields, WorkerCard)
    except msgspec.ValidationError as error:
        raise ValueError(f"card: {error}") from None


def _by_name(what: str, given: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Return named fields in the order of a positional struct, up to the last one given."""
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"{what} has unknown fields {', '.join(unknown)}; allowed are {', '.join(names)}")
    ordered: list[Any] = []
    for name in names[: max((names.index(name) + 1 for name in given), default=0)]:
        if name not in given:
            raise ValueError(f"{what} lacks {name}, which stands before other fields that are given")
        ordered.append(given[name])
    return ordered


def _shown(value: Any) -> str:
    """Return a value of the file as it may stand in an error: short, and on one line."""
    return repr(value)[:SHOWN_CHARS_MAX]
