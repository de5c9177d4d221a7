"""Agents, people in chats, retrieval, batches and single requests at one pool, in virtual time.

The rates of what comes without a session grow with the open sessions; they and the lengths are assumptions:

- one session in five is a chat: 3 to 12 turns, a prompt of 3,000 tokens and later ones of 200 in the median, and 15 s
  between them;
- for 64 open sessions one single request a second, 0.3 questions a second on one of 30 documents of 5,000 tokens, and a
  batch of 12 requests each minute, which share 1,500 tokens.

Agents are those of ``poolgrid.plugins.simulation.agents``, until their context has ``CONTEXT_TOKENS``. Nothing arrives
after ``duration_ms``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from poolgrid.kernel.wire.hashing import sequence_hashes, stable_u64
from poolgrid.kernel.wire.requests import Generate, Sampling
from poolgrid.plugins.simulation.agent_workload import AgentArrivals
from poolgrid.plugins.simulation.agents import AgentCall, AgentDraws, AgentPlan, AgentSession
from poolgrid.plugins.simulation.workload import NEVER, SimulatedRequest

SINGLE_KINDS: Final = ("single", "retrieval", "batch")
"""What comes without a session."""

CHATS: Final = 0.2
READING_MS: Final = 15_000.0
CHAT_PREFIX_TOKENS: Final = 1_500
CONTEXT_TOKENS: Final = 60_000
"""Then an agent ends, as one does that compacts its context."""

SHOTS_PER_S, QUESTIONS_PER_S, BATCH_GAP_MS, BATCH_REQUESTS = 1.0, 0.3, 60_000.0, 12
OF_SESSIONS: Final = 64
"""Open sessions for which these are the rates."""
DOCUMENTS, DOCUMENT_TOKENS, BATCH_TOKENS = 30, 5_000, 1_500

SESSIONS_PER_SLOT: Final = 8
"""More than are begun while requests arrive."""
START_SPREAD_MS: Final = 60_000.0
DURATION_MS: Final = 400_000.0


@dataclass(slots=True)
class MixedArrivals:
    """The calls of sessions, and single requests between them."""

    sessions: AgentArrivals
    singles: list[SimulatedRequest]
    duration_ms: float
    prompt_tokens: int = 0
    ideal_tokens: int = 0
    """Prompt tokens that one infinite cache would have reused."""
    _next: int = 0
    _seen: set[int] = field(default_factory=set)
    _alone: set[str] = field(default_factory=set)

    @property
    def look_ahead_ms(self) -> float:
        return self.sessions.look_ahead_ms

    def next_ms(self) -> float:
        return min(self._session_ms, self._single_ms)

    def pop(self) -> SimulatedRequest:
        if self._session_ms <= self._single_ms:
            request = self.sessions.pop()
        else:
            request = self.singles[self._next]
            self._alone.add(request.request_id)
            self._next += 1
        known = next((at for at, block in enumerate(request.path) if block not in self._seen), len(request.path))
        self._seen.update(request.path[known:])
        self.prompt_tokens += request.isl
        self.ideal_tokens += known * self.sessions.block_size
        return request

    def finished(self, request_id: str, now_ms: float) -> None:
        if request_id not in self._alone:
            self.sessions.finished(request_id, now_ms)

    @property
    def _session_ms(self) -> float:
        due_ms = self.sessions.next_ms()
        return due_ms if due_ms <= self.duration_ms else NEVER

    @property
    def _single_ms(self) -> float:
        return self.singles[self._next].arrival_ms if self._next < len(self.singles) else NEVER


@dataclass(slots=True)
class MixedWorkload:
    """Such traffic; ``poolgrid.plugins.simulation.workload.Workload`` has the same fields."""

    plan: AgentPlan
    singles: list[SimulatedRequest]
    block_size: int
    duration_ms: float
    requests: range
    """At most as many."""
    total_tokens: int
    longest: int
    played: MixedArrivals | None = None

    @property
    def ideal_cached_token_ratio(self) -> float:
        """Return what one infinite cache would have reused in the last run; which calls there are depends on it."""
        played = self.played
        return played.ideal_tokens / played.prompt_tokens if played is not None and played.prompt_tokens else 0.0

    def arrivals(self) -> MixedArrivals:
        self.played = MixedArrivals(AgentArrivals(self.plan, self.block_size), self.singles, self.duration_ms)
        return self.played


@dataclass(slots=True)
class MixedDraws:
    """Draws such traffic, the same for one seed."""

    seed: int
    tenants: int
    block_size: int
    length_scale: float = 1.0
    duration_ms: float = DURATION_MS
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(f"mixed {self.seed}")

    def workload(self, slots: int) -> MixedWorkload:
        """Return traffic with so many open sessions."""
        draw, agents = self._random, AgentDraws(self.seed, self.tenants, self.length_scale)
        count = SESSIONS_PER_SLOT * slots
        sessions = tuple(
            self._chat(number) if draw.random() < CHATS else self._compacted(agents.session(number))
            for number in range(count)
        )
        starts = [draw.uniform(0.0, START_SPREAD_MS) for _ in range(slots)]
        starts += [draw.expovariate(1 / 2_000.0) for _ in range(count - slots)]
        singles = self._singles(slots / OF_SESSIONS)
        lengths = [
            tokens + call.output_tokens
            for root in sessions
            for each in root.family()
            for tokens, call in each.prompts()
        ]
        lengths += [each.isl + each.osl for each in singles]
        plan = AgentPlan(sessions, slots, tuple(starts))
        return MixedWorkload(
            plan, singles, self.block_size, self.duration_ms, range(len(lengths)), sum(lengths), max(lengths)
        )

    def _compacted(self, session: AgentSession) -> AgentSession:
        tokens, calls = session.prefix_tokens, list[AgentCall]()
        for call in session.calls:
            tokens += call.new_tokens + call.output_tokens
            if tokens > CONTEXT_TOKENS * self.length_scale and len(calls) >= 2:
                break
            calls.append(call)
        return replace(session, calls=(*calls[:-1], replace(calls[-1], children=())))

    def _chat(self, number: int) -> AgentSession:
        draw = self._random
        calls = [
            AgentCall(
                self._tokens(200 if turn else 3_000, 0.8),
                self._tokens(250, 0.6),
                draw.lognormvariate(math.log(READING_MS), 0.8),
            )
            for turn in range(draw.randint(3, 12))
        ]
        prefix = int(CHAT_PREFIX_TOKENS * self.length_scale)
        return AgentSession(f"chat-{number}", self._tenant(number), prefix, tuple(calls), kind="chat")

    def _singles(self, load: float) -> list[SimulatedRequest]:
        draw, found, at_ms = self._random, list[SimulatedRequest](), 0.0
        while (at_ms := at_ms + 1000 * draw.expovariate(load * SHOTS_PER_S)) < self.duration_ms:
            found.append(self._single("single", len(found), at_ms, "", 0, (1_200, 1.0), 120))
        at_ms = 0.0
        while (at_ms := at_ms + 1000 * draw.expovariate(load * QUESTIONS_PER_S)) < self.duration_ms:
            document = f"document {min(int(draw.paretovariate(0.8)), DOCUMENTS)}"
            found.append(self._single("retrieval", len(found), at_ms, document, DOCUMENT_TOKENS, (350, 0.6), 170))
        at_ms = BATCH_GAP_MS / 2
        while at_ms < self.duration_ms:
            for _ in range(max(1, round(load * BATCH_REQUESTS))):
                found.append(self._single("batch", len(found), at_ms, f"batch {at_ms}", BATCH_TOKENS, (500, 0.6), 120))
            at_ms += BATCH_GAP_MS
        return sorted(found, key=lambda each: each.arrival_ms)

    def _single(
        self, kind: str, number: int, at_ms: float, prefix: str, prefix_tokens: int, own: tuple[int, float], output: int
    ) -> SimulatedRequest:
        """Return a request that nothing follows; a router takes it for the first turn of a session."""
        name, shared = f"{kind}-{number}", int(prefix_tokens * self.length_scale)
        tokens, osl = shared + self._tokens(*own), self._tokens(output, 0.6)
        blocks = [
            stable_u64(f"{prefix if at < shared // self.block_size else name} {at}")
            for at in range(tokens // self.block_size)
        ]
        token_ids = struct.pack("<I", stable_u64(name) % 2**31) * tokens
        generate = Generate(name, token_ids, Sampling(max_tokens=osl, ignore_eos=True))
        session = AgentSession(name, self._tenant(number), 0, (), kind=kind)
        return SimulatedRequest(at_ms, tokens, osl, sequence_hashes(blocks), generate, session)

    def _tenant(self, number: int) -> str:
        return f"tenant-{number % self.tenants}"

    def _tokens(self, median: float, sigma: float) -> int:
        drawn = self._random.lognormvariate(math.log(median), sigma)
        return 1 + int(min(drawn, 8 * median) * self.length_scale)
