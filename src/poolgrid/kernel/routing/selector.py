"""Choose a worker for a request: the eligible workers, their state, the policy's choice, and the record of it all.

``select`` reads the projection and returns a decision without changing anything; ``book`` enters the decision into the
load ledger. The caller does both without letting anything happen in between, so no two requests see the same idle
worker.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from msgspec.structs import replace

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import Candidates, FewestRequests, IndexArray, MediaAffinity, Policy
from poolgrid.kernel.decision.stage_plan import (
    EITHER_ROLES,
    ONE_LEG_ROLES,
    PREFILL_ROLES,
    LegChoice,
    PromptWorker,
    choose_legs,
    one_leg,
    spec_of,
    two_legs,
)
from poolgrid.kernel.projection.leg_times import LearnedLegTimes
from poolgrid.kernel.projection.observers import Observer
from poolgrid.kernel.projection.projection import Projection
from poolgrid.kernel.routing.engine_times import uncached_tokens
from poolgrid.kernel.routing.inputs import WorkerWanted
from poolgrid.kernel.routing.worker_groups import BUSY, Columns, WorkerGroup, WorkerGroups, overlap_columns
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerKey
from poolgrid.kernel.wire.tasks import TASK_ROLES

PROMPT_STAGES: Final = (Stage.WHOLE, Stage.PREFILL)
"""Legs that compute a prompt."""

_NO_WORKERS: Final[Mapping[WorkerKey, str]] = MappingProxyType({})
"""No worker, for the many decisions that share it."""


@dataclass(frozen=True, slots=True)
class NoWorker:
    """No worker can serve the request now."""

    model: str
    reasons: Mapping[WorkerKey, str]
    """Of each why not, in words."""
    busy: frozenset[WorkerKey] = frozenset()
    """Those that could serve it once they have room."""
    draining: frozenset[WorkerKey] = frozenset()
    """Those that take nothing new."""

    def __str__(self) -> str:
        detail = "; ".join(f"{worker}: {why}" for worker, why in self.reasons.items()) or "no worker serves this model"
        return f"choosing a worker for model {self.model!r}: {detail}"


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """The policy, which may be the operator's own code, raised or gave an invalid answer; nothing was chosen."""

    policy: str
    what: str
    error: Exception | None = None

    def __str__(self) -> str:
        return f"policy {self.policy!r} {self.what}"


Found = Decision | NoWorker | PolicyFailed
"""What comes of looking for a worker."""


class Planner(Protocol):
    """Decides which of the requests that wait at a router go to a worker now."""

    @property
    def is_active(self) -> bool:
        """Return whether requests should wait for the worker that is best for them, now."""
        ...

    def openings(self, model: str, roles: tuple[Role, ...]) -> int:
        """Return how many workers of these roles could be given a request that waits."""
        ...

    def can_plan(self, wanted: WorkerWanted) -> bool:
        """Return whether some worker could serve a request now."""
        ...

    def holds(self, decision: Decision) -> bool:
        """Return whether a new request waits to be planned with others instead of going where a decision sends it."""
        ...

    def plan(self, wanted: Sequence[WorkerWanted]) -> list[tuple[int, Mapping[WorkerKey, int]]]:
        """Return which of some requests for workers of one model go now, in order, and how many are planned behind each
        by worker. At least one; all ask at the same time for workers of the same model and roles."""
        ...


