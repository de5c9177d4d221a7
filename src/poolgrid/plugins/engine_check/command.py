"""Runs a check of an engine server and shows what it came to: a table of what was compared, then the findings."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import zmq
from rich.console import Console
from rich.text import Text

from poolgrid.plugins.engine_check.check import gather_evidence
from poolgrid.plugins.engine_check.core.evidence import Evidence, RecordError
from poolgrid.plugins.engine_check.core.examination import Examination, examine
from poolgrid.plugins.engine_check.core.finding import Finding, FindingSeverity
from poolgrid.plugins.engine_check.core.transfer_rules import transfers_seen
from poolgrid.plugins.engine_check.server import EngineServer
from poolgrid.plugins.engine_check.settings import EngineCheckSettings
from poolgrid.server.cli.command_line import API_KEY_VARIABLE, cannot_write, command, print_json
from poolgrid.server.cli.options import with_settings
from poolgrid.server.cli.router_client import api_key_headers
from poolgrid.server.process import lifecycle
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.process.figures import UNKNOWN, counted, milliseconds
from poolgrid.server.process.tasks import unless
from poolgrid.server.process.terminal_table import Heading, TerminalTable, terminal
from poolgrid.server.workers.engines.server.server_client import ServerError

AREAS = ("publishers", "messages", "replay", "blocks", "salts and adapters", "reuse", "probes", "transfers")
"""The rows of the table: areas of findings."""

TIMEOUT_S = 60.0
"""How long an answer may take."""

STYLES = {FindingSeverity.FAULT: "bold red", FindingSeverity.WARNING: "yellow", FindingSeverity.NOTE: "dim"}

BASICS = (
    "url",
    "engine",
    "events",
    "model",
    "kv_block_size",
    "as_json",
)


@command()
@with_settings(EngineCheckSettings, renamed={"as_json": "--json"}, basics=BASICS)
def engine_check(settings: EngineCheckSettings) -> None:
    """Check an engine server's cache events."""
    raise SystemExit(run_engine_check(settings))


def run_engine_check(settings: EngineCheckSettings) -> int:
    """Check, or judge a recorded check; return the exit status."""
    errors = Console(stderr=True, highlight=False)
    if fault := cannot_write(settings.out):
        errors.print(f"checking an engine: --out: {fault}; nothing was sent", markup=False)
        return 2
    if settings.recorded is not None:
        return _judge_recorded(settings, settings.recorded, errors)
    status = 2

    async def main(stop: asyncio.Event) -> None:
        nonlocal status
        done = await unless(stop, _ask(settings, errors), "engine check")
        status = 130 if done is None else done

    lifecycle.run(main)
    return status


def _judge_recorded(settings: EngineCheckSettings, path: Path, errors: Console) -> int:
    try:
        evidence = Evidence.from_json(path.read_bytes())
    except (OSError, RecordError) as error:
        errors.print(f"checking an engine: --recorded {path}: {error}", markup=False)
        return 2
    return _show(settings, evidence)


async def _ask(settings: EngineCheckSettings, errors: Console) -> int:
    clock = SystemClock()

    def tell(words: str) -> None:
        if sys.stderr.isatty():
            errors.print(Text(words, style="dim"))

    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=api_key_headers()) as client:
        context = zmq.Context()
        server = None
        try:
            server = EngineServer(client, settings.url, clock, os.environ.get(API_KEY_VARIABLE, ""))
            evidence = await gather_evidence(settings, server, context, clock, tell)
        except (ServerError, zmq.ZMQError, ValueError) as error:
            errors.print(f"checking an engine: {error}", markup=False)
            return 2
        finally:
            if server is not None:
                server.close()
            context.term()
    if settings.out is not None:
        settings.out.write_bytes(evidence.to_json())
    return _show(settings, evidence)


def _show(settings: EngineCheckSettings, evidence: Evidence) -> int:
    found = examine(evidence)
    if settings.as_json:
        print_json(report(evidence, found))
    else:
        console = terminal()
        console.print(check_table(evidence, found))
        for finding in found.findings:
            console.print(words_of(finding))
        cause = found.verdict.cause
        console.print(Text(f"verdict: {cause.value}: {cause.meaning}."))
        if cause.fix:
            console.print(
                Text("".join(f"  - {each}\n" for each in found.verdict.evidence) + f"  To change: {cause.fix}.")
            )
    return 0 if found.is_usable else 1


