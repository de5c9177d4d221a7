"""`poolgrid journal ...`: look into a journal's directory, check it, take its records elsewhere.

All only read, take no lock, and may run while a consolidator writes the journal. Rows go to standard
output, progress and remarks to standard error. Exit status: 0; 1 when the journal is not sound or what was asked for is
not in it; 2 for wrong arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click
from rich.text import Text

from poolgrid.kernel.consolidation.pool_state import BLOCKS_PER_WORKER_MAX, PoolState
from poolgrid.kernel.journal.framing import JournalCorrupt
from poolgrid.kernel.journal.ports import ReadableDisk
from poolgrid.kernel.journal.stored_records import StoredRecord, TornTail, stored_records
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.server.cli.command_line import Group, as_json, print_json
from poolgrid.server.cli.journal_directory import (
    JournalFiles,
    UsageError,
    decisions_below,
    journal_errors,
    open_journal,
    progress_bar,
    survey_bytes,
)
from poolgrid.server.consolidator.journal.inspection import (
    NotKept,
    Verified,
    check_journal,
    chosen_events,
    next_offset,
    offset_at,
    reaches_back_to,
    record_row,
    state_at,
    survey,
)
from poolgrid.server.process.figures import UNKNOWN, counted, size
from poolgrid.server.process.terminal_table import Heading, TerminalTable, terminal
from poolgrid.server.router.decision_journal.reader import DIRECTORY, ReadRemarks, stored_entries

directory = click.argument(
    "directory",
    help="Directory of the journal (a consolidator's data_dir), or nats://HOST:PORT/POOL of one on NATS; "
    "credentials and certificates are those of POOLGRID_NATS_*.",
)
first = click.option("--from", "first", help="First record: an offset, or a time (2026-11-21T14:00:00, UTC).")
to = click.option("--to", help="Record after the last: an offset, or a time (UTC).")
worker = click.option("--worker", help="Only this worker: an id, or id/rank.")


@click.group(cls=Group)
def journal() -> None:
    """List, print, check and export the journal of a pool."""


def offset_or_time(text: str) -> tuple[int | None, int | None]:
    """Return an offset, or a Unix time in milliseconds; times without a zone are UTC."""
    if text.isdigit():
        return int(text), None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is neither an offset nor a time; allowed are integers and times like 2026-11-21T14:00:00"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return None, int(moment.timestamp() * 1000)


def resolve(disk: ReadableDisk, text: str) -> int:
    """Return the offset that an offset or a time means."""
    offset, time_ms = offset_or_time(text)
    if offset is not None:
        return offset
    assert time_ms is not None
    return offset_at(disk, time_ms)


def clock_time(time_ms: int) -> str:
    """Return a Unix time in milliseconds as people write it, UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S") if time_ms else UNKNOWN


def _table(*headings: str) -> TerminalTable:
    return TerminalTable([Heading(heading, numeric=number > 0) for number, heading in enumerate(headings)])


@journal.command("ls")
@directory
@as_json
def list_files(directory: str, as_json: bool) -> None:
    """List segments and snapshots with their offsets, times and sizes, and the streams that are in them."""
    with journal_errors():
        disk = open_journal(directory)
        found = survey(disk)
        try:
            streams = _streams(state_at(disk, next_offset(disk), BLOCKS_PER_WORKER_MAX))
            problem = ""
        except (JournalCorrupt, NotKept) as error:
            streams, problem = [], str(error)
        in_use = disk.is_in_use()
    if as_json:
        segments = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in found.segments]
        snapshots = [{name: getattr(each, name) for name in each.__dataclass_fields__} for each in found.snapshots]
        answer = {"directory": str(directory), "in_use": in_use, "segments": segments, "snapshots": snapshots}
        print_json({**answer, "streams": streams, "problem": problem})
        return
    console = terminal()
    # Offsets are copied into --from and --at: they have no commas.
    files = _table("file", "records from", "to before", "begun (UTC)", "size")
    for segment in found.segments:
        name = Text.assemble(segment.file, (f" ({segment.damage})" if segment.damage else "", "yellow"))
        row = (str(segment.first_offset), str(segment.next_offset), clock_time(segment.created_ms))
        files.add(name, *row, size(segment.bytes))
    for snapshot in found.snapshots:
        files.add(snapshot.file, UNKNOWN, str(snapshot.offset), UNKNOWN, size(snapshot.bytes))
    console.print(files)
    if streams:
        table = _table("worker", "source", "epoch", "next seq", "blocks", "requests")
        for stream in streams:
            numbers = (f"{stream[key]:,}" for key in ("blocks", "requests"))
            table.add(*(str(stream[key]) for key in ("worker", "source", "epoch", "next_seq")), *numbers)
        console.print(Text(), table)
    files_found = f"{counted(len(found.segments), 'segment')} and {counted(len(found.snapshots), 'snapshot')}"
    console.print(f"{size(found.bytes)} in {files_found}", soft_wrap=True)
    if in_use:
        console.print("a running process writes this journal")
    if problem:
        console.print(Text.assemble(("not sound: ", "yellow"), problem), soft_wrap=True)


