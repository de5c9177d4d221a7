"""Agents, chats, one-shots, retrieval and batches at one pool, more than its caches hold."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from poolgrid.router.core.policy import Policy
from poolgrid.tools.simulation.agent_workload import AgentArrivals
from poolgrid.tools.simulation.agents import PREFIX_TOKENS, AgentCall, AgentDraws, AgentPlan, AgentSession
from poolgrid.tools.simulation.pool import SimulatedPool
from poolgrid.tools.simulation.session_line import line_of
from poolgrid.tools.simulation.workload import NEVER, SimulatedRequest
from poolgrid.wire.events import PrefillCompleted, RequestFinished
from poolgrid.wire.hashing import sequence_hashes, stable_u64
from poolgrid.wire.requests import Generate, Sampling
from poolgrid.workers.core.timing import timing_model
from poolgrid.workers.engines.simulated.core.engine import Fact, SimulatedLimits

BLOCK = 16
SCALE = 1 / 16
"""A token stands for sixteen."""
TENANTS = 4
SLOTS = 64
WORKERS = 4
COMPACTED_TOKENS = 60_000
"""A session ends before its context is longer."""
DURATION_MS = 400_000.0
"""Nothing arrives later."""
SHOTS_PER_S, LOOKUPS_PER_S, BATCH_GAP_MS, BATCH_REQUESTS = 1.0, 0.3, 60_000.0, 12


SINGLE, AGENT, CHAT = "single", "agent", "chat"
"""What names of requests begin with."""


class SlowPrefill:
    """Step times of an H100 for tokens that stand for sixteen each."""

    def __init__(self) -> None:
        self._model = timing_model("h100-qwen3-8b")

    def prefill_ms(self, new_tokens: int) -> float:
        return self._model.prefill_ms(round(new_tokens / SCALE))

    def decode_ms(self, used_share: float) -> float:
        return self._model.decode_ms(used_share) / SCALE


class MixedArrivals:
    """The calls of sessions, and single requests between them."""

    def __init__(self, sessions: AgentArrivals, singles: list[SimulatedRequest]) -> None:
        self.look_ahead_ms = sessions.look_ahead_ms
        self.arrived: dict[str, SimulatedRequest] = {}
        self._sessions, self._singles, self._next = sessions, singles, 0

    def next_ms(self) -> float:
        return min(self._session_ms, self._single_ms)

    def pop(self) -> SimulatedRequest:
        if self._session_ms <= self._single_ms:
            request = self._sessions.pop()
        else:
            request = self._singles[self._next]
            self._next += 1
        self.arrived[request.request_id] = request
        return request

    def finished(self, request_id: str, now_ms: float) -> None:
        if not request_id.startswith(SINGLE):
            self._sessions.finished(request_id, now_ms)

    @property
    def _session_ms(self) -> float:
        due_ms = self._sessions.next_ms()
        return due_ms if due_ms <= DURATION_MS else NEVER

    @property
    def _single_ms(self) -> float:
        return self._singles[self._next].arrival_ms if self._next < len(self._singles) else NEVER


@dataclass(frozen=True, slots=True)
class MixedTraffic:
    """A workload; ``poolgrid.tools.simulation.workload.Workload`` has the same fields."""

    plan: AgentPlan
    singles: list[SimulatedRequest]
    arrivals_of_run: list[MixedArrivals]
    block_size: int = BLOCK
    requests: range = range(0)
    ideal_cached_token_ratio: float = 1.0
    total_tokens: int = 0
    longest: int = 8192

    def arrivals(self) -> MixedArrivals:
        self.arrivals_of_run.append(MixedArrivals(AgentArrivals(self.plan, BLOCK), self.singles))
        return self.arrivals_of_run[-1]

    def blocks_of_worker(self, pressure: float) -> int:
        """Return the blocks with which open sessions need so many times what the pool has."""
        sessions = self.plan.sessions
        held = [
            tokens + call.output_tokens - each.prefix_tokens for each in sessions for tokens, call in each.prompts()
        ]
        needed = SLOTS * sum(held) / len(held) + TENANTS * PREFIX_TOKENS * SCALE * WORKERS
        return int(needed / pressure / WORKERS / BLOCK)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What clients saw; times in seconds."""

    reuse: float
    turns_per_minute: float
    output_tokens: int
    """Of answers that were complete before the last arrival."""
    all_mean: float
    single_mean: float
    single_p99: float
    agent_mean: float
    chat_mean: float
    later_p50: float
    """Of agents, without their first turns."""
    longest: float
    """Of sessions."""
    waited: int


def mixed_traffic(seed: int) -> MixedTraffic:
    draw, draws = Random(f"mixed {seed}"), AgentDraws(seed, TENANTS, SCALE)
    sessions = tuple(
        _chat(draw, number) if draw.random() < 0.2 else _compacted(draws.session(number)) for number in range(8 * SLOTS)
    )
    starts = [draw.uniform(0.0, 60_000.0) for _ in range(SLOTS)]
    starts += [draw.expovariate(1 / 2_000.0) for _ in range(len(sessions) - SLOTS)]
    return MixedTraffic(AgentPlan(sessions, SLOTS, tuple(starts)), _singles(draw), [])