def words_of(finding: Finding) -> Text:
    """Return a finding as a paragraph."""
    text = Text.assemble(
        (f"{finding.severity.value}: {finding.kind.value}", STYLES[finding.severity]),
        f" ({finding.place}): {finding.words}.",
    )
    return text.append(f" To set: {finding.remedy}.") if finding.remedy else text


def check_table(evidence: Evidence, found: Examination) -> TerminalTable:
    """Return what was compared, a row for each area."""
    told = evidence.told
    title = " ".join(word for word in (told.kind, told.version, told.model) if word)
    table = TerminalTable([Heading("what", False), Heading("result", False), Heading("seen", False)], title)
    for area in AREAS:
        if area == "transfers" and evidence.transfers is None:
            continue  # of a server that moves no KV
        of_area = [each for each in found.findings if each.kind.area == area]
        severities = {each.severity for each in of_area}
        worst = next((each for each in FindingSeverity if each in severities), None)
        seen = _seen(area, evidence, found)
        result = "ok" if worst is None or worst is FindingSeverity.NOTE else worst.value
        if worst in (None, FindingSeverity.NOTE) and not seen:
            result = "not seen"
        style = STYLES.get(worst, "") if worst else ""
        if result == "ok" and _lacks(area, found):
            result, style = "lacking", STYLES[FindingSeverity.FAULT]
        table.add(area, Text(result, style), seen or UNKNOWN)
    return table


def _lacks(area: str, found: Examination) -> bool:
    """Return whether figures are not as they should be, for a reason that another row names."""
    if area == "blocks":
        return bool(found.blocks.missing)
    return area == "reuse" and found.verdict.cause.is_fault and found.reuse.equal < len(found.reuse.comparisons)


def _seen(area: str, evidence: Evidence, found: Examination) -> str:
    blocks, reuse = found.blocks, found.reuse
    if area == "publishers":
        return ", ".join(f"{source.endpoint} (rank {source.rank})" for source in evidence.sources)
    if area == "messages":
        delay = "" if found.event_delay_ms is None else f"; {milliseconds(found.event_delay_ms)} after the answer"
        return f"{counted(found.messages, 'message')}, {found.forms}{delay}" if found.forms else ""
    if area == "replay":
        return ", ".join(
            f"{counted(len(each.messages), 'message')} from {each.asked_from} on" for each in evidence.replays
        )
    if area == "blocks":
        size = "" if found.block_size is None else f", of {found.block_size} tokens"
        return f"{blocks.taken_in} of {blocks.expected} expected in the index{size}" if blocks.expected else ""
    if area == "salts and adapters":
        keyed = [each for each in evidence.exchanges if (each.probe.salt or each.probe.lora) and not each.failure]
        return f"{counted(len(keyed), 'probe')} under a salt or an adapter" if keyed else ""
    if area == "transfers":
        return "" if evidence.transfers is None else transfers_seen(evidence.transfers)
    if area == "reuse":
        compared = len(reuse.comparisons)
        return f"{reuse.equal} of {counted(compared, 'probe')} as the events predict" if compared else ""
    answered = [each for each in evidence.exchanges if not each.failure]
    return f"{len(answered)} of {len(evidence.exchanges)} answered" if evidence.exchanges else ""


def report(evidence: Evidence, found: Examination) -> dict[str, Any]:
    """Return all of it for programs."""
    return {
        "server": evidence.told,
        "sources": evidence.sources,
        "contacts": {str(rank): contact.value for rank, contact in evidence.contacts.items()},
        "ok": found.is_usable,
        "verdict": found.verdict.cause.value,
        "evidence": found.verdict.evidence,
        "findings": found.findings,
        "messages": found.messages,
        "forms": found.forms,
        "block_size": found.block_size,
        "blocks_expected": found.blocks.expected,
        "blocks_in_index": found.blocks.taken_in,
        "probes_compared": len(found.reuse.comparisons),
        "probes_as_predicted": found.reuse.equal,
        "event_delay_ms": found.event_delay_ms,
        "transfers": evidence.transfers,
        "probes": [
            {
                "name": each.probe.name,
                "prompt_tokens": len(each.probe.tokens),
                "output_tokens": len(each.output),
                "cached_tokens": each.cached_tokens,
                "failure": each.failure,
            }
            for each in evidence.exchanges
        ],
    }