def _streams(pool: PoolState) -> list[dict[str, Any]]:
    return [
        {
            "worker": str(key),
            "source": source,
            "epoch": cursor.epoch,
            "next_seq": cursor.next_seq,
            "blocks": worker.presence.count_of(source),
            "requests": len(worker.requests),
        }
        for key, worker in sorted(pool.workers.items())
        for source, cursor in sorted(worker.cursors.items())
    ]


@journal.command()
@directory
@first
@to
@click.option("--type", "types", multiple=True, help="Only events of this kind; may be given again.")
@worker
def cat(directory: str, first: str | None, to: str | None, types: tuple[str, ...], worker: str | None) -> None:
    """Print records as JSON lines."""
    with journal_errors():
        disk = open_journal(directory)
        unknown: dict[str, int] = {}
        extra = 0
        for stored in _chosen(disk, first, to, worker):
            for kind in stored.understood.unknown:
                unknown[kind] = unknown.get(kind, 0) + 1
            extra += stored.understood.extra_fields
            events = chosen_events(stored.record, types)
            if events or not types:
                sys.stdout.write(json.dumps(record_row(stored, events)) + "\n")
        sys.stdout.flush()
    _say_unknown(unknown, extra)


def _chosen(disk: ReadableDisk, first: str | None, to: str | None, worker: str | None) -> Iterator[StoredRecord]:
    from_offset = 0 if first is None else resolve(disk, first)
    to_offset = None if to is None else resolve(disk, to)
    for stored in stored_records(disk, from_offset, count_fields=True, to_offset=to_offset):
        record = stored.record
        if worker is None or worker in (record.worker_id, f"{record.worker_id}/{record.dp_rank}"):
            yield stored


def _say_unknown(unknown: dict[str, int], extra_fields: int) -> None:
    for kind, count in sorted(unknown.items()):
        click.echo(f"skipped {count:,} of the unknown kind {kind}: a later version wrote them", err=True)
    if extra_fields:
        click.echo(f"skipped {counted(extra_fields, 'trailing field')} that this version does not know", err=True)


@journal.command()
@directory
@as_json
def verify(directory: str, as_json: bool) -> None:
    """Check every byte, and every snapshot against the records; status 1 with file, offset and remedy if not sound."""
    with journal_errors():
        disk = open_journal(directory)
        total = survey_bytes(disk)
        try:
            with progress_bar("verifying", total) as on_progress:
                found = check_journal(disk, BLOCKS_PER_WORKER_MAX, on_progress)
            _refuse_torn(disk, found.torn, "the tail, which was never acknowledged under fsync=always")
            decisions = {router: _verify_decisions(router, files) for router, files in decisions_below(directory)}
        except JournalCorrupt as error:
            if as_json:
                fault = {name: getattr(error, name) for name in ("file", "position", "offset", "detail", "remedy")}
                print_json({"sound": False, **fault})
            raise
    if as_json:
        print_json({"sound": True, **_verified_row(found), "decisions": decisions})
    else:
        click.echo(
            f"sound: {counted(found.records, 'record')}, {counted(found.snapshots, 'snapshot')} "
            f"({found.compared_snapshots:,} of them compared with the records before), {size(total)}"
        )
        for router, entries in decisions.items():
            click.echo(f"sound: {counted(entries, 'entry')} in the decisions of {router}")
        if found.torn is not None:
            click.echo(f"the last record of {found.torn.file} is being written")
    _say_unknown(found.unknown, found.extra_fields)


