"""A trace as the simulator needs it: arrival times, prompts that share blocks as the trace's do, output lengths.

A trace id names 512 tokens after one particular prefix. In virtual time no client reads the tokens, so id ``n`` becomes
512 times the token ``n``: equal ids give equal tokens and different ids different ones, which is all that hashing,
caching and routing see. Sequence hashes are computed once per id and shared by all requests and policies.

Recorded traffic as the simulator needs it: when requests came, how long they were, which blocks they shared.

Of a recorded prompt only the sequence hashes of its whole blocks are known, which is all that routing and caching see.
Its tokens are stand-ins, different for each request, so that nothing beyond the recorded hashes is ever shared.

Conditions of a simulation that a router has to find out by itself: how fast each worker is, and what clients expect.

A speed divides all step times: 1 is the value on the worker's card, 0.25 a quarter of it. A change holds for the steps
that begin in its time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Final, Protocol

from poolgrid.kernel.wire.hashing import block_hashes, sequence_hashes, stable_u64
from poolgrid.kernel.wire.requests import Generate, Sampling
from poolgrid.plugins.bench.trace import TRACE_BLOCK_TOKENS, TraceRow
from poolgrid.plugins.simulation.agents import AgentSession
from poolgrid.server.workers.timing import SPEEDUP_MAX, TimingModel


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of the workload."""

    arrival_ms: float
    isl: int
    osl: int
    path: list[int]
    """Sequence hashes of the prompt's whole blocks."""
    generate: Generate
    session: AgentSession | None = None
    """Whose call it is, of an agent."""
    turn: int = 0
    """Number of the call in its session."""
    tenant: str = ""
    """Of a request without a session."""
    priority: int = 0

    @property
    def request_id(self) -> str:
        return self.generate.request_id


NEVER: Final = float("inf")


class RequestArrivals(Protocol):
    """Requests in order of arrival."""

    look_ahead_ms: float
    """A request that is not known yet comes at least this long after the end of one that runs."""

    def next_ms(self) -> float:
        """Return when the next request that is known comes; infinity without one."""
        ...

    def pop(self) -> SimulatedRequest: ...

    def finished(self, request_id: str, now_ms: float) -> None: ...


class ListedArrivals:
    """Requests whose times are known."""

    look_ahead_ms = NEVER

    def __init__(self, requests: Sequence[SimulatedRequest]) -> None:
        self._requests = requests
        self._next = 0

    def next_ms(self) -> float:
        return self._requests[self._next].arrival_ms if self._next < len(self._requests) else NEVER

    def pop(self) -> SimulatedRequest:
        self._next += 1
        return self._requests[self._next - 1]

    def finished(self, request_id: str, now_ms: float) -> None:
        """Ignore it: no request waits for another."""


class ChainedArrivals:
    """Requests whose times are known, and those that follow on the end of another."""

    look_ahead_ms = 0.0

    def __init__(
        self, requests: Sequence[SimulatedRequest], followers: Mapping[str, Sequence[tuple[int, float]]]
    ) -> None:
        self._requests = requests
        self._followers = followers
        behind = {number for each in followers.values() for number, _ in each}
        self._due = [(each.arrival_ms, number) for number, each in enumerate(requests) if number not in behind]

    def next_ms(self) -> float:
        return self._due[0][0] if self._due else NEVER

    def pop(self) -> SimulatedRequest:
        now_ms, number = heappop(self._due)
        return replace(self._requests[number], arrival_ms=now_ms)

    def finished(self, request_id: str, now_ms: float) -> None:
        for number, pause_ms in self._followers.get(request_id, ()):
            heappush(self._due, (now_ms + pause_ms, number))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and what one infinite cache would reuse of their prompts."""

    requests: list[SimulatedRequest]
    block_size: int
    ideal_cached_token_ratio: float
    total_tokens: int
    """Prompt and output tokens of all requests."""
    longest: int
    """Most tokens of one request, prompt and output."""

    followers: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """By request, the numbers of those that come a pause after its end, as turns of a session do."""

    def arrivals(self) -> RequestArrivals:
        return ChainedArrivals(self.requests, self.followers) if self.followers else ListedArrivals(self.requests)


def build_workload(rows: Sequence[TraceRow], speed: float, block_size: int) -> Workload:
    """Return the workload of a trace played ``speed`` times as fast, for blocks of ``block_size`` tokens."""
    if speed <= 0:
        raise ValueError(f"building a workload: speed is {speed}, allowed are values above 0")
    chains: dict[int, list[int]] = {}
    seen: set[int] = set()
    ideal = prompt_tokens = total = longest = 0
    requests: list[SimulatedRequest] = []
    for number, row in enumerate(rows):
        token_ids = _prompt(row)
        path = _path(row, token_ids, block_size, chains)
        osl = max(1, row.output_length)
        request_id = f"trace-{number}"
        requests.append(
            SimulatedRequest(
                row.timestamp / speed,
                row.input_length,
                osl,
                path,
                Generate(request_id, token_ids, Sampling(max_tokens=osl, ignore_eos=True)),
            )
        )
        lead = 0
        for block_id in row.hash_ids:
            if block_id not in seen:
                break
            lead += 1
        ideal += min(lead * TRACE_BLOCK_TOKENS, row.input_length)
        seen.update(row.hash_ids)
        prompt_tokens += row.input_length
        total += row.input_length + osl
        longest = max(longest, row.input_length + osl)
    return Workload(requests, block_size, ideal / prompt_tokens if prompt_tokens else 0.0, total, longest)


def _prompt(row: TraceRow) -> bytes:
    parts = [struct.pack("<I", block_id) * TRACE_BLOCK_TOKENS for block_id in row.hash_ids]
    return b"".join(parts)[: 4 * row.input_length]


def _path(row: TraceRow, token_ids: bytes, block_size: int, chains: dict[int, list[int]]) -> list[int]:
    if TRACE_BLOCK_TOKENS % block_size:
        return sequence_hashes(block_hashes(token_ids, block_size))
    per_id = TRACE_BLOCK_TOKENS // block_size
    path: list[int] = []
    for block_id in row.hash_ids:
        chain = chains.get(block_id)
        if chain is None:
            block_hash = block_hashes(struct.pack("<I", block_id) * block_size, block_size)[0]
            chain = sequence_hashes([block_hash] * per_id, path[-1] if path else None)
            chains[block_id] = chain
        path += chain
    return path[: row.input_length // block_size]


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of recorded traffic."""

    arrival_ms: float
    """Since the first one."""
    isl: int
    osl: int
    path: Sequence[int]
    """Sequence hashes of the prompt's whole blocks."""
    session: str = ""
    """With its tenant; empty = of none."""
    parent: str = ""
    finished_ms: float | None = None


