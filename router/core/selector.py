"""Choose a worker for a request: who may serve it, what they look like, what the policy says, and the record of it all.

``select`` reads the projection and returns a decision without changing anything; ``book`` enters the decision into the
load ledger. The caller does both without letting anything happen in between, so no two requests see the same idle
worker.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import ge, itemgetter
from types import MappingProxyType
from typing import Final

import numpy as np

from poolgrid.router.core.candidates import Candidates, Engines, IndexArray
from poolgrid.router.core.choice import Choice
from poolgrid.router.core.choice_of_few import choose_of_few
from poolgrid.router.core.decision import Decision
from poolgrid.router.core.few_candidates import FewCandidates
from poolgrid.router.core.fleet import Worker
from poolgrid.router.core.hold_plan import OTHERS_SHARE_MAX, Waiting, plan
from poolgrid.router.core.inputs import WorkerWanted
from poolgrid.router.core.load_ledger import Pick
from poolgrid.router.core.media_affinity import MediaAffinity
from poolgrid.router.core.paces import Paces
from poolgrid.router.core.policy import (
    EXPECTED_MS,
    OWN_MS,
    PACE,
    KvAware,
    Policy,
    Predicted,
    uncached_tokens,
)
from poolgrid.router.core.prefix_index import PrefixIndex, slots_of
from poolgrid.router.core.projection import Projection
from poolgrid.router.core.routing_request import RoutingRequest
from poolgrid.router.core.step_curve import PUBLISHED, FloatArray, StepCurve
from poolgrid.wire.card import StepTimes
from poolgrid.wire.identifiers import Role, Stage, WorkerKey

PROMPT_STAGES = (Stage.WHOLE, Stage.PREFILL)
"""Legs that compute a prompt."""

_MutableColumn = list[float] | FloatArray
"""One number per worker that is still to be filled in, of few or of many."""

_ENCODE: Final = Stage.ENCODE
_DECODE: Final = Stage.DECODE
_NOBODY: Final[Mapping[WorkerKey, str]] = MappingProxyType({})
"""No worker, for the many decisions that share it."""

FEW_HOLDERS = 48
"""Up to this many holders of a path are filled in one by one; beyond, their masks are unpacked at once."""


FEW_CANDIDATES = 16
"""Up to this many workers are compared as plain numbers; arrays pay beyond."""


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
    """The policy, which may be somebody's own code, raised or answered what cannot be; nothing was chosen."""

    policy: str
    what: str
    error: Exception | None = None

    def __str__(self) -> str:
        return f"policy {self.policy!r} {self.what}"


Found = Decision | NoWorker | PolicyFailed
"""What comes of looking for a worker."""

BUSY: Final = "busy"
"""Filter reason of a worker that already has as many requests as the router gives it."""


@dataclass(slots=True)
class _Few:
    """A handful of workers in plain numbers."""

    slots: list[int]
    bits: list[int]
    """Of each, its bit in the index's masks."""
    mask: int
    """All of them."""
    pick: Pick
    """Takes their places of the ledger's sums."""
    limits: list[float]
    zeros: tuple[float, ...]
    """A column of nothing."""
    max_sequence_length: int
    """The smallest of them."""


@dataclass(slots=True)
class _EngineColumns:
    """What workers' cards say of their engines' times."""

    curves: tuple[StepCurve, ...]
    curve: IndexArray
    step_tokens: FloatArray
    total_blocks: FloatArray


@dataclass(slots=True)
class _Group:
    """Workers of one model, ready to be looked at; rebuilt when the fleet or a worker's slot changes."""

    workers: tuple[WorkerKey, ...]
    slots: np.ndarray[tuple[int], np.dtype[np.intp]]
    all_rows: np.ndarray[tuple[int], np.dtype[np.intp]]
    row_of_worker: dict[WorkerKey, int]
    row_of_slot: dict[int, int]
    limits: FloatArray
    """Most requests per worker."""
    max_sequence_length: np.ndarray[tuple[int], np.dtype[np.int64]]
    filtered: dict[WorkerKey, str]
    media_kinds: tuple[frozenset[str], ...]
    last_slot: int
    """The highest of ``slots``, 0 without any."""
    few: _Few | None
    """The same in plain numbers, where there are few workers and at least one."""
    engines: _EngineColumns | None
    """Given where paces are learned."""


