"""Agents whose clients give no session ids: their turns are named as a router names them, by their prompts alone."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from random import Random

from poolgrid.kernel.index.prefix_index import PrefixIndex
from poolgrid.kernel.projection.load_ledger import LoadLedger
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire.hashing import TOKEN_BYTES, path_of
from poolgrid.kernel.wire.requests import Generate
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.plugins.simulation.agent_workload import AgentArrivals, AgentWorkload
from poolgrid.plugins.simulation.agents import AgentSession
from poolgrid.plugins.simulation.workload import SimulatedRequest
from poolgrid.server.router.session_naming import SessionNaming

TWIN = " again"
"""Behind the name of an agent in that of its twin."""


@dataclass(slots=True)
class Joins:
    """How the turns of agents were named."""

    owners: dict[str, str] = field(default_factory=dict, repr=False)
    """The agent, or the one whose subagent it is, of each session that lineage knows."""
    names: dict[str, set[str]] = field(default_factory=dict, repr=False)
    """The sessions of each agent."""
    later: int = 0
    """Turns that continue another one: of the same agent, or of the one that it was forked from."""
    found: int = 0
    """Of these, those that joined a session or were taken for forks."""
    wrong: int = 0
    """Turns that joined a stranger's session."""

    def note(self, turn: SessionTurn, session: AgentSession, is_later: bool) -> None:
        root, joined = session.parent_id or session.session_id, turn.session in self.owners
        self.later += is_later
        self.found += joined or bool(turn.parent)
        self.wrong += self.owners.setdefault(turn.session, root) != root
        self.names.setdefault(session.session_id, set()).add(turn.session)

    @property
    def names_per_agent(self) -> float:
        return sum(map(len, self.names.values())) / len(self.names)


class Sends(StrEnum):
    """What clients send as the answers of earlier turns."""

    GENERATED = "what was generated"
    HALF = "half of it behind other words"
    REWRITTEN = "something else"


class NamelessArrivals:
    """Calls with real tokens, whose sessions have the names that lineage finds."""

    def __init__(self, agents: AgentArrivals, joins: Joins, sends: Sends) -> None:
        self.look_ahead_ms = agents.look_ahead_ms
        self._agents, self._joins, self._sends = agents, joins, sends
        self._naming = SessionNaming(Projection(PrefixIndex(), LoadLedger()), lambda: 0)
        self._said: dict[str, bytes] = {}
        self._running: dict[str, tuple[InferenceRequest, str, bytes]] = {}

    def next_ms(self) -> float:
        return self._agents.next_ms()

    def pop(self) -> SimulatedRequest:
        request = self._agents.pop()
        session, block_size = request.session, self._agents.block_size
        assert session is not None
        call, agent = session.calls[request.turn], session.session_id
        if not request.turn:
            tenant = _tokens(session.tenant, session.prefix_tokens)
            self._said[agent] = self._said.get(session.parent_id, tenant)[: TOKEN_BYTES * session.prefix_tokens]
        words = f"{agent.removesuffix(TWIN)} {request.turn}"
        prompt = self._said[agent] = self._said[agent] + _tokens(f"{words} asks", call.new_tokens)
        path = list(path_of(prompt, block_size))
        asked = InferenceRequest(request.request_id, "m", prompt, request.generate.sampling)
        turn = asked.turn = self._naming.turn_of(asked, path, block_size)
        assert turn is not None
        self._joins.note(turn, session, bool(request.turn or session.parent_id))
        self._naming.dispatched(asked)
        self._running[asked.request_id] = asked, agent, _tokens(f"{words} answers", call.output_tokens)
        generate = Generate(asked.request_id, prompt, asked.sampling)
        known = replace(session, session_id=turn.session, parent_id=turn.parent)
        return replace(request, path=path, generate=generate, session=known)

    def finished(self, request_id: str, now_ms: float) -> None:
        asked, agent, answer = self._running.pop(request_id)
        half = len(answer) // TOKEN_BYTES // 2 * TOKEN_BYTES
        kept = {Sends.GENERATED: 0, Sends.HALF: half, Sends.REWRITTEN: len(answer)}[self._sends]
        self._said[agent] += _tokens(f"{request_id} is rewritten", kept // TOKEN_BYTES) + answer[kept:]
        path = path_of(asked.token_ids, self._agents.block_size)
        self._naming.ended(asked, path, self._agents.block_size, answer, "stop")
        self._agents.finished(request_id, now_ms)


@dataclass(frozen=True, slots=True)
class NamelessAgents(AgentWorkload):
    """Agents as a workload; ``joins`` is filled while it is played."""

    joins: Joins = field(default_factory=Joins)
    sends: Sends = Sends.GENERATED

    @classmethod
    def of(cls, load: AgentWorkload, sends: Sends = Sends.GENERATED) -> NamelessAgents:
        return cls(**{each.name: getattr(load, each.name) for each in fields(load)}, sends=sends)

    def arrivals(self) -> NamelessArrivals:
        return NamelessArrivals(AgentArrivals(self.plan, self.block_size), self.joins, self.sends)


def _tokens(words: str, count: int) -> bytes:
    """Return tokens that only equal words have."""
    return Random(words).randbytes(TOKEN_BYTES * count)


def twin_of(session: AgentSession) -> AgentSession:
    """Return an agent that says the same as another one, and gets the same answers."""
    calls = tuple(replace(call, children=tuple(map(twin_of, call.children))) for call in session.calls)
    parent_id = session.parent_id and session.parent_id + TWIN
    return replace(session, session_id=session.session_id + TWIN, calls=calls, parent_id=parent_id)