def recorded_workload(recorded: Sequence[RecordedRequest], block_size: int, speed: float = 1.0) -> Workload:
    """Return recorded requests as a workload that comes ``speed`` times as fast; times must not go backwards."""
    if speed <= 0:
        raise ValueError(f"building a workload: speed is {speed}, allowed are values above 0")
    seen: set[int] = set()
    requests: list[SimulatedRequest] = []
    latest: dict[str, int] = {}
    followers: dict[str, list[tuple[int, float]]] = {}
    ideal = prompt_tokens = total = longest = 0
    for number, each in enumerate(recorded):
        if len(each.path) != each.isl // block_size:
            raise ValueError(
                f"building a workload: request {number} has {len(each.path)} hashes, {each.isl} tokens in blocks of "
                f"{block_size} need {each.isl // block_size}"
            )
        osl = max(1, each.osl)
        generate = Generate(
            f"recorded-{number}",
            struct.pack("<I", number) * each.isl,
            Sampling(max_tokens=osl, ignore_eos=True),
        )
        session, turn = None, 0
        if each.session:
            before = latest.get(each.session)
            turn = 0 if before is None else requests[before].turn + 1
            tenant = each.session.partition(" ")[0]
            session = AgentSession(each.session, tenant, 0, (), each.parent)
            if before is not None and (ended_ms := recorded[before].finished_ms) is not None:
                pause_ms = max(0.0, each.arrival_ms - ended_ms) / speed
                followers.setdefault(requests[before].request_id, []).append((number, pause_ms))
            latest[each.session] = number
        requests.append(
            SimulatedRequest(each.arrival_ms / speed, each.isl, osl, list(each.path), generate, session, turn)
        )
        lead = next((at for at, block in enumerate(each.path) if block not in seen), len(each.path))
        ideal += lead * block_size
        seen.update(each.path)
        prompt_tokens += each.isl
        total += each.isl + osl
        longest = max(longest, each.isl + osl)
    ratio = ideal / prompt_tokens if prompt_tokens else 0.0
    return Workload(requests, block_size, ratio, total, longest, followers)


SPEED_FORM = f"above 0 to {SPEEDUP_MAX:g}"


class SpeedError(ValueError):
    """A description of speeds cannot be used; the message names the place."""


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """One worker's speed for a while."""

    worker: int
    from_ms: float
    to_ms: float
    speed: float


@dataclass(frozen=True, slots=True)
class WorkerSpeeds:
    """The speeds of all workers at all times."""

    pattern: tuple[float, ...] = (1.0,)
    """Speeds of the first workers; the next ones begin with the first again."""
    changes: tuple[SpeedChange, ...] = ()

    @classmethod
    def parse(cls, pattern: str) -> WorkerSpeeds:
        """Return the speeds of ``1,1,0.33``; raises ``SpeedError``."""
        return cls(tuple(_speed(each, f"worker_speeds[{at}]") for at, each in enumerate(pattern.split(","))))

    def at(self, worker: int, now_ms: float) -> float:
        """Return the speed with which a worker begins a step; of changes that overlap the last named one holds."""
        for change in reversed(self.changes):
            if change.worker == worker and change.from_ms <= now_ms < change.to_ms:
                return change.speed
        return self.pattern[worker % len(self.pattern)]

    def next_change_ms(self, worker: int, now_ms: float) -> float:
        """Return when a worker's speed changes next; infinity when it does not."""
        moments = [
            moment
            for change in self.changes
            if change.worker == worker
            for moment in (change.from_ms, change.to_ms)
            if moment > now_ms
        ]
        return min(moments, default=float("inf"))


class ChangingTiming:
    """Another model's times divided by a speed that the caller sets before each step."""

    def __init__(self, model: TimingModel) -> None:
        self._model = model
        self.speed = 1.0

    def prefill_ms(self, new_tokens: int) -> float:
        return self._model.prefill_ms(new_tokens) / self.speed

    def decode_ms(self, used_share: float) -> float:
        return self._model.decode_ms(used_share) / self.speed


def changing(timings: Sequence[TimingModel]) -> list[ChangingTiming]:
    """Return one such timing for each worker."""
    return [ChangingTiming(timing) for timing in timings]


def _speed(text: str, place: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.0 < speed <= SPEEDUP_MAX:
        raise SpeedError(f"{place} is {text!r}, allowed are numbers {SPEED_FORM}")
    return speed


@dataclass(frozen=True, slots=True)
class TtftTargets:
    """TTFT targets in milliseconds, each as likely as the others; drawn by the request's id, for every policy alike."""

    values_ms: tuple[float, ...]
    told: bool = True
    """Whether requests say their target to the router."""

    def of(self, request_id: str) -> float:
        return self.values_ms[stable_u64(f"ttft target of {request_id}") % len(self.values_ms)]
