"""A decision journal read back: entries in order, located, tolerant of what a later version wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.journal.ports import ReadableDisk
from poolgrid.kernel.journal.stored_records import TornTail, corrupt, segment_names, stored_payloads
from poolgrid.kernel.wire.identifiers import SEQUENCE, WorkerId, WorkerKey, are_sequences, nearness
from poolgrid.server.consolidator.journal.posix_disk import ReadOnlyDirectory
from poolgrid.server.router.decision_journal.checkpoints import believed_chains
from poolgrid.server.router.decision_journal.entries import (
    DECISIONS,
    AnyEntry,
    Checkpoint,
    DecisionMade,
    FirstTokenCame,
    OverlapRealised,
    RouterSettingsNoted,
    WorkersNamed,
    decision_of,
    decode,
)

DIRECTORY = "decisions"
"""Where the decision journals lie within a data_dir: one directory per router, named by its id."""


PROGRESS_EVERY_ENTRIES = 500


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One entry, its place, and the workers behind the numbers in it."""

    file: str
    position: int
    number: int
    size: int
    entry: AnyEntry
    workers: list[WorkerKey]
    """Workers named in this segment so far, by number."""


@dataclass(slots=True)
class ReadRemarks:
    """What was passed over while reading."""

    unknown: dict[str, int] = field(default_factory=dict)
    torn: list[TornTail] = field(default_factory=list)


def stored_entries(disk: ReadableDisk, remarks: ReadRemarks | None = None) -> Iterator[StoredEntry]:
    """Yield all entries in order; raise ``JournalCorrupt`` at damage, after everything before it."""
    notes = remarks or ReadRemarks()
    workers: list[WorkerKey] = []
    file = ""
    for stored in stored_payloads(disk, DECISIONS, torn=notes.torn):
        if stored.file != file:
            file, workers = stored.file, []
        try:
            entry = decode(stored.payload)
            if isinstance(entry, WorkersNamed):
                workers.extend(WorkerKey(WorkerId(worker_id), rank) for worker_id, rank in entry.workers)
            elif isinstance(entry, DecisionMade):
                decision_of(entry, workers)
            elif isinstance(entry, Checkpoint) and entry.beliefs is not None:
                believed_chains(entry.beliefs)
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            raise corrupt(
                stored.file, stored.position, stored.number, f"the entry does not decode ({error})", DECISIONS
            ) from None
        if isinstance(entry, str):
            notes.unknown[entry] = notes.unknown.get(entry, 0) + 1
        else:
            yield StoredEntry(stored.file, stored.position, stored.number, len(stored.payload), entry, workers)


def decision_directories(directory: Path) -> list[Path]:
    """Return the decision journals of a data_dir, or the directory itself when it is one."""
    below = directory / DIRECTORY
    if below.is_dir():
        return sorted(path for path in below.iterdir() if path.is_dir())
    names = segment_names(ReadOnlyDirectory(directory))
    first = ReadOnlyDirectory(directory).read(names[0], 0, 8) if names else b""
    return [directory] if first == DECISIONS.magic else []


@dataclass(slots=True)
class RecordedDecision:
    """One decision in a journal."""

    decision: Decision
    stored: StoredEntry
    settings: RouterSettingsNoted | None


def decisions_about(
    disk: ReadableDisk, request_id: str, on_progress: Callable[[int], None] = lambda _: None
) -> list[RecordedDecision]:
    """Return a request's decisions, first attempt first, with what the workers then really reused.

    It may be asked for by any name that people have of it (``poolgrid.kernel.wire.identifiers``). By one that several
    clients chose, those of the latest are returned; of a request with several sequences those of each.

    ``on_progress`` gets the bytes of entries read, now and then.
    """
    found: list[RecordedDecision] = []
    ids: list[str] = []
    """The request that ``found`` is about, or its sequences."""
    nearest = SEQUENCE
    settings: RouterSettingsNoted | None = None
    done = 0
    for count, stored in enumerate(stored_entries(disk)):
        done += stored.size
        if count % PROGRESS_EVERY_ENTRIES == 0:
            on_progress(done)
        entry = stored.entry
        if isinstance(entry, RouterSettingsNoted):
            settings = entry
        elif isinstance(entry, DecisionMade):
            made = entry.request.request_id
            near = None if entry.attempt or made in ids else nearness(request_id, made)
            if near is not None and near <= nearest:
                if not (near == SEQUENCE and ids and are_sequences(made, ids[0])):
                    ids.clear()
                    found.clear()
                ids.append(made)
                nearest = near
            if made in ids:
                found.append(RecordedDecision(decision_of(entry, stored.workers), stored, settings))
        elif isinstance(entry, OverlapRealised) and entry.request_id in ids:
            for recorded in found:
                decision = recorded.decision
                if (decision.request.request_id, decision.attempt) == (entry.request_id, entry.attempt):
                    decision.realised_cached_tokens = entry.cached_tokens
        elif isinstance(entry, FirstTokenCame) and entry.request_id in ids:
            for recorded in found:
                decision = recorded.decision
                if (decision.request.request_id, decision.attempt) == (entry.request_id, entry.attempt):
                    decision.realised_ttft_ms = entry.ttft_ms
    return found
