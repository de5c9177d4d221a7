"""The whole judgement: evidence in; findings in the order of their causes, and figures, out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poolgrid.plugins.engine_check.core.block_rules import BlockFigures, block_findings, observed_block_size
from poolgrid.plugins.engine_check.core.evidence import Evidence
from poolgrid.plugins.engine_check.core.finding import RANK, Finding, FindingSeverity, Kind, fault, warning
from poolgrid.plugins.engine_check.core.message_rules import (
    Comparison,
    ReuseFigures,
    announcements,
    compare,
    contact_findings,
    message_findings,
)
from poolgrid.plugins.engine_check.core.said import RankStream, read_streams
from poolgrid.plugins.engine_check.core.transfer_rules import transfer_findings
from poolgrid.plugins.engine_check.core.views import ChainView, ExpectedPath, RouterView, expected_paths
from poolgrid.server.diagnosis.evidence import Observation, WorkerEvidence
from poolgrid.server.diagnosis.rules import ReuseVerdict, diagnose

CONSEQUENCES = frozenset({Kind.BLOCKS_MISSING, Kind.NOT_TAKEN_IN})
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
    verdict: ReuseVerdict
    """What `poolgrid doctor` calls it: the same rules, over what messages prove and what probes reused."""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        """Whether a router can use the events."""
        return not self.verdict.cause.is_fault and not any(
            each.severity is FindingSeverity.FAULT for each in self.findings
        )


def examine(evidence: Evidence) -> Examination:
    """Judge a check."""
    streams = read_streams(evidence)
    observed = observed_block_size(streams)
    # A configured size that is not the events' own is a finding; blocks are then compared in the events' size, so that
    # the other rules still apply.
    size = observed or evidence.told.block_size
    paths = expected_paths(evidence.exchanges, size) if size else []
    blocks, reuse = BlockFigures(), ReuseFigures()
    views: dict[int, RouterView] = {}
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
        findings += _missing(blocks, streams, paths)
    if evidence.transfers is not None:
        findings += transfer_findings(evidence.transfers)
    explained = any(each.severity is FindingSeverity.FAULT and each.kind not in CONSEQUENCES for each in findings)
    findings = [each for each in findings if not (explained and each.kind in CONSEQUENCES)]
    findings.sort(key=lambda each: (list(FindingSeverity).index(each.severity), RANK[each.kind]))
    verdict = diagnose(_of_worker(evidence, findings, streams, paths, views, reuse, size or 1))
    return Examination(
        findings,
        size,
        len(evidence.heard),
        _forms(streams),
        blocks,
        reuse,
        _delay(evidence),
        verdict,
    )


def _of_worker(
    evidence: Evidence,
    findings: Sequence[Finding],
    streams: Mapping[int, RankStream],
    paths: Sequence[ExpectedPath],
    views: Mapping[int, RouterView],
    reuse: ReuseFigures,
    size: int,
) -> WorkerEvidence:
    """Return what a check knows in the form that a router has of a worker: each probe is one of its requests."""
    proofs = [
        (each.kind.cause, each.words)
        for each in findings
        if each.kind.cause is not None and each.severity is FindingSeverity.FAULT
    ]
    stored = sum(len(event.hashes) for stream in streams.values() for _, _, event in stream.stored())
    return WorkerEvidence(
        evidence.told.model,
        size,
        [_observation(each, paths, size) for each in reuse.comparisons],
        held_blocks=stored,
        stored_blocks=stored,
        announcements=announcements(paths, views),
        unreported_requests=reuse.unsaid,
        proofs=proofs,
        needed=1,
    )


def _observation(compared: Comparison, paths: Sequence[ExpectedPath], size: int) -> Observation:
    path, probe = compared.path, compared.path.probe
    key = (probe.salt, probe.lora, probe.rank)
    before = [
        each.tokens
        for each in paths
        if each.number < path.number and (each.probe.salt, each.probe.lora, each.probe.rank) == key
    ]
    sent = max((_shared(probe.tokens, each) // size * size for each in before), default=0)
    return Observation(
        probe.name,
        path.number,
        len(probe.tokens),
        path.exchange.prompt_tokens,
        compared.predicted,
        compared.reported,
        sent,
        probe.domain,
        path.names[compared.predicted // size - 1] if compared.predicted else 0,
        compared.predicted,
        path.number,
        path.number,
        min(sent, (len(probe.tokens) - 1) // size * size),
    )


def _shared(tokens: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
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
