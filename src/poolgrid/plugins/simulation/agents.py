"""Agent sessions: calls with a growing prompt, pauses for tools between them, and subagents that fork from a prompt.

Sources of the distributions:

- calls of a session: mean 41 of 15,000 coding trajectories (thoughtworks/agentic-coding-trajectories); TraceLab
  (arXiv 2606.30560) has a mean of 84, LiteLLM issue 38078 reports 50 to 150;
- pauses: 86.5 % within 1 s and 95.1 % within 10 s (vllm-router issue 285); the rest are builds, tests and people, as
  the heavy tail that TraceLab reports;
- the first prompt: 20,000 tokens (netpreme/coding_agent_traces: 20,097 to 20,760 on first calls). 12,000 of them are
  the system prompt and tools, which all sessions of a tenant share; the split is an assumption;
- prompts of 33,600 tokens in the mean (gahow/agentic-kvc), 100 prompt tokens for each token of output
  (llm-d-router issue 2964): 336 tokens of output, and as many of tool results, for each call;
- subagents: AIPerf's generator has none. Here one session in four forks three at one call, an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

CALLS: Final = (12, 70)
"""Calls of a session, uniform: the mean is 41."""

PREFIX_TOKENS: Final = 12_000
TASK_TOKENS: Final = 8_000
OUTPUT_TOKENS: Final = 336
RESULT_TOKENS: Final = 327
"""Mean tokens of a tool result: (33,600 − 20,000) / 20.5 earlier calls, less the output."""

LENGTH_SIGMA: Final = 1.0
"""Spread of the logarithm of output and result lengths: the 95th percentile is five times the median."""

PAUSES: Final = ((0.865, 50.0, 1_000.0), (0.951, 1_000.0, 10_000.0), (1.0, 10_000.0, 120_000.0))
"""Up to which quantile a pause is log-uniform between which milliseconds."""

FORKING: Final = 0.25
CHILDREN: Final = 3
CHILD_CALLS: Final = (3, 9)

START_SPREAD_MS: Final = 300_000.0
"""The first sessions begin over about the time that one takes: a fleet is not started at one moment."""

USER_PAUSE_MS: Final = 2_000.0
"""Mean time until the next session of a slot begins; people keep several sessions open."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of a session."""

    new_tokens: int
    """Tokens behind the earlier prompt and its answer: the task, or a tool result."""
    output_tokens: int
    pause_ms: float
    """From the end of this call, or of its subagents, to the next one."""
    children: tuple[AgentSession, ...] = ()
    """Subagents that begin with this call's prompt and answer once it ends; the next call waits for all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class AgentSession:
    """The calls of one agent."""

    session_id: str
    tenant: str
    prefix_tokens: int
    """Tokens that it begins with: its tenant's shared prefix; for a subagent, what its parent's prompt had."""
    calls: tuple[AgentCall, ...]
    parent_id: str = ""
    kind: str = "agent"
    """What it is in a report; of a request without a session that of the request."""

    def prompts(self) -> Iterator[tuple[int, AgentCall]]:
        tokens = self.prefix_tokens
        for call in self.calls:
            tokens += call.new_tokens
            yield tokens, call
            tokens += call.output_tokens

    def family(self) -> Iterator[AgentSession]:
        yield self
        for call in self.calls:
            for child in call.children:
                yield from child.family()


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """Sessions in the order in which they begin; ``slots`` of them are open at a time."""

    sessions: tuple[AgentSession, ...]
    slots: int
    starts_ms: tuple[float, ...]
    """For the first ``slots`` sessions when they begin; for each other one the pause before it, once a slot is free."""

    def first(self, sessions: int) -> AgentPlan:
        return AgentPlan(self.sessions[:sessions], self.slots, self.starts_ms[:sessions])

    def own_tokens_mean(self) -> float:
        """Return the mean tokens that an open session holds beyond what its tenant shares, over calls."""
        held = [
            tokens + call.output_tokens - session.prefix_tokens
            for session in self.sessions
            for tokens, call in session.prompts()
        ]
        return sum(held) / len(held)


@dataclass(slots=True)
class AgentDraws:
    """Draws sessions, the same for one seed."""

    seed: int
    tenants: int
    length_scale: float = 1.0
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    @property
    def prefix_tokens(self) -> int:
        return self._scaled(PREFIX_TOKENS)

    def plan(self, sessions: int, slots: int) -> AgentPlan:
        drawn = tuple(self.session(number) for number in range(sessions))
        starts = [self._random.uniform(0.0, START_SPREAD_MS) for _ in range(min(slots, sessions))]
        starts += [self._random.expovariate(1 / USER_PAUSE_MS) for _ in range(sessions - len(starts))]
        return AgentPlan(drawn, slots, tuple(starts))

    def session(self, number: int) -> AgentSession:
        """Draw the next session; its number names it and its tenant."""
        session_id, tenant = f"agent-{number}", f"tenant-{number % self.tenants}"
        prefix = self.prefix_tokens
        count = self._random.randint(*CALLS)
        forks_at = self._random.randrange(count - 1) if self._random.random() < FORKING else -1
        calls: list[AgentCall] = []
        tokens = prefix
        for place in range(count):
            call = self._call(TASK_TOKENS if place == 0 else RESULT_TOKENS)
            tokens += call.new_tokens + call.output_tokens
            if place == forks_at:
                children = tuple(
                    AgentSession(
                        f"{session_id}.{child}",
                        tenant,
                        tokens,
                        tuple(self._call(RESULT_TOKENS) for _ in range(self._random.randint(*CHILD_CALLS))),
                        session_id,
                    )
                    for child in range(CHILDREN)
                )
                call = AgentCall(call.new_tokens, call.output_tokens, call.pause_ms, children)
            calls.append(call)
        return AgentSession(session_id, tenant, prefix, tuple(calls))

    def _call(self, new_tokens: int) -> AgentCall:
        return AgentCall(self._length(new_tokens), self._length(OUTPUT_TOKENS), self._pause_ms())

    def _length(self, mean: int) -> int:
        drawn = self._random.lognormvariate(math.log(mean) - LENGTH_SIGMA**2 / 2, LENGTH_SIGMA)
        return self._scaled(min(drawn, 8.0 * mean))

    def _scaled(self, tokens: float) -> int:
        return max(1, round(tokens * self.length_scale))

    def _pause_ms(self) -> float:
        point, below = self._random.random(), 0.0
        for quantile, least_ms, most_ms in PAUSES:
            if point < quantile:
                return float(least_ms * (most_ms / least_ms) ** ((point - below) / (quantile - below)))
            below = quantile
        return PAUSES[-1][2]
