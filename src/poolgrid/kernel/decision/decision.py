"""The record of a routing decision: every candidate, every term, the choice, the reason, and what came of it.

Decisions live in a ring of bounded length, newest last; the oldest is forgotten when a new one comes. A record keeps
the policy's arrays and turns them into readable rows only on demand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from poolgrid.kernel.decision.policy import EXPECTED_MS, Candidates, Choice, RoutingRequest
from poolgrid.kernel.decision.stage_plan import LegChoice, Outlook
from poolgrid.kernel.wire.answers import (
    CandidateRow,
    DecisionExplanation,
    DecisionRow,
    LegRow,
    LegsRow,
    MediaRow,
    SecondCounts,
)
from poolgrid.kernel.wire.identifiers import (
    SEPARATOR,
    STAGE_WORD,
    Stage,
    WorkerId,
    WorkerKey,
    dispatch_of,
    kept_under,
    name_of,
)

DECISION_BYTES: Final = 1000
"""Measured: the record itself, its request, its place in the log."""

ARRAY_BYTES: Final = 112
"""Measured: what numpy takes for an array in addition to its values."""

TUPLE_BYTES: Final = 56
TUPLE_VALUE_BYTES: Final = 22
"""What a column of plain numbers takes: a tuple, and for each row a place and, in half the columns, its own number."""

ENGINE_COLUMNS: Final = 8
LEARNED_BYTES: Final = 100
"""What was known of the engines, kept for the terms of the cost: arrays, or for each of few workers a tuple."""

OTHER_BYTES: Final = 200
"""About what a worker that was no candidate takes, with the reason."""

_NO_REASONS: Final[Mapping[WorkerKey, str]] = MappingProxyType({})
_NO_WORKER: Final = WorkerKey(WorkerId(""), 0)


class Decision(msgspec.Struct, eq=False, gc=False):
    """Why one request went to one worker."""

    request: RoutingRequest
    time_ms: int
    policy: str
    offset: int
    """The router's state held every journal record below this offset."""
    choice: Choice
    candidates: Candidates
    filtered: Mapping[WorkerKey, str]
    """Workers that were not candidates, and why."""
    attempt: int = 0
    """0 for the first dispatch, n for the n-th migration."""
    untrusted: Mapping[WorkerKey, str] = _NO_REASONS
    """Workers whose overlap is the router's own prediction, because their stream is not trusted, and the reason."""
    behind_records: int = 0
    """Records that the pool's journal was known to hold beyond ``offset``; above 0 the router was catching up."""
    compared_blocks: int | None = None
    """Leading blocks of a prompt with media that could be compared with what workers hold."""
    queued_ms: float = 0.0
    """How long the request waited for a worker with room before this decision could be carried out."""
    legs: LegChoice | None = None
    """Why the request has one leg or two, where both were possible."""
    realised_cached_tokens: int | None = None
    """What the worker then really reused."""
    reported_isl: int | None = None
    """Prompt tokens that the engine counted."""
    seen_tokens: int = 0
    """Leading prompt tokens that this router had sent to the pool before."""
    failure: str = ""
    """Why its worker did not serve it, or not to the end."""
    realised_ttft_ms: float | None = None
    """How long its first token then really took, as far as the policy expected something."""
    is_reservation: bool = False
    """Whether it was made for a global router, past which the tokens do not come here."""
    kept_bytes: int = 0
    """What it takes of a log that keeps it."""
    worker: WorkerKey = _NO_WORKER
    """The chosen worker."""
    overlap_blocks: int = 0
    """Blocks that it held according to the router, on any tier."""
    overlap_tokens: int = 0
    """Tokens of the prompt in these."""

    def __post_init__(self) -> None:
        row, columns, request = self.choice.row, self.candidates, self.request
        self.worker = columns.workers[row]
        held = int(columns.device_overlap[row] + columns.host_overlap[row] + columns.disk_overlap[row])
        if held:
            self.overlap_blocks, self.overlap_tokens = held, min(request.isl, held * request.block_size)

    @property
    def reason(self) -> str:
        """Return the short reason code; it shows when the chosen worker's overlap was predicted, and when the
        router was behind the pool's journal.
        """
        reason = f"{self.choice.reason}-predicted" if self.worker in self.untrusted else self.choice.reason
        return f"{reason}-behind" if self.behind_records else reason

    @property
    def prefill_tokens(self) -> int:
        return int(self.candidates.prefill_tokens[self.choice.row])

    def size_bytes(self) -> int:
        """Return about how much memory the record takes: its columns, and what is measured for the rest."""
        # Six columns, the cost and the terms where they are kept: all as long as there are candidates.
        choice, rows = self.choice, len(self.candidates.workers)
        columns = 6 + (choice.costs is not None)
        if not callable(choice.given_terms):
            columns += len(choice.given_terms)
        is_array = isinstance(self.candidates.prefill_tokens, np.ndarray)
        column_bytes = ARRAY_BYTES + 8 * rows if is_array else TUPLE_BYTES + TUPLE_VALUE_BYTES * rows
        has_engines = self.candidates.engines is not None
        columns += ENGINE_COLUMNS if is_array and has_engines else 0
        learned_bytes = LEARNED_BYTES * rows if has_engines and not is_array else 0
        others = len(self.filtered) + len(self.untrusted)
        return DECISION_BYTES + columns * column_bytes + learned_bytes + OTHER_BYTES * others

    def margin(self) -> float | None:
        """Return by how much the runner-up would have cost more; ``None`` without a cost or a runner-up."""
        costs = self.choice.costs
        if costs is None or len(costs) < 2:
            return None
        chosen = float(costs[self.choice.row])
        return min(float(cost) for row, cost in enumerate(costs) if row != self.choice.row) - chosen

    def runner_up(self) -> WorkerKey | None:
        """Return the cheapest of the workers that were not chosen; ``None`` without a cost or without any."""
        costs = self.choice.costs
        if costs is None or len(costs) < 2:
            return None
        row = min((row for row in range(len(costs)) if row != self.choice.row), key=lambda row: float(costs[row]))
        return self.candidates.workers[row]

    def expected_ttft_ms(self) -> float | None:
        """Return what the policy expected of the chosen worker; ``None`` for one that expects nothing."""
        expected = self.choice.terms.get(EXPECTED_MS)
        return None if expected is None else float(expected[self.choice.row])

    def summary(self) -> DecisionRow:
        costs = self.choice.costs
        return DecisionRow(
            request_id=self.request.request_id,
            time_ms=self.time_ms,
            stage=STAGE_WORD[self.request.stage],
            policy=self.policy,
            reason=self.reason,
            worker=str(self.worker),
            isl=self.request.isl,
            isl_blocks=self.request.blocks,
            overlap_blocks=self.overlap_blocks,
            cost=None if costs is None else float(costs[self.choice.row]),
            candidates=len(self.candidates),
            realised_cached_tokens=self.realised_cached_tokens,
            session=self.request.session,
        )

    def explanation(self) -> DecisionExplanation:
        """Return everything, one row per candidate."""
        columns = self.candidates
        terms = dict(self.choice.terms)
        rows = [
            CandidateRow(
                worker=str(worker),
                chosen=row == self.choice.row,
                device_overlap_blocks=int(columns.device_overlap[row]),
                host_overlap_blocks=int(columns.host_overlap[row]),
                disk_overlap_blocks=int(columns.disk_overlap[row]),
                active_prefill_tokens=int(columns.prefill_tokens[row]),
                active_blocks=int(columns.active_blocks[row]),
                requests=int(columns.requests[row]),
                cost=None if self.choice.costs is None else float(self.choice.costs[row]),
                terms={name: float(values[row]) for name, values in terms.items()},
            )
            for row, worker in enumerate(columns.workers)
        ]
        return DecisionExplanation(
            **msgspec.structs.asdict(self.summary()),
            offset=self.offset,
            behind_records=self.behind_records,
            attempt=self.attempt,
            block_size=self.request.block_size,
            margin=self.margin(),
            expected_ttft_ms=self.expected_ttft_ms(),
            realised_ttft_ms=self.realised_ttft_ms,
            failure=self.failure or UNSET,
            runner_up=None if (runner_up := self.runner_up()) is None else str(runner_up),
            rows=rows,
            filtered={str(worker): why for worker, why in self.filtered.items()},
            untrusted={str(worker): why for worker, why in self.untrusted.items()},
            media=self._media(),
            legs=UNSET if self.legs is None else _legs_row(self.legs),
        )

    def _media(self) -> MediaRow | UnsetType:
        if self.compared_blocks is None:
            return UNSET
        return MediaRow(items=len(self.request.media), compared_blocks=self.compared_blocks)