class Selector:
    """Selection over one projection with one policy."""

    def __init__(self, projection: Projection, policy: Policy, requests_per_worker_factor: float = 2.0) -> None:
        self.projection: Final = projection
        self.policy: Final = policy
        self.groups: Final = WorkerGroups(projection, requests_per_worker_factor)
        self._compares_numbers = bool(getattr(policy, "compares_numbers", False))
        self._policies: dict[Stage, Policy] = {
            Stage.ENCODE: MediaAffinity(),
            **dict.fromkeys(TASK_ROLES, FewestRequests()),
        }
        """Of stages in which no prompt is computed."""
        make_index = getattr(policy, "index_observer", None)
        if make_index is not None:
            projection.attach(make_index(projection.index))
        make_observer = getattr(policy, "observer", None)
        self.observer: Observer | None = None
        """The policy's own, if it has one."""
        if make_observer is not None:
            self.observer = projection.attach(make_observer(projection.index))
        make_planner = getattr(policy, "planner", None)
        self.planner: Planner | None = None if make_planner is None else make_planner(self)
        """Decides who of those that wait goes to a worker, with a policy that plans."""

    def select(self, wanted: WorkerWanted, dry_run: bool = False) -> Found:
        """Choose a worker for a request, or give the reason why there is none; nothing is booked.

        A ``dry_run`` leaves no trace: a policy that counts is asked on a copy.
        """
        projection = self.projection
        if not projection.follows_blocks:
            projection.predictions.expire(wanted.now_ms)
        legs: LegChoice | None = None
        if wanted.roles == EITHER_ROLES:
            wanted, legs = self.with_legs(wanted)
        request, path = wanted.request, wanted.path
        group = self.groups.of(request.model, wanted.roles)
        rows, filtered = group.eligible(request, wanted.unavailable, projection.ledger)
        if not len(rows):
            busy = frozenset(worker for worker, why in filtered.items() if why is BUSY)
            return NoWorker(request.model, filtered, busy, frozenset(group.draining))
        policy = self.policy if request.stage in PROMPT_STAGES else self._policies.get(request.stage, self.policy)
        untrusted = projection.trust.untrusted if projection.follows_blocks else _NO_WORKERS
        as_numbers = self._compares_numbers and policy is self.policy and group.few is not None
        overlap = overlap_columns(
            projection, group, path if policy.needs_overlap else (), request, untrusted, wanted.now_ms, as_numbers
        )
        candidates = self._candidates(group, rows, overlap, wanted, as_numbers)
        if dry_run:
            policy = copy.deepcopy(policy)
        try:
            choice = policy.choose(request, candidates)
        except Exception as error:
            return PolicyFailed(policy.name, f"raised {type(error).__name__}: {error}", error)
        if not 0 <= choice.row < len(candidates.workers):
            return PolicyFailed(policy.name, f"chose row {choice.row} of {len(candidates.workers)} candidates")
        if untrusted:
            untrusted = {worker: why for worker, why in untrusted.items() if worker in group.row_of_worker}
        return Decision(
            request,
            wanted.time_ms,
            policy.name,
            projection.next_offset,
            choice,
            candidates,
            filtered,
            wanted.attempt,
            untrusted or _NO_WORKERS,
            wanted.behind_records,
            len(path) if request.media else None,
            wanted.queued_ms,
            legs,
        )

    def with_legs(self, wanted: WorkerWanted) -> tuple[WorkerWanted, LegChoice | None]:
        """Return a question that leaves the number of legs open as one for the first leg, and why; as it is where no
        worker takes it now."""
        times, request = self.projection.legs, wanted.request
        if times is None:
            return wanted, None
        whole, uncached_tokens = self._prompt_workers(wanted, ONE_LEG_ROLES, times)
        prefill, _ = self._prompt_workers(wanted, PREFILL_ROLES, times)
        if not whole and not prefill:
            return wanted, None
        legs = choose_legs(one_leg(whole), two_legs(prefill, times.transfer_ms(uncached_tokens, wanted.now_ms)))
        leg = spec_of(legs)
        if request.stage is not leg.stage:
            request = replace(request, stage=leg.stage)
        return replace(wanted, request=request, roles=leg.roles), legs

    def _prompt_workers(
        self, wanted: WorkerWanted, roles: tuple[Role, ...], times: LearnedLegTimes
    ) -> tuple[list[PromptWorker], float]:
        """Return what workers of some roles would need that can take a request now, and the tokens that the one lacks
        which holds most of it."""
        projection, request = self.projection, wanted.request
        group, ledger = self.groups.of(request.model, roles), projection.ledger
        rows, _ = group.eligible(request, wanted.unavailable, ledger)
        if not len(rows):
            return [], float(request.isl)
        path = wanted.path if self.policy.needs_overlap else ()
        untrusted = projection.trust.untrusted if projection.follows_blocks else _NO_WORKERS
        overlap = overlap_columns(projection, group, path, request, untrusted, wanted.now_ms)
        uncached = uncached_tokens(request, *overlap)[rows]
        slots = group.slots[rows]
        queued, requests = ledger.prefill_tokens[slots].tolist(), ledger.requests[slots].tolist()
        needs = [
            times.prompt_ms(group.workers[row], tokens_before, tokens, wanted.now_ms)
            for row, tokens_before, tokens in zip(rows.tolist(), queued, uncached.tolist(), strict=True)
        ]
        workers = [PromptWorker(*need, others > 0) for need, others in zip(needs, requests, strict=True)]
        return workers, float(uncached.min())

    def waiting_candidates(self, group: WorkerGroup, wanted: Sequence[WorkerWanted]) -> list[Candidates]:
        """Return all of a group for each of some requests that ask at the same time: only overlaps differ."""
        projection, untrusted = self.projection, self.projection.trust.untrusted
        first, *others = (
            overlap_columns(projection, group, each.path, each.request, untrusted, each.now_ms) for each in wanted
        )
        known = self._candidates(group, group.all_rows, first, wanted[0], as_numbers=False)
        return [known] + [replace(known, device_overlap=on[0], host_overlap=on[1], disk_overlap=on[2]) for on in others]

    def _candidates(
        self, group: WorkerGroup, rows: IndexArray, overlap: Columns, wanted: WorkerWanted, as_numbers: bool
    ) -> Candidates:
        """Return rows of a group, as arrays or as plain numbers, with what the policy's observer knows of them."""
        ledger, workers, observer = self.projection.ledger, group.workers, self.observer
        places = None
        if rows is not group.all_rows:
            places = rows.tolist()
            workers = tuple(workers[row] for row in places)
        behind: Any = [float(wanted.behind.get(worker, 0)) for worker in workers] if wanted.behind else None
        columns: list[Any]
        if as_numbers:
            assert group.few is not None
            # Tuples of numbers: the collector forgets them. A log keeps thousands of decisions, and a look at the lists
            # of all of them, with every number in them, is a pause of 200 ms.
            columns = [*ledger.of_few(group.few.pick), *map(tuple, overlap)]
            if places is not None:
                columns = [tuple([column[row] for row in places]) for column in columns]
            engines = None if observer is None else observer.describe_few(group.members, places, wanted.now_ms)
        else:
            loads, slots = (ledger.prefill_tokens, ledger.active_blocks, ledger.requests), group.slots[rows]
            columns = [load[slots].astype(np.float64) for load in loads]
            columns += overlap if places is None else [column[rows] for column in overlap]
            engines = None if observer is None else observer.describe(group.members, rows, wanted.now_ms)
            behind = None if behind is None else np.array(behind, np.float64)
        prefill_tokens, active_blocks, requests, device, host, disk = columns
        return Candidates(workers, prefill_tokens, active_blocks, requests, device, host, disk, engines, behind)

    def available(
        self, model: str, roles: tuple[Role, ...], unavailable: Mapping[WorkerKey, str] | None = None
    ) -> bool:
        """Return whether any worker of these roles takes requests."""
        workers = self.groups.of(model, roles).workers
        if not unavailable:
            return bool(workers)
        return any(worker not in unavailable for worker in workers)

    def room(self, model: str, roles: tuple[Role, ...], missing: Mapping[WorkerKey, str]) -> tuple[int, int, int]:
        """Return the workers of these roles that take requests, the requests on them, and how many they are given."""
        group = self.groups.of(model, roles)
        rows = [row for row, worker in enumerate(group.workers) if worker not in missing]
        slots = group.slots[rows]
        return len(rows), int(self.projection.ledger.requests[slots].sum()), int(group.limits[rows].sum())

    def best_overlap_blocks(self, model: str, roles: tuple[Role, ...], path: Sequence[int]) -> int:
        """Return the most leading blocks of a path that any worker of these roles holds."""
        group = self.groups.of(model, roles)
        mask_of_group = 0
        for slot in group.slots.tolist():
            mask_of_group |= 1 << slot
        projection = self.projection
        found = next((depth for depth, mask in projection.index.find(path) if mask & mask_of_group), 0)
        computed = [
            depth for worker, depth in projection.trust.computed.overlaps(path) if worker in group.row_of_worker
        ]
        return max(found, *computed) if computed else found

    def book(
        self,
        decision: Decision,
        path: Sequence[int],
        now_ms: float,
        dispatch_id: str | None = None,
        lease_ms: float = 0.0,
    ) -> None:
        """Enter a decision into the ledger, and let observers know.

        ``dispatch_id`` is the id that the worker will report; the request's own when it is not given. ``lease_ms`` is
        how long the entry stands unconfirmed; 0 is the ledger's own.
        """
        request, worker, projection = decision.request, decision.worker, self.projection
        dispatch_id = dispatch_id or request.request_id
        has_prompt = request.stage in PROMPT_STAGES
        uncached = request.isl - decision.overlap_tokens if has_prompt else 0
        # No KV block is taken by an encoder: a request is its only load.
        blocks = 0 if request.stage is Stage.ENCODE else request.blocks
        slot = projection.index.slot(worker)
        projection.ledger.reserve(worker, slot, dispatch_id, uncached, blocks, now_ms, lease_ms)
        if has_prompt and projection.follows_blocks:
            if request.by_text:
                projection.trust.predictions.record(worker, path, now_ms)
            else:
                is_known = self.policy.needs_overlap and worker not in decision.untrusted
                held = decision.overlap_blocks if is_known else None
                projection.trust.chosen(worker, dispatch_id, path, request.block_size, now_ms, held)
        card = projection.fleet.workers[worker].card
        for observer in projection.observers:
            observer.on_chosen(decision, card, dispatch_id, path, now_ms)
