"""The whole judgement: evidence in; findings in the order of their causes, and figures, out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poolgrid.plugins.engine_check.core.block_rules import BlockFigures, block_findings, observed_block_size
from poolgrid.plugins.engine_check.core.evidence import Evidence
from poolgrid.plugins.engine_check.core.finding import RANK, Finding, FindingSeverity, Kind, fault, warning
from poolgrid.plugins.engine_check.core.message_rules import (
    ReuseFigures,
    compare,
    contact_findings,
    message_findings,
    reuse_findings,
)
from poolgrid.plugins.engine_check.core.said import RankStream, read_streams
from poolgrid.plugins.engine_check.core.transfer_rules import transfer_findings
from poolgrid.plugins.engine_check.core.views import ChainView, ExpectedPath, RouterView, expected_paths
from poolgrid.server.diagnosis.rules import OF_FINDING, Cause

CONSEQUENCES = frozenset({Kind.BLOCKS_MISSING, Kind.NOT_TAKEN_IN, Kind.CACHED_TOKENS_DIFFER})
"""What follows from other faults, and is a finding of its own only where no other fault explains it."""


@dataclass(slots=True)
class Examination:
    """What a check came to."""

    findings: list[Finding]
    block_size: int | None
    messages: int
    forms: str
    """How batches and events are written; empty = nothing arrived."""
    blocks: BlockFigures
    reuse: ReuseFigures
    event_delay_ms: float | None
    """From the end of an answer to its last event, the longest; ``None`` = not measured."""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def cause(self) -> Cause | None:
        """Return what `poolgrid doctor` would call the first fault; ``None`` without one that it knows."""
        named = (OF_FINDING.get(each.kind.value) for each in self.findings if each.severity is FindingSeverity.FAULT)
        return next((cause for cause in named if cause is not None), None)

    @property
    def faults(self) -> int:
        return sum(finding.severity is FindingSeverity.FAULT for finding in self.findings)


def examine(evidence: Evidence) -> Examination:
    """Judge a check."""
    streams = read_streams(evidence)
    observed = observed_block_size(streams)
    # A configured size that is not the events' own is a finding; blocks are then compared in the events' size, so that
    # the other rules still apply.
    size = observed or evidence.told.block_size
    paths = expected_paths(evidence.exchanges, size) if size else []
    blocks, reuse = BlockFigures(), ReuseFigures()
    findings = [*contact_findings(evidence, streams), *message_findings(evidence, streams)]
    findings += [
        fault(Kind.PROBE_FAILED, f"probe {exchange.probe.name!r}", exchange.failure)
        if not (exchange.probe.salt or exchange.probe.lora)
        else warning(Kind.PROBE_FAILED, f"probe {exchange.probe.name!r}", exchange.failure)
        for exchange in evidence.exchanges
        if exchange.failure
    ]
    if size:
        views = {rank: RouterView(stream, size) for rank, stream in streams.items()}
        compare(paths, views, size, reuse)
        for view in views.values():
            view.advance(len(evidence.heard))
        findings += block_findings(evidence, streams, paths, views, blocks)
        findings += reuse_findings(reuse, paths, streams, size)
        findings += _missing(blocks, streams, paths)
    if evidence.transfers is not None:
        findings += transfer_findings(evidence.transfers)
    explained = any(each.severity is FindingSeverity.FAULT and each.kind not in CONSEQUENCES for each in findings)
    findings = [each for each in findings if not (explained and each.kind in CONSEQUENCES)]
    findings.sort(key=lambda each: (list(FindingSeverity).index(each.severity), RANK[each.kind]))
    return Examination(
        findings,
        size,
        len(evidence.heard),
        _forms(streams),
        blocks,
        reuse,
        _delay(evidence),
    )


def _missing(figures: BlockFigures, streams: Mapping[int, RankStream], paths: Sequence[ExpectedPath]) -> list[Finding]:
    """Report for blocks that an index would lack whether the engine published them at all."""
    if not figures.missing:
        return []
    told = {path.probe.salt for path in paths}
    chains = []
    for stream in streams.values():
        chain = ChainView(told - {""})
        for _, said in stream.said():
            chain.take(said)
        chains.append(chain)
    known = {(block.token_name, block.salt) for chain in chains for block in chain.ever}
    left_out = [
        (path, position) for path, position in figures.missing if (path.token_names[position], path.probe.salt) in known
    ]
    findings = []
    for kind, missing, words in (
        (Kind.NOT_TAKEN_IN, left_out, "the engine published, and this router leaves out"),
        (Kind.BLOCKS_MISSING, [each for each in figures.missing if each not in left_out], "no event had"),
    ):
        if not missing:
            continue
        path, position = missing[0]
        size = len(path.tokens) // max(1, len(path.names))
        findings.append(
            fault(
                kind,
                f"probe {path.probe.name!r}, block {position} of {len(path.names)}",
                f"{len(missing)} of {figures.expected} blocks {words}, first that of tokens from about "
                f"{position * size} on",
            )
        )
    return findings


def _forms(streams: Mapping[int, RankStream]) -> str:
    batches = sorted({said.envelope_form for stream in streams.values() for _, said in stream.said()})
    events = sorted({form for stream in streams.values() for _, said in stream.said() for form in said.event_forms})
    if not batches:
        return ""
    return f"batches are {' and '.join(batches)}s, events {' and '.join(events)}s"


def _delay(evidence: Evidence) -> float | None:
    delays = [
        evidence.heard[exchange.heard_after - 1].at_ms - exchange.ended_ms
        for exchange in evidence.exchanges
        if exchange.ended_ms and exchange.heard_before < exchange.heard_after <= len(evidence.heard)
    ]
    return max(0.0, *delays) if delays else None