class Selector:
    """Selection over one projection with one policy."""

    def __init__(
        self,
        projection: Projection,
        policy: Policy,
        requests_per_worker_factor: float = 2.0,
    ) -> None:
        self._projection = projection
        self._policy = policy
        self._factor = requests_per_worker_factor
        self._approximate = projection.approximate
        self._encode_policy: Policy = MediaAffinity()
        self._groups: dict[tuple[str, tuple[Role, ...]], _Group] = {}
        self._groups_version = -1
        if getattr(policy, "needs_paces", False) and projection.paces is None:
            projection.paces = Paces()

    @property
    def projection(self) -> Projection:
        return self._projection

    @property
    def policy(self) -> Policy:
        return self._policy

    def select(
        self,
        request: RoutingRequest,
        path: Sequence[int],
        now_ms: float,
        time_ms: int,
        unavailable: Mapping[WorkerKey, str] | None = None,
        attempt: int = 0,
        roles: tuple[Role, ...] = (Role.AGGREGATED,),
        dry_run: bool = False,
        behind_records: int = 0,
        behind: Mapping[WorkerKey, int] | None = None,
    ) -> Found:
        """Choose a worker for a request whose prompt has the sequence hashes ``path``, or say why there is none.

        ``now_ms`` is monotonic, ``time_ms`` wall clock for the record; ``unavailable`` names workers that the caller
        knows it cannot use, and why; ``behind_records`` marks the decision and changes nothing else; ``behind`` is of
        the plan that the choice is part of. A ``dry_run`` leaves no trace: a policy that counts is asked on a copy.
        """
        group = self._group(request.model, roles)
        projection = self._projection
        untrusted = projection.trust.untrusted if self._approximate is None else {}
        projection.ledger.ensure_slot(group.last_slot)
        if self._approximate is not None:
            self._approximate.expire(now_ms)
        if group.few is not None and not untrusted and not request.media_kinds:
            chosen = self._choose_of_few(group, group.few, request, path, unavailable)
            if chosen is not None:
                few, choice = chosen
                return Decision(
                    request,
                    time_ms,
                    self._policy.name,
                    projection.next_offset,
                    choice,
                    few,
                    dict(group.filtered) if group.filtered else _NOBODY,
                    attempt,
                    untrusted=_NOBODY,
                    behind_records=behind_records,
                    compared_blocks=len(path) if request.media else None,
                )
        filtered = dict(group.filtered)
        rows = self._eligible(group, request, unavailable or {}, filtered)
        if not len(rows):
            busy = frozenset(worker for worker, why in filtered.items() if why is BUSY)
            return NoWorker(request.model, filtered, busy, frozenset(group.filtered))
        everyone = rows is group.all_rows
        slots = group.slots if everyone else group.slots[rows]
        ledger = projection.ledger
        policy = self._encode_policy if request.stage is _ENCODE else self._policy
        device, host, disk = self._overlap(group, path if policy.needs_overlap else (), untrusted, now_ms)
        candidates = Candidates(
            group.workers if everyone else tuple(group.workers[row] for row in rows),
            ledger.prefill_tokens[slots].astype(np.float64),
            ledger.active_blocks[slots].astype(np.float64),
            ledger.requests[slots].astype(np.float64),
            device if everyone else device[rows],
            host if everyone else host[rows],
            disk if everyone else disk[rows],
        )
        if projection.paces is not None and group.engines is not None:
            candidates = replace(
                candidates,
                engines=_engines(group.engines, projection.paces, candidates.workers, rows, now_ms),
                behind=np.array([behind.get(worker, 0) for worker in candidates.workers], np.float64)
                if behind
                else None,
            )
        if dry_run:
            policy = copy.deepcopy(policy)
        try:
            choice = policy.choose(request, candidates)
        except Exception as error:
            return PolicyFailed(policy.name, f"raised {type(error).__name__}: {error}", error)
        if not 0 <= choice.row < len(candidates):
            return PolicyFailed(policy.name, f"chose row {choice.row} of {len(candidates)} candidates")
        return Decision(
            request,
            time_ms,
            policy.name,
            projection.next_offset,
            choice,
            candidates,
            filtered,
            attempt,
            untrusted={worker: why for worker, why in untrusted.items() if worker in group.row_of_worker},
            behind_records=behind_records,
            compared_blocks=len(path) if request.media else None,
        )

    def _choose_of_few(
        self,
        group: _Group,
        few: _Few,
        request: RoutingRequest,
        path: Sequence[int],
        unavailable: Mapping[WorkerKey, str] | None,
    ) -> tuple[FewCandidates, Choice] | None:
        """Choose among few workers that may all serve, without arrays; ``None`` where it takes the general way.

        What comes out is the same, bit for bit, in plain numbers: whoever writes the record down makes its arrays.
        """
        policy = self._policy
        if type(policy) is not KvAware or policy.temperature > 0.0 or request.stage is _ENCODE:
            return None
        if few.max_sequence_length <= request.isl:
            return None
        if unavailable and not group.row_of_worker.keys().isdisjoint(unavailable):
            return None
        ledger = self._projection.ledger
        prefill_tokens, active_blocks, requests = ledger.of_few(few.pick)
        if any(map(ge, requests, few.limits)):
            return None
        device: Sequence[float] = few.zeros
        host = disk = device
        if path:
            found = self._projection.index.find(path)
            if found:
                device, host, disk = self._overlap_of_few(few, path, found)
            computed = self._projection.trust.computed.overlaps(path)
            if computed:
                device, host, disk = list(device), list(host), list(disk)
                _raise_overlap(group, computed, device, host, disk)
        candidates = FewCandidates(
            group.workers,
            prefill_tokens,
            active_blocks,
            requests,
            device,
            host,
            disk,
        )
        return candidates, choose_of_few(request, candidates, policy.weights)

    def _overlap_of_few(
        self, few: _Few, path: Sequence[int], found: Sequence[tuple[int, int]]
    ) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return the leading blocks that few workers hold, by tier; ``found`` is what the index says of the path."""
        index = self._projection.index
        if not index.uses_lower_tiers:
            held: Sequence[float] = few.zeros
            for depth, mask in found:
                if mask & few.mask:
                    held = [depth if mask & bit else other for bit, other in zip(few.bits, held, strict=True)]
            return held, few.zeros, few.zeros
        device: list[float] = list(few.zeros)
        host, disk = device[:], device[:]
        for depth, mask in found:
            for row, slot in enumerate(few.slots):
                if mask >> slot & 1:
                    overlap = index.by_tier(path, slot, depth)
                    device[row], host[row], disk[row] = overlap.device, overlap.host, overlap.disk
        return device, host, disk

    def available(
        self, model: str, roles: tuple[Role, ...], unavailable: Mapping[WorkerKey, str] | None = None
    ) -> bool:
        """Tell whether any worker of these roles takes requests."""
        workers = self._group(model, roles).workers
        if not unavailable:
            return bool(workers)
        return any(worker not in unavailable for worker in workers)

    def room(self, model: str, roles: tuple[Role, ...], missing: Mapping[WorkerKey, str]) -> tuple[int, int, int]:
        """Return the workers of these roles that take requests, the requests on them, and how many they are given."""
        group = self._group(model, roles)
        ledger = self._projection.ledger
        ledger.ensure_slot(group.last_slot)
        rows = [row for row, worker in enumerate(group.workers) if worker not in missing]
        slots = group.slots[rows]
        return len(rows), int(ledger.requests[slots].sum()), int(group.limits[rows].sum())

    @property
    def can_plan(self) -> bool:
        return isinstance(self._policy, Predicted)

    @property
    def plans(self) -> bool:
        """Tell whether requests wait for the worker that is best for them, by ``plan``: where the policy can tell who
        that is, and workers have few requests of other routers."""
        return self.can_plan and self._projection.ledger.others_share <= OTHERS_SHARE_MAX

    def takes_held(self, model: str, roles: tuple[Role, ...]) -> bool:
        """Tell whether any worker of these roles has so few prompt tokens to compute that ``plan`` may place one."""
        group = self._group(model, roles)
        ledger = self._projection.ledger
        ledger.ensure_slot(group.last_slot)
        assert group.engines is not None, "only a policy that plans is asked, and it needs paces"
        return bool((ledger.prefill_tokens[group.slots] < group.engines.step_tokens).any())

    def serves(self, wanted: WorkerWanted) -> bool:
        """Tell whether any worker could serve a request now."""
        group = self._group(wanted.request.model, wanted.roles)
        self._projection.ledger.ensure_slot(group.last_slot)
        return bool(group.workers) and bool(len(self._eligible(group, wanted.request, wanted.unavailable, {})))

    def plan(self, wanted: Sequence[WorkerWanted]) -> list[tuple[int, dict[WorkerKey, int]]]:
        """Return which of some requests that wait go to a worker now, in order, and what is planned behind each.

        They are of one model and want the same roles, at one time. One whom no worker can serve now is the first, so
        that it is told why. Only a policy that plans is asked. Nothing is changed: ``select`` with what is behind
        chooses.
        """
        policy, projection = self._policy, self._projection
        first = wanted[0]
        group = self._group(first.request.model, first.roles)
        assert isinstance(policy, Predicted), "only a policy that plans is asked"
        assert projection.paces is not None, "a policy that needs paces has them"
        assert group.engines is not None, "and its groups have engines"
        if not group.workers:
            return [(0, {})]
        ledger, untrusted, now_ms = projection.ledger, projection.trust.untrusted, first.now_ms
        ledger.ensure_slot(group.last_slot)
        nothing = np.zeros(len(group.workers))
        engines = _engines(group.engines, projection.paces, group.workers, group.all_rows, now_ms)
        candidates = Candidates(
            group.workers,
            ledger.prefill_tokens[group.slots].astype(np.float64),
            ledger.active_blocks[group.slots].astype(np.float64),
            ledger.requests[group.slots].astype(np.float64),
            nothing,
            nothing,
            nothing,
            engines,
        )
        tokens = np.stack(
            [uncached_tokens(each.request, *self._overlap(group, each.path, untrusted, now_ms)) for each in wanted]
        )
        targets_ms = np.array([each.request.ttft_target_ms for each in wanted])
        costs, terms = policy.reckon(targets_ms, tokens, candidates)
        for row, each in enumerate(wanted):
            eligible = self._eligible(group, each.request, each.unavailable, {})
            if eligible is not group.all_rows:
                cannot = np.ones(len(group.workers), np.bool_)
                cannot[eligible] = False
                costs[row, cannot] = np.inf
        waiting = Waiting(
            costs,
            terms[OWN_MS] * engines.paces,
            tokens,
            [each.request.tie_key for each in wanted],
            [each.request.priority for each in wanted],
        )
        placed = plan(waiting, candidates.prefill_tokens, engines.step_tokens, engines.step_ms)
        nowhere = np.flatnonzero(np.isinf(costs).all(axis=1))[:1].tolist()
        due: list[tuple[int, dict[WorkerKey, int]]] = [(row, {}) for row in nowhere]
        due += [(goes.request, {group.workers[row]: n for row, n in goes.behind.items()}) for goes in placed]
        return due

    def best_overlap_blocks(self, model: str, roles: tuple[Role, ...], path: Sequence[int]) -> int:
        """Return the most leading blocks of a path that any worker of these roles holds."""
        group = self._group(model, roles)
        mask_of_group = 0
        for slot in group.slots.tolist():
            mask_of_group |= 1 << slot
        projection = self._projection
        found = next((depth for depth, mask in projection.index.find(path) if mask & mask_of_group), 0)
        computed = [
            depth for worker, depth in projection.trust.computed.overlaps(path) if worker in group.row_of_worker
        ]
        return max(found, *computed) if computed else found

    def advise(self, decision: Decision, path: Sequence[int], now_ms: float) -> None:
        """Let a decision say how long the prompt's blocks should stay, where that is learnt and the worker takes it."""
        retention, request = self._projection.retention, decision.request
        if retention is not None and request.stage in PROMPT_STAGES and self._takes_retention(decision.worker):
            decision.retention = retention.advise(request, path, now_ms)

    def _takes_retention(self, worker: WorkerKey) -> bool:
        return self._projection.fleet.workers[worker].card.takes_retention

    def book(
        self,
        decision: Decision,
        path: Sequence[int],
        now_ms: float,
        dispatch_id: str | None = None,
        lease_ms: float = 0.0,
    ) -> None:
        """Enter a decision into the ledger (and, in approximate mode, into the index).

        ``dispatch_id`` is the id that the worker will report; the request's own when it is not given. ``lease_ms`` is
        how long the entry stands unconfirmed; 0 is the ledger's own.
        """
        request = decision.request
        worker = decision.worker
        uncached = max(0, request.isl - decision.overlap_blocks * request.block_size)
        blocks = request.blocks
        if request.stage is _DECODE:
            uncached = 0
        elif request.stage is _ENCODE:
            # No prompt is computed there and no KV block taken: a request is its only load.
            uncached = blocks = 0
        slot = self._projection.index.slot(worker)
        self._projection.ledger.reserve(
            worker, slot, dispatch_id or request.request_id, uncached, blocks, now_ms, lease_ms
        )
        retention = self._projection.retention
        if retention is not None and request.stage in PROMPT_STAGES and self._takes_retention(worker):
            # What is on workers that cannot be told is no part of what is shared out.
            blocks = self._projection.fleet.workers[worker].card.limits.total_kv_blocks
            retention.begin(worker, blocks, dispatch_id or request.request_id, request, path, now_ms)
        if request.stage is _ENCODE:
            pass  # it leaves no block of the prompt there
        elif self._approximate is not None:
            self._approximate.record(worker, path, now_ms)
        else:
            asked = self._policy.needs_overlap and worker not in decision.untrusted
            self._projection.trust.chosen(
                worker,
                dispatch_id or request.request_id,
                path,
                request.block_size,
                request.stage,
                now_ms,
                decision.overlap_blocks if asked else None,
            )
        paces = self._projection.paces
        if paces is not None:
            choice = decision.choice
            expected = choice.terms.get(EXPECTED_MS)
            if expected is not None:
                row, pace = choice.row, float(choice.terms[PACE][choice.row])
                own_ms = float(choice.terms[OWN_MS][row])
                unit_ms = float(expected[row]) / pace
                paces.chosen(worker, dispatch_id or request.request_id, unit_ms, own_ms, pace, now_ms)

    def _eligible(
        self,
        group: _Group,
        request: RoutingRequest,
        unavailable: Mapping[WorkerKey, str],
        filtered: dict[WorkerKey, str],
    ) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        busy = self._projection.ledger.requests[group.slots] >= group.limits
        short = group.max_sequence_length <= request.isl
        out = busy | short
        for worker, why in unavailable.items():
            row = group.row_of_worker.get(worker)
            if row is not None:
                out[row] = True
                filtered[worker] = why
        if request.media_kinds:
            for row, kinds in enumerate(group.media_kinds):
                if not kinds.issuperset(request.media_kinds):
                    out[row] = True
                    filtered.setdefault(group.workers[row], f"takes no {' and '.join(request.media_kinds)}")
        if not out.any():
            return group.all_rows
        for row in np.flatnonzero(out).tolist():
            worker = group.workers[row]
            if worker not in filtered:
                limit = int(group.max_sequence_length[row])
                filtered[worker] = f"prompt of {request.isl} tokens, room for {limit - 1}" if short[row] else BUSY
        return np.flatnonzero(~out)

    def _overlap(
        self, group: _Group, path: Sequence[int], untrusted: Mapping[WorkerKey, str], now_ms: float
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the leading blocks of a path that the workers of a group hold, by tier."""
        device = np.zeros(len(group.workers))
        host = disk = np.zeros(len(group.workers))
        if path:
            host, disk = self._fill_overlap(group, path, device)
            computed = self._projection.trust.computed.overlaps(path)
            if computed:
                host, disk = host.copy(), disk.copy()
                _raise_overlap(group, computed, device, host, disk)
            if untrusted:
                self._predict_overlap(group, path, untrusted, now_ms, device, host, disk)
        return device, host, disk

    def _fill_overlap(self, group: _Group, path: Sequence[int], device: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Fill in leading blocks per row of the group; return the host and disk columns."""
        index: PrefixIndex = self._projection.index
        found = index.find(path)
        if not index.uses_lower_tiers:
            _fill_depths(group, found, device)
            nothing = np.zeros(len(group.workers))
            return nothing, nothing
        host = np.zeros(len(group.workers))
        disk = np.zeros(len(group.workers))
        for depth, mask in found:
            for slot in slots_of(mask):
                row = group.row_of_slot.get(slot)
                if row is not None:
                    overlap = index.by_tier(path, slot, depth)
                    device[row], host[row], disk[row] = overlap.device, overlap.host, overlap.disk
        return host, disk

    def _predict_overlap(
        self,
        group: _Group,
        path: Sequence[int],
        untrusted: Mapping[WorkerKey, str],
        now_ms: float,
        device: FloatArray,
        host: FloatArray,
        disk: FloatArray,
    ) -> None:
        """Put the router's own predictions in the place of an overlap that is not believed."""
        for worker in untrusted:
            row = group.row_of_worker.get(worker)
            if row is not None:
                device[row] = self._projection.trust.predicted(worker, path, now_ms).device
                host[row] = disk[row] = 0.0

    def _group(self, model: str, roles: tuple[Role, ...]) -> _Group:
        fleet = self._projection.fleet
        # Both only grow. A worker whose cache was cleared is in the fleet as before and has another slot.
        version = fleet.version + self._projection.index.slot_changes
        if self._groups_version != version:
            self._groups.clear()
            self._groups_version = version
        group = self._groups.get((model, roles))
        if group is None:
            group = self._make_group(fleet.serving(model, roles))
            self._groups[(model, roles)] = group
        return group

    def _make_group(self, serving: list[Worker]) -> _Group:
        index = self._projection.index
        taken = [worker for worker in serving if not worker.draining]
        slots = np.array([index.slot(worker.key) for worker in taken], np.intp)
        limits = np.array([max(1.0, self._factor * worker.card.limits.max_batch_size) for worker in taken], np.float64)
        return _Group(
            tuple(worker.key for worker in taken),
            slots,
            np.arange(len(taken)),
            {worker.key: row for row, worker in enumerate(taken)},
            {int(slot): row for row, slot in enumerate(slots)},
            limits,
            np.array([worker.card.limits.max_sequence_length for worker in taken], np.int64),
            {worker.key: "draining" for worker in serving if worker.draining},
            tuple(frozenset(worker.card.media.kinds) for worker in taken),
            int(slots.max(initial=0)),
            _few(taken, slots.tolist(), limits.tolist()),
            None if self._projection.paces is None else _engine_columns(taken),
        )


def _raise_overlap(
    group: _Group,
    computed: Sequence[tuple[WorkerKey, int]],
    device: _MutableColumn,
    host: _MutableColumn,
    disk: _MutableColumn,
) -> None:
    """Let workers hold at least what they have computed; what they have not told of is on their devices."""
    for worker, depth in computed:
        row = group.row_of_worker.get(worker)
        if row is not None and depth > device[row] + host[row] + disk[row]:
            device[row], host[row], disk[row] = float(depth), 0.0, 0.0


def _fill_depths(group: _Group, found: Sequence[tuple[int, int]], device: FloatArray) -> None:
    """Fill in, per row of the group, the depth that ``PrefixIndex.find`` found of its worker."""
    if not found:
        return
    holders = sum(mask.bit_count() for _, mask in found)
    if holders <= FEW_HOLDERS:
        row_of_slot = group.row_of_slot
        for depth, mask in found:
            for slot in slots_of(mask):
                row = row_of_slot.get(slot)
                if row is not None:
                    device[row] = depth
        return
    # Every mask as a row of bits, all of them unpacked at once. No worker is in two.
    bits = max(group.last_slot + 1, *(mask.bit_length() for _, mask in found))
    width = (bits + 7) // 8
    packed = b"".join([mask.to_bytes(width, "little") for _, mask in found])
    held = np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").view(bool))
    depths = np.zeros(8 * width)
    depths[held % (8 * width)] = np.array([depth for depth, _ in found], np.float64)[held // (8 * width)]
    device[:] = depths[group.slots]


def _engine_columns(workers: Sequence[Worker]) -> _EngineColumns:
    curves: dict[StepTimes, StepCurve] = {}
    curve = []
    for worker in workers:
        times = worker.card.step_times
        if times not in curves:
            curves[times] = StepCurve(times.prefill, times.decode) if times.prefill and times.decode else PUBLISHED
        curve.append(list(curves).index(times))
    limits = [worker.card.limits for worker in workers]
    return _EngineColumns(
        tuple(curves.values()),
        np.array(curve, np.intp),
        np.array([max(1, each.max_num_tokens) for each in limits], np.float64),
        np.array([max(1, each.total_kv_blocks) for each in limits], np.float64),
    )


def _engines(
    columns: _EngineColumns,
    paces: Paces,
    workers: Sequence[WorkerKey],
    rows: np.ndarray[tuple[int], np.dtype[np.intp]],
    now_ms: float,
) -> Engines:
    learned, done, waiting = paces.believed(workers, now_ms)
    choices_per_ms, typical_ms = paces.arrivals(now_ms)
    return Engines(
        columns.curves,
        columns.curve[rows],
        columns.step_tokens[rows],
        columns.total_blocks[rows],
        np.array(learned, np.float64),
        np.array(done, np.float64),
        np.array(waiting, np.float64),
        choices_per_ms,
        typical_ms,
    )


def _few(workers: Sequence[Worker], slots: list[int], limits: list[float]) -> _Few | None:
    if not 1 <= len(workers) <= FEW_CANDIDATES:
        return None
    bits = [1 << slot for slot in slots]
    shortest = min(worker.card.limits.max_sequence_length for worker in workers)
    return _Few(slots, bits, sum(bits), _pick(slots), limits, (0.0,) * len(slots), shortest)


def _pick(slots: list[int]) -> Pick:
    if len(slots) > 1:
        return itemgetter(*slots)
    [only] = slots
    return lambda sums: (sums[only],)