def _refuse_torn(disk: JournalFiles, torn: TornTail | None, what: str) -> None:
    """Raise for a torn tail, unless a process is writing there now."""
    if torn is not None and not disk.is_in_use():
        raise JournalCorrupt(
            torn.file,
            torn.position,
            torn.offset,
            f"a torn tail: {torn.detail}",
            f"records before {torn.offset} are sound; the next process that opens the directory to write cuts {what}",
        )


def _verify_decisions(router: str, disk: JournalFiles) -> int:
    remarks = ReadRemarks()
    try:
        count = sum(1 for _ in stored_entries(disk, remarks))
        _refuse_torn(disk, remarks.torn[0] if remarks.torn else None, "the tail")
    except JournalCorrupt as error:
        # The name alone would be looked for in the wrong directory.
        file = f"{DIRECTORY}/{router}/{error.file}"
        raise JournalCorrupt(file, error.position, error.offset, error.detail, error.remedy) from None
    return count


def _verified_row(found: Verified) -> dict[str, Any]:
    return {
        "records": found.records,
        "snapshots": found.snapshots,
        "compared_snapshots": found.compared_snapshots,
        "unknown": found.unknown,
        "extra_fields": found.extra_fields,
        "being_written": found.torn is not None,
    }


@journal.command()
@directory
@click.option("--at", help="State before this offset, or at this time (UTC); the end when not given.")
@as_json
def state(directory: str, at: str | None, as_json: bool) -> None:
    """Show the pool as it was at any moment the journal reaches: members, blocks by worker and tier, load."""
    with journal_errors():
        disk = open_journal(directory)
        offset = next_offset(disk) if at is None else resolve(disk, at)
        begin = reaches_back_to(disk)
        with progress_bar("folding", max(1, offset - begin), as_bytes=False) as on_progress:
            pool = state_at(disk, offset, BLOCKS_PER_WORKER_MAX, lambda reached: on_progress(reached - begin))
    rows = [_worker_row(pool, key) for key in sorted(pool.workers)]
    if as_json:
        print_json({"offset": pool.offset, "workers": rows})
        return
    tiers = [tier.name.lower() for tier in Tier]
    table = TerminalTable(
        [
            Heading("worker", numeric=False),
            Heading("model", numeric=False, optional=True),
            Heading("role", numeric=False, optional=True),
            Heading("state", numeric=False),
            *(Heading(f"{tier} blocks", optional=not any(row["blocks"][tier] for row in rows)) for tier in tiers),
            *map(Heading, ("requests", "prefill tok", "active blocks")),
        ]
    )
    for row in rows:
        counts = [*(row["blocks"][tier] for tier in tiers), len(row["requests"]), row["prefill_tokens"]]
        names = (row[key] for key in ("worker", "model", "role", "state"))
        table.add(*names, *(f"{count:,}" for count in (*counts, row["active_blocks"])))
    console = terminal()
    console.print(table)
    console.print(f"state before record {pool.offset}, {counted(len(rows), 'worker rank')}")


def _worker_row(pool: PoolState, key: Any) -> dict[str, Any]:
    worker = pool.workers[key]
    counts = worker.presence.counts()
    requests = list(worker.requests.values())
    load = worker.load
    return {
        "worker": str(key),
        "worker_id": key.worker_id,
        "dp_rank": key.dp_rank,
        "epoch": worker.epoch,
        "model": worker.card.model,
        "role": worker.card.role.name.lower(),
        "state": "draining" if worker.draining else "restating" if worker.restating else "ready",
        "blocks": {tier.name.lower(): counts[tier] for tier in Tier},
        "prefill_tokens": sum(each.isl - each.cached_tokens for each in requests if each.prefilling),
        "active_blocks": sum(each.active_blocks for each in requests),
        "running_requests": load.running_requests if load else 0,
        "waiting_requests": load.waiting_requests if load else 0,
        "requests": [
            {
                "request_id": each.request_id,
                "isl": each.isl,
                "cached_tokens": each.cached_tokens,
                "active_blocks": each.active_blocks,
                "prefilling": each.prefilling,
            }
            for each in requests
        ],
    }
