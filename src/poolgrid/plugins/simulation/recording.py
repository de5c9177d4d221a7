"""What `poolgrid simulate` and `poolgrid what-if` play: a trace or recorded traffic, and the engines for it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from poolgrid.kernel.consolidation.pool_state import BLOCKS_PER_WORKER_MAX
from poolgrid.kernel.decision.policy import Policy
from poolgrid.kernel.wire.identifiers import Role
from poolgrid.plugins.bench.trace import TraceError, read_trace
from poolgrid.plugins.simulated.core.engine import SimulatedLimits
from poolgrid.plugins.simulation.agent_workload import AgentWorkload, agent_workload
from poolgrid.plugins.simulation.agents import PREFIX_TOKENS, AgentDraws, AgentPlan
from poolgrid.plugins.simulation.mixed_traffic import SINGLE_KINDS, MixedDraws, MixedWorkload
from poolgrid.plugins.simulation.pool import RouterFleet, RunResult, SimulatedPool
from poolgrid.plugins.simulation.session_line import line_of
from poolgrid.plugins.simulation.settings import EngineSettings
from poolgrid.plugins.simulation.workload import (
    RecordedRequest,
    WorkerSpeeds,
    Workload,
    build_workload,
    recorded_workload,
)
from poolgrid.server.cli.command_line import json_text, print_json
from poolgrid.server.cli.journal_directory import UsageError, open_decisions, open_journal, progress_bar, survey_bytes
from poolgrid.server.process.figures import counted
from poolgrid.server.process.terminal_table import TerminalTable, terminal
from poolgrid.server.router.decision_journal.entries import RouterSettingsNoted
from poolgrid.server.router.decision_journal.traffic import RecordedTraffic, Recording, read_recording
from poolgrid.server.workers.timing import (
    SPEEDUP_MAX,
    ScaledTiming,
    TableError,
    TimingModel,
    timing_model,
)


def latency_summary(values: Sequence[float], weights: Sequence[int] | None = None) -> dict[str, float]:
    """Return mean, p50, p90 and p99 of values that occurred ``weights`` times each (once when not given)."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    array = np.asarray(values, np.float64)
    counts = np.ones(len(array)) if weights is None else np.asarray(weights, np.float64)
    order = np.argsort(array, kind="stable")
    array, counts = array[order], counts[order]
    cumulative = np.cumsum(counts)

    def percentile(share: float) -> float:
        # Nearest rank: the smallest value that at least this share of all occurrences does not exceed.
        return float(array[min(int(np.searchsorted(cumulative, share * cumulative[-1])), len(array) - 1)])

    return {
        "mean": float((array * counts).sum() / cumulative[-1]),
        "p50": percentile(0.5),
        "p90": percentile(0.9),
        "p99": percentile(0.99),
    }


def prediction_summary(predicted: Sequence[tuple[float, int, float, float]]) -> dict[str, float] | None:
    """Return how far expected TTFTs were from what they became; ``None`` for a policy that expects none.

    ``error`` is the sum of all distances over the sum of what was; ``bias`` is above 1 when too much was expected;
    ``p50`` and ``p90`` are of each request's distance as a share of its TTFT.
    """
    if not predicted:
        return None
    table = np.asarray(predicted, np.float64)
    expected, real = table[:, 2], table[:, 3]
    distances = np.abs(expected - real)
    shares = latency_summary((distances / real).tolist())
    return {
        "requests": len(predicted),
        "error": float(distances.sum() / real.sum()),
        "bias": float(expected.sum() / real.sum()),
        "p50": shares["p50"],
        "p90": shares["p90"],
    }


