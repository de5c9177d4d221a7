"""Agent sessions in virtual time: each call comes a pause after the end of the one before it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from heapq import heappop, heappush

from poolgrid.kernel.wire.hashing import sequence_hashes, stable_u64
from poolgrid.kernel.wire.requests import Generate, Sampling
from poolgrid.plugins.simulation.agents import AgentPlan, AgentSession
from poolgrid.plugins.simulation.workload import NEVER, RequestArrivals, SimulatedRequest


@dataclass(slots=True, eq=False)
class _Progress:
    """How far a session is."""

    session: AgentSession
    path: list[int]
    tokens: int
    """Of the last prompt and its answer; of the prefix at first."""
    parent: _Progress | None = None
    calls: int = 0
    open_children: int = 0
    pause_ms: float = 0.0


@dataclass(slots=True)
class AgentArrivals:
    """The calls of agents: each comes a pause after the one before, and after the subagents of that."""

    plan: AgentPlan
    block_size: int
    look_ahead_ms: float = 50.0
    """The shortest pause."""
    _due: list[tuple[float, int, _Progress]] = field(default_factory=list)
    _running: dict[str, _Progress] = field(default_factory=dict)
    _begun: int = 0
    _pushed: int = 0

    def __post_init__(self) -> None:
        for start_ms in self.plan.starts_ms[: self.plan.slots]:
            self._begin(start_ms)

    def next_ms(self) -> float:
        return self._due[0][0] if self._due else NEVER

    def pop(self) -> SimulatedRequest:
        now_ms, _, progress = heappop(self._due)
        session, call = progress.session, progress.session.calls[progress.calls]
        progress.tokens += call.new_tokens
        have, need = len(progress.path), progress.tokens // self.block_size
        fresh = [stable_u64(f"{session.session_id} {at}") for at in range(have, need)]
        progress.path = progress.path + sequence_hashes(fresh, progress.path[-1] if have else None)
        request_id = f"{session.session_id}-{progress.calls}"
        self._running[request_id] = progress
        # Stand-ins that no other request has: only what the path says is shared.
        token_ids = struct.pack("<I", stable_u64(request_id) % 2**31) * progress.tokens
        generate = Generate(request_id, token_ids, Sampling(max_tokens=call.output_tokens, ignore_eos=True))
        return SimulatedRequest(
            now_ms, progress.tokens, call.output_tokens, progress.path, generate, session, progress.calls
        )

    def finished(self, request_id: str, now_ms: float) -> None:
        progress = self._running.pop(request_id)
        session = progress.session
        call = session.calls[progress.calls]
        progress.tokens += call.output_tokens
        progress.calls += 1
        if progress.calls < len(session.calls):
            progress.pause_ms = call.pause_ms
            progress.open_children = len(call.children)
            if not call.children:
                self._push(now_ms + call.pause_ms, progress)
            for child in call.children:
                self._push(now_ms + self.look_ahead_ms, _Progress(child, progress.path, progress.tokens, progress))
            return
        parent = progress.parent
        if parent is None:
            if self._begun < len(self.plan.sessions):
                self._begin(now_ms + self.look_ahead_ms + self.plan.starts_ms[self._begun])
            return
        parent.open_children -= 1
        if not parent.open_children:
            self._push(now_ms + parent.pause_ms, parent)

    def _begin(self, start_ms: float) -> None:
        session = self.plan.sessions[self._begun]
        self._begun += 1
        self._push(start_ms, _Progress(session, prefix_path(session, self.block_size), session.prefix_tokens))

    def _push(self, due_ms: float, progress: _Progress) -> None:
        self._pushed += 1
        heappush(self._due, (due_ms, self._pushed, progress))


def prefix_path(session: AgentSession, block_size: int) -> list[int]:
    """Return the sequence hashes of what all sessions of a tenant begin with."""
    blocks = session.prefix_tokens // block_size
    return sequence_hashes([stable_u64(f"{session.tenant} {at}") for at in range(blocks)])


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """Agent sessions as a workload; ``poolgrid.plugins.simulation.workload.Workload`` has the same fields."""

    plan: AgentPlan
    block_size: int
    requests: range
    """As many as there are calls."""
    ideal_cached_token_ratio: float
    total_tokens: int
    longest: int

    def arrivals(self) -> RequestArrivals:
        return AgentArrivals(self.plan, self.block_size)


def agent_workload(plan: AgentPlan, block_size: int) -> AgentWorkload:
    """Return the calls of agents, and what one infinite cache would reuse: whole blocks of earlier prompts.

    Answers are not among it: simulated ones are computed again as a part of the next prompt.
    """
    calls = prompt_tokens = ideal = total = longest = 0
    tenants: set[str] = set()
    for root in plan.sessions:
        for session in root.family():
            before = session.prefix_tokens if session.parent_id or session.tenant in tenants else 0
            tenants.add(session.tenant)
            for tokens, call in session.prompts():
                calls += 1
                prompt_tokens += tokens
                ideal += before // block_size * block_size
                before = tokens
                total += tokens + call.output_tokens
                longest = max(longest, tokens + call.output_tokens)
    return AgentWorkload(plan, block_size, range(calls), ideal / prompt_tokens, total, longest)