def play(traffic: MixedTraffic, policy: Policy, pressure: float, admission: str = "") -> Outcome:
    ttft_s: dict[str, float] = {}
    ended_ms: dict[str, float] = {}

    def note(fact: Fact, now_ms: float) -> None:
        if isinstance(fact, PrefillCompleted):
            ttft_s[fact.request_id] = (now_ms - arrived()[fact.request_id].arrival_ms) / 1000
        elif isinstance(fact, RequestFinished):
            ended_ms[fact.request_id] = now_ms

    def arrived() -> dict[str, SimulatedRequest]:
        return traffic.arrivals_of_run[-1].arrived

    def of(*kinds: str) -> list[float]:
        return [ttft for request_id, ttft in ttft_s.items() if request_id.startswith(kinds)]

    limits = SimulatedLimits(BLOCK, traffic.blocks_of_worker(pressure), 0, 256, 512, traffic.longest, 10**6)
    line = line_of(admission, BLOCK)
    result = SimulatedPool(traffic, policy, WORKERS, limits, SlowPrefill(), on_fact=note, line=line).run()  # type: ignore[arg-type]
    in_time = [request_id for request_id, at_ms in ended_ms.items() if at_ms <= DURATION_MS]
    later = [ttft_s[each] for each in ttft_s if each.startswith(AGENT) and arrived()[each].turn]
    return Outcome(
        result.cached_tokens / result.prompt_tokens,
        60_000 * sum(not each.startswith(SINGLE) for each in in_time) / DURATION_MS,
        sum(arrived()[each].osl for each in in_time),
        float(np.mean(list(ttft_s.values()))),
        float(np.mean(of(SINGLE))),
        float(np.percentile(of(SINGLE), 99)),
        float(np.mean(of(AGENT))),
        float(np.mean(of(CHAT))),
        float(np.median(later)),
        max(of(AGENT, CHAT)),
        result.waited,
    )


def _compacted(session: AgentSession) -> AgentSession:
    tokens, calls = session.prefix_tokens, list[AgentCall]()
    for call in session.calls:
        tokens += call.new_tokens + call.output_tokens
        if tokens > COMPACTED_TOKENS * SCALE and len(calls) >= 2:
            break
        calls.append(call)
    return replace(session, calls=(*calls[:-1], replace(calls[-1], children=())))


def _chat(draw: Random, number: int) -> AgentSession:
    """Return a session of a person, who reads each answer."""
    calls = [
        AgentCall(
            _tokens(draw, 200 if turn else 3_000, 0.8),
            _tokens(draw, 250, 0.6),
            draw.lognormvariate(math.log(15_000.0), 0.8),
        )
        for turn in range(draw.randint(3, 12))
    ]
    return AgentSession(f"{CHAT}-{number}", f"tenant-{number % TENANTS}", int(1_500 * SCALE), tuple(calls))


def _singles(draw: Random) -> list[SimulatedRequest]:
    found: list[SimulatedRequest] = []
    at_ms = 0.0
    while (at_ms := at_ms + 1000 * draw.expovariate(SHOTS_PER_S)) < DURATION_MS:
        found.append(_single(len(found), at_ms, "", 0, _tokens(draw, 1_200, 1.0), _tokens(draw, 120, 0.7)))
    at_ms = 0.0
    while (at_ms := at_ms + 1000 * draw.expovariate(LOOKUPS_PER_S)) < DURATION_MS:
        document = f"document {min(int(draw.paretovariate(0.8)), 30)}"
        found.append(_single(len(found), at_ms, document, 5_000, _tokens(draw, 350, 0.6), _tokens(draw, 170, 0.6)))
    at_ms = BATCH_GAP_MS / 2
    while at_ms < DURATION_MS:
        for _ in range(BATCH_REQUESTS):
            batch = f"batch {at_ms}"
            found.append(_single(len(found), at_ms, batch, 1_500, _tokens(draw, 500, 0.6), _tokens(draw, 120, 0.6)))
        at_ms += BATCH_GAP_MS
    return sorted(found, key=lambda each: each.arrival_ms)


def _single(number: int, at_ms: float, prefix: str, prefix_tokens: int, own: int, output: int) -> SimulatedRequest:
    """Return a request that nothing follows; a router takes it for the first turn of a session."""
    name, shared = f"{SINGLE}-{number}", int(prefix_tokens * SCALE)
    tokens = shared + own
    blocks = [stable_u64(f"{prefix if block < shared // BLOCK else name} {block}") for block in range(tokens // BLOCK)]
    token_ids = struct.pack("<I", stable_u64(name) % 2**31) * tokens
    generate = Generate(name, token_ids, Sampling(max_tokens=output, ignore_eos=True))
    session = AgentSession(name, f"tenant-{number % TENANTS}", 0, ())
    return SimulatedRequest(at_ms, tokens, output, sequence_hashes(blocks), generate, session)


def _tokens(draw: Random, median: float, sigma: float) -> int:
    return 1 + int(min(draw.lognormvariate(math.log(median), sigma), 8 * median) * SCALE)