def policy_report(result: RunResult, workers: int) -> dict[str, Any]:
    """Return the figures of one policy."""
    tokens = result.worker_tokens
    singles = sum(len(each) for (kind, _), each in result.classes.items() if kind in SINGLE_KINDS)
    turns = result.requests - singles
    return {
        "requests": result.requests,
        "cached_token_ratio": result.cached_tokens / result.prompt_tokens if result.prompt_tokens else 0.0,
        "overlap_found_token_ratio": result.overlap_found_tokens / result.prompt_tokens
        if result.prompt_tokens
        else 0.0,
        "ttft_ms": latency_summary(result.ttft_ms),
        "short_prompt_ttft_ms": latency_summary(result.short_ttft_ms),
        "ttft_targets_met_ratio": result.targets_met / result.requests if result.requests else 0.0,
        "predicted_ttft": prediction_summary(result.predicted),
        "itl_ms": latency_summary([gap for gap, _ in result.itl_ms], [count for _, count in result.itl_ms]),
        "busy_ratio": result.busy_ms / (workers * result.span_ms) if result.span_ms else 0.0,
        "worker_tokens_max_over_mean": max(tokens) / (sum(tokens) / len(tokens)) if sum(tokens) else 0.0,
        "turns_per_minute": 60_000 * turns / result.span_ms if result.span_ms else 0.0,
        "first_turn_ms": {**latency_summary(result.first_turn_ms), "max": max(result.first_turn_ms, default=0.0)},
        "classes": _classes(result, 0),
        "tenants": _classes(result, 1),
        "waited_turns": result.waited,
        "preemptions": result.preemptions,
        "crowded": result.crowded,
        "output_tokens": result.output_tokens,
        "engine_steps": result.steps,
    }


def _classes(result: RunResult, place: int) -> dict[str, dict[str, float]]:
    """Return TTFTs by the kind of session (place 0) or by tenant (1)."""
    found: dict[str, list[float]] = {}
    for key, ttft_ms in result.classes.items():
        found.setdefault(key[place], []).extend(ttft_ms)
    return {
        name: {"requests": len(each), **latency_summary(each), "max": max(each)} for name, each in sorted(found.items())
    }


TRACE_WORKERS = 8


@dataclass(slots=True)
class RecordingStage:
    """Traffic, and the engines that it is played on."""

    name: str
    workload: Workload | AgentWorkload | MixedWorkload
    workers: int
    limits: SimulatedLimits
    timing: TimingModel
    noted: RouterSettingsNoted | None = None
    """What the recorded router noted of itself; ``None`` for a trace."""
    measured: dict[str, Any] | None = None
    """What was measured while it was recorded, by the keys of a simulation's report."""
    remarks: list[str] = field(default_factory=list)

    def play(
        self,
        name: str,
        policy: Policy,
        routers: RouterFleet | None = None,
        speeds: WorkerSpeeds | None = None,
        admission: str = "",
    ) -> dict[str, Any]:
        """Return the figures of a policy, on fresh engines, and show its progress under a name."""
        line = line_of(admission, self.workload.block_size)
        pool = SimulatedPool(
            self.workload, policy, self.workers, self.limits, self.timing, routers=routers, speeds=speeds, line=line
        )
        with progress_bar(name, len(self.workload.requests), as_bytes=False) as on_progress:
            return policy_report(pool.run(on_progress), self.workers)

    def report(self, speed: float, policies: Mapping[str, Any], routers: RouterFleet, **more: Any) -> dict[str, Any]:
        """Return the figures of several policies or settings, and what they were played on."""
        return {
            "trace": self.name,
            "requests": len(self.workload.requests),
            "workers": self.workers,
            "routers": routers.routers,
            "event_delay_ms": routers.event_delay_ms,
            "speed": speed,
            "block_size": self.workload.block_size,
            "blocks_per_worker": self.limits.total_kv_blocks,
            "ideal_cached_token_ratio": self.workload.ideal_cached_token_ratio,
            **more,
            "policies": dict(policies),
        }


def show_report(report: dict[str, Any], table: TerminalTable, as_json: bool, out: Path | None) -> None:
    """Print a report as a table or as JSON, and write it where that is asked for."""
    if as_json:
        print_json(report)
    else:
        terminal().print(table)
    if out is not None:
        out.write_text(json_text(report), encoding="utf-8")


def timing_of(settings: EngineSettings, recorded_speedup: float = 0.0) -> TimingModel:
    """Return the step times of the engines; ``recorded_speedup`` is that of recorded simulated ones, 0 = none were."""
    try:
        base = timing_model(settings.timing)
    except (TableError, OSError) as error:
        raise UsageError(str(error)) from None
    speedup = settings.speedup or recorded_speedup or 1.0
    return base if speedup == 1 else ScaledTiming(base, speedup)