def _legs_row(legs: LegChoice) -> LegsRow:
    return LegsRow(reason=legs.reason, one=_leg_row(legs.one, "pause_ms"), two=_leg_row(legs.two, "transfer_ms"))


def _leg_row(outlook: Outlook | None, further: str) -> LegRow | None:
    if outlook is None:
        return None
    terms = {"queue_ms": outlook.queue_ms, "prompt_ms": outlook.prompt_ms, further: outlook.further_ms}
    return LegRow(cost_ms=outlook.cost_ms, weight=outlook.weight, terms=terms)


DECISION_LOG_BYTES: Final = 64 * 1024 * 1024
"""Memory of the kept decisions: 10,000 of them over 32 workers, 3,000 over 256."""


class DecisionLog:
    """The last decisions, by request id; a migrated request keeps one record per attempt.

    At most ``capacity`` of them and about ``budget_bytes``; beyond either the oldest is forgotten, the last one never.
    """

    def __init__(self, capacity: int, budget_bytes: int = DECISION_LOG_BYTES) -> None:
        if capacity < 1:
            raise ValueError(f"making a decision log: capacity is {capacity}, allowed are integers from 1")
        if budget_bytes < 1:
            raise ValueError(f"making a decision log: budget_bytes is {budget_bytes}, allowed are integers from 1")
        self._capacity = capacity
        self._budget_bytes = budget_bytes
        self.size_bytes = 0
        """What the kept decisions take, about."""
        self._decisions: OrderedDict[tuple[str, int], Decision] = OrderedDict()
        """Oldest first."""
        self._latest: dict[str, str] = {}
        """The latest request that clients called by a name; none of those whose id is the name."""
        self.added = 0
        """Decisions so far, forgotten ones included."""
        self.seconds = SecondCounts()
        """What was decided in each of the last seconds, forgotten decisions included."""

    def add(self, decision: Decision) -> None:
        """Keep a decision, forgetting the oldest beyond the capacity."""
        self.added += 1
        request = decision.request
        if request.stage is not Stage.DECODE:
            if decision.attempt:
                self.seconds.add(decision.time_ms, (0, 0, 0, 1))
            else:
                self.seconds.add(decision.time_ms, (1, request.isl, decision.overlap_tokens, 0))
        decisions = self._decisions
        request_id = request.request_id
        key = (request_id, decision.attempt)
        if key in decisions:
            self.size_bytes -= decisions.pop(key).kept_bytes
        decisions[key] = decision
        if SEPARATOR in request_id:
            self._latest[name_of(request_id)] = request_id
        decision.kept_bytes = kept_bytes = decision.size_bytes()
        self.size_bytes += kept_bytes
        while len(decisions) > self._capacity or (self.size_bytes > self._budget_bytes and len(decisions) > 1):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        (request_id, attempt), forgotten = self._decisions.popitem(last=False)
        self.size_bytes -= forgotten.kept_bytes
        if SEPARATOR not in request_id:
            return  # it was found by no other name
        name = name_of(request_id)
        # What comes later of the same request is younger, and still there.
        if self._latest.get(name) == request_id and (request_id, attempt + 1) not in self._decisions:
            del self._latest[name]

    def of_request(self, request_id: str) -> list[Decision]:
        """Return a request's decisions, first attempt first; empty when none is kept.

        It may be asked for by any name that people have of it (``poolgrid.kernel.wire.identifiers.kept_under``). By one
        that several clients chose, those of the latest are returned; of a request with several sequences those of each.
        """
        found = []
        for sequence in kept_under(request_id, self._id_under):
            attempt = 0
            while (decision := self._decisions.get((sequence, attempt))) is not None:
                found.append(decision)
                attempt += 1
        return found

    def _id_under(self, name: str) -> str | None:
        return name if (name, 0) in self._decisions else self._latest.get(name)

    def of_dispatch(self, dispatch_id: str) -> Decision | None:
        """Return the decision of a dispatch: attempt 0 has the request's own id, attempt n is called ``<id>~<n>``."""
        return self._decisions.get((dispatch_id, 0)) or self._decisions.get(dispatch_of(dispatch_id))

    def first_token(self, dispatch_id: str, ttft_ms: float) -> Decision | None:
        """Note how long the first token of a dispatch really took; return its decision, if it is kept."""
        decision = self.of_dispatch(dispatch_id)
        if decision is not None:
            decision.realised_ttft_ms = ttft_ms
        return decision

    @property
    def oldest_ms(self) -> int | None:
        """When the oldest that is kept was made; ``None`` = none is kept."""
        return next((each.time_ms for each in self._decisions.values()), None)

    def newest(self, limit: int) -> list[Decision]:
        return list(islice(reversed(self._decisions.values()), limit))

    def __len__(self) -> int:
        return len(self._decisions)