AGENT_SEED = 1
AGENT_TENANTS = 4
SESSIONS_PER_AGENT = 4
"""Sessions that each slot plays, one after the other: beginning and end count little."""


def load_agents(agents: int, settings: EngineSettings, block_size: int) -> RecordingStage:
    """Return agent sessions, ready to be played; raises ``UsageError``."""
    if settings.speed != 1.0:
        raise UsageError(f"--speed: {settings.speed:g}, allowed is 1 with --agents: their calls follow each other")
    sessions = SESSIONS_PER_AGENT * agents
    plan = AgentDraws(AGENT_SEED, AGENT_TENANTS).plan(sessions, agents)
    if settings.requests is not None:
        calls = list(accumulate(sum(len(each.calls) for each in root.family()) for root in plan.sessions))
        plan = plan.first(max(1, bisect_right(calls, settings.requests)))
    workload = agent_workload(plan, block_size)
    given = {} if settings.total_kv_blocks is None else {"total_kv_blocks": settings.total_kv_blocks}
    limits = _limits(workload, given)
    workers = settings.workers or TRACE_WORKERS
    remark = _pressure(plan, agents, workers, limits, block_size)
    return RecordingStage(f"{agents} agents", workload, workers, limits, timing_of(settings), remarks=[remark])


def load_mixed(sessions: int, settings: EngineSettings, block_size: int) -> RecordingStage:
    """Return agents and other traffic, ready to be played; raises ``UsageError``."""
    if settings.speed != 1.0 or settings.requests is not None:
        raise UsageError("--mixed: sessions follow each other; leave out --speed and --requests")
    workload = MixedDraws(AGENT_SEED, AGENT_TENANTS, block_size).workload(sessions)
    given = {} if settings.total_kv_blocks is None else {"total_kv_blocks": settings.total_kv_blocks}
    limits, workers = _limits(workload, given), settings.workers or TRACE_WORKERS
    remark = _pressure(workload.plan, sessions, workers, limits, block_size)
    name = f"{sessions} sessions and other traffic"
    return RecordingStage(name, workload, workers, limits, timing_of(settings), remarks=[remark])


def _pressure(plan: AgentPlan, sessions: int, workers: int, limits: SimulatedLimits, block_size: int) -> str:
    needed = sessions * plan.own_tokens_mean() + AGENT_TENANTS * PREFIX_TOKENS * workers
    share = needed / (workers * limits.total_kv_blocks * block_size)
    return f"the open sessions hold {share:.2f} times what the KV caches of the pool have room for, in the mean"


def load_trace(path: Path, settings: EngineSettings, block_size: int) -> RecordingStage:
    """Return a trace in Mooncake's form, ready to be played; raises ``UsageError``."""
    try:
        workload = build_workload(read_trace(path, settings.requests), settings.speed, block_size)
    except TraceError as error:
        raise UsageError(str(error)) from None
    given = {} if settings.total_kv_blocks is None else {"total_kv_blocks": settings.total_kv_blocks}
    return RecordingStage(
        path.name,
        workload,
        settings.workers or TRACE_WORKERS,
        _limits(workload, given),
        timing_of(settings),
    )


def load_recording(directory: str, decisions: str | None, settings: EngineSettings) -> RecordingStage:
    """Return recorded traffic, ready to be played; raises ``UsageError`` and what reading a journal raises."""
    pool = open_journal(directory)
    found = [disk for _, disk in open_decisions(directory if decisions is None else decisions)]
    if not found:
        raise UsageError(
            f"no decisions in {decisions or directory}: routers record them under decisions/ROUTER_ID in their "
            "data_dir; name another directory with --decisions"
        )
    total = survey_bytes(pool) + sum(survey_bytes(each) for each in found)
    with progress_bar("reading", total) as on_progress:
        recording = read_recording(pool, found, BLOCKS_PER_WORKER_MAX, on_progress)
    requests = recording.requests[: settings.requests]
    card = recording.shape.card
    if not requests or card is None:
        raise UsageError(f"no requests are recorded in {directory}")
    begin = requests[0].time_ms
    speedup = card.simulated_speedup if 0.0 < card.simulated_speedup <= SPEEDUP_MAX else 0.0
    recorded = [_recorded(each, begin) for each in requests]
    workload = recorded_workload(recorded, requests[0].block_size, settings.speed)
    limits = {
        "total_kv_blocks": settings.total_kv_blocks or card.limits.total_kv_blocks,
        "max_batch_size": card.limits.max_batch_size,
        "max_num_tokens": card.limits.max_num_tokens,
    }
    return RecordingStage(
        directory.rpartition("/")[2] or directory,
        workload,
        settings.workers or max(1, recording.shape.workers),
        _limits(workload, limits),
        timing_of(settings, speedup),
        recording.settings,
        measured(requests),
        [*_remarks(recording), *_remarks_on_speed(settings.speedup, speedup)],
    )


def _recorded(each: RecordedTraffic, begin_ms: int) -> RecordedRequest:
    finished_ms = None if each.finished_ms is None else float(each.finished_ms - begin_ms)
    return RecordedRequest(
        float(each.time_ms - begin_ms), each.isl, each.osl or 1, each.path, each.session, each.parent, finished_ms
    )


def _limits(workload: Workload | AgentWorkload | MixedWorkload, given: dict[str, int]) -> SimulatedLimits:
    """Return limits under which every request of a workload fits; what is ``given`` is taken as it is."""
    blocks = workload.total_tokens // workload.block_size + 2 * len(workload.requests) + 1
    values = {"total_kv_blocks": blocks, "max_sequence_length": workload.longest + 1, **given}
    waiting = len(workload.requests) + 1
    try:
        limits = SimulatedLimits(
            block_size=workload.block_size,
            max_waiting_requests=waiting,
            **values,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if limits.total_kv_blocks * limits.block_size < workload.longest:
        raise UsageError(
            f"total_kv_blocks is {limits.total_kv_blocks}, the longest request needs "
            f"{-(-workload.longest // limits.block_size)}"
        )
    return limits


def _remarks(recording: Recording) -> list[str]:
    remarks = []
    if recording.other_models:
        remarks.append(f"left out: {counted(recording.other_models, 'request')} for other models")
    if recording.unknown_lengths:
        remarks.append(f"of unknown output length, taken as one token: {counted(recording.unknown_lengths, 'request')}")
    if set(recording.shape.roles) - {Role.AGGREGATED}:
        remarks.append("the recorded pool was disaggregated; every simulated worker does prefill and decode")
    return remarks


def _remarks_on_speed(wanted: float | None, recorded: float) -> list[str]:
    """Say what the times are to be compared with, where recorded engines were simulated ones of another speed."""
    if recorded in (0.0, 1.0) and wanted in (None, recorded or 1.0):
        return []
    if wanted is None:
        return [f"the recorded engines were simulated, {recorded:g} times as fast as real ones; so are these"]
    if recorded and wanted != recorded:
        return [
            f"the recorded engines were simulated, {recorded:g} times as fast as real ones, and these are {wanted:g} "
            "times as fast: times differ from those measured then"
        ]
    return []


def measured(requests: Sequence[RecordedTraffic]) -> dict[str, Any]:
    """Return what the real workers reported, by the keys of a simulation's report; clocks are those of the hosts."""
    known = [each for each in requests if each.cached_tokens is not None]
    prompt_tokens = sum(each.isl for each in known)
    first = [float(each.first_token_ms - each.time_ms) for each in requests if each.first_token_ms is not None]
    gaps = [
        (each.finished_ms - each.first_token_ms) / (each.osl - 1)
        for each in requests
        if each.first_token_ms is not None and each.finished_ms is not None and each.osl and each.osl > 1
    ]
    tokens: dict[str, int] = {}
    for each in requests:
        tokens[str(each.worker)] = tokens.get(str(each.worker), 0) + each.isl
    return {
        "requests": len(requests),
        "cached_token_ratio": sum(each.cached_tokens or 0 for each in known) / prompt_tokens if prompt_tokens else 0.0,
        "ttft_ms": latency_summary([max(0.0, value) for value in first]),
        "itl_ms": latency_summary(gaps),
        "worker_tokens_max_over_mean": max(tokens.values()) / (sum(tokens.values()) / len(tokens)) if tokens else 0.0,
        "output_tokens": sum(each.osl or 0 for each in requests),
    }
