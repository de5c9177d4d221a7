"""What a request needs next, and which worker gets it: legs by the plan, workers by the selector.

Nothing here is booked or sent. A choice is used in the turn of the event loop in which it was made.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.decision.stage_plan import (
    DECODE_ROLES,
    EITHER_ROLES,
    ENCODE_LEG,
    ENCODE_ROLES,
    ONE_LEG_ROLES,
    ONE_SERVER,
    PREFILL_ROLES,
    SECOND_LEG,
    TASK_LEGS,
    WHOLE_ROLES,
    LegSpec,
    RoleAvailability,
    first_leg,
    spec_of,
)
from poolgrid.kernel.index.following_tokens import FollowingTokens
from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.requests.legs import LegPlan
from poolgrid.kernel.routing.inputs import TurnOffered, WorkerWanted
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import PROMPT_STAGES, NoWorker, Planner, PolicyFailed
from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerKey
from poolgrid.kernel.wire.sessions import TurnPlace
from poolgrid.kernel.wire.tasks import stage_of
from poolgrid.server.process.clock import Clock
from poolgrid.server.router.engine_backlog import ENOUGH_TO_COMPUTE, waits_too_long, with_enough
from poolgrid.server.router.fleet_links import FleetLinks
from poolgrid.server.router.placement import LocalRequest, Placement, PlacementFailure
from poolgrid.server.router.session_naming import SessionNaming
from poolgrid.server.router.settings import RouterSettings
from poolgrid.server.serving.admission_queue import FullWorkers
from poolgrid.server.serving.prompt_paths import TenantPaths, media_hashes, media_kinds, prompt_path, seed_of

log: Final = logging.getLogger(__name__)

PROMPT_ROLES: Final = EITHER_ROLES
"""Who may hold a prompt's prefix where it would be computed."""

LONG_PROMPT_BYTES: Final = 8192 * 4
"""Token bytes of a prompt that is hashed in one go: 8,192 tokens are a quarter of a millisecond."""

CROWDED: Final = "its sessions fill its cache"
"""Filter reason of a worker where a turn would evict sessions that run."""

NO_ADAPTER: Final = "it does not serve the adapter"
"""Filter reason of a worker for requests with an adapter that others of its model serve."""

NOT_THE_MAKER: Final = "its server did not make what the request continues"
"""Filter reason of a worker for requests that continue what one engine server keeps."""

NO_SERVER: Final = "it takes requests by token ids"
"""Filter reason of a worker without an engine server, for a forwarded request."""

_NO_WORKERS: Final[frozenset[WorkerKey]] = frozenset()

STRETCHES_PER_TURN: Final = 8
"""Stretches of a long prompt that are hashed before others have their turn: about 0.15 ms."""


def domain_of(request: InferenceRequest) -> str:
    """Return what a prompt's blocks are hashed with besides its tokens (``RoutingRequest.domain``)."""
    return "adapter" if request.lora_name else "salt" if request.cache_salt else ""


class Chooser:
    """Chooses workers for the requests of one router."""

    def __init__(
        self,
        settings: RouterSettings,
        state: RouterState,
        links: FleetLinks,
        clock: Clock,
        behind_records: Callable[[], int],
        full: FullWorkers[WorkerKey],
    ) -> None:
        self.paths = TenantPaths()
        self.naming = SessionNaming(state.projection, clock.wall_ms)
        self.full = full
        """Workers that refused requests for lack of room: they get nothing for a while."""
        self._always_two = settings.legs == "two"
        self._state = state
        self._selector = state.selector
        self._projection = state.projection
        self.planner: Planner | None = state.selector.planner if settings.hold_limit_ms > 0 else None
        """Where requests may ever wait for the worker that is best for them."""
        self._holds_back = settings.max_queue_requests > 0
        self._links = links
        self._clock = clock
        self._behind_records = behind_records
        self._staff: dict[tuple[str, bool], RoleAvailability] = {}
        """By model, and whether requests are forwarded; forgotten whenever a link or the fleet changes."""
        self._staff_version = (-1, -1)
        self._without_server: Mapping[WorkerKey, str] = {}
        """Workers that take no forwarded requests, and why."""
        self._without_server_version = -1

    # -- prompts ---------------------------------------------------------------------------------------------------

    def block_size(self, model: str) -> int:
        """Return the tokens per block of a model's workers; 0 when there is none."""
        workers = self._projection.fleet.models().get(model)
        return workers[0].card.block_size if workers else 0

    def is_quick(self, request: InferenceRequest) -> bool:
        return len(request.token_ids) <= LONG_PROMPT_BYTES or request.multimodal is not None

    async def path(self, request: InferenceRequest, block_size: int) -> array[int]:
        """Return the sequence hashes of a prompt that is not quick; others have their turn meanwhile."""
        path = array("Q")
        if block_size:
            stretches = self.paths.of(request).grow(path, request.token_ids, block_size, seed_of(request))
            for number, _ in enumerate(stretches):
                if number % STRETCHES_PER_TURN == STRETCHES_PER_TURN - 1:
                    await asyncio.sleep(0)
        return path

    def path_now(self, request: InferenceRequest, block_size: int) -> array[int]:
        """Return the same in one go."""
        return prompt_path(request, block_size, self.paths) if block_size else array("Q")

    def uncached_tokens(self, request: InferenceRequest, path: array[int]) -> int:
        """Return the prompt tokens that the worker with most of the prompt cached would have to compute."""
        tokens = len(request.token_ids) // 4
        overlap = self._selector.best_overlap_blocks(request.model, PROMPT_ROLES, path) if path else 0
        return max(0, tokens - overlap * self.block_size(request.model))

    # -- workers ---------------------------------------------------------------------------------------------------

    def choose(self, routed: LocalRequest) -> Placement | PlacementFailure:
        """Choose a worker for a request's next leg."""
        machine = routed.machine
        request = machine.request
        now_ms = self._clock.monotonic_ms()
        if not routed.path:
            self._hash(routed)
        queued = routed.queued
        if queued is not None and not machine.plan.dispatches and self.naming.follows(request) is not routed.follows:
            # While it waited its session has continued without it.
            request.turn = self.naming.turn_of(request, routed.path, routed.block_size)
        leg, wanted = self._next(routed, now_ms)
        found = self._state.select(wanted)
        if isinstance(found, Decision):
            if found.prefill_tokens and self._waits_for_engine(routed, found):
                if self._selector.planner is None and (other := self._choose_other(wanted)) is not None:
                    return Placement(other, leg if other.legs is None else spec_of(other.legs), now_ms)
                none = NoWorker(request.model, {found.worker: ENOUGH_TO_COMPUTE}, frozenset((found.worker,)))
                return PlacementFailure(none, busy=True, waits_for_engine=True)
            return Placement(found, leg if found.legs is None else spec_of(found.legs), now_ms)
        if isinstance(found, PolicyFailed):
            log.error(
                "choosing a worker for request %s: %s",
                request.request_id,
                found,
                exc_info=found.error,
                extra=request.named(),
            )
            return PlacementFailure(found)
        assert isinstance(found, NoWorker), "there is a decision, or none"
        if leg.stage is Stage.ENCODE and not found.busy:
            machine.plan.encodes_itself = True
            machine.plan.encode_failure = machine.plan.encode_failure or str(found)
            return self.choose(routed)
        if routed.crowded:
            routed.crowded = {}  # no other can serve it now: better on a crowded worker than nowhere
            return self.choose(routed)
        full = self.full.at(now_ms)
        away = self._links.away if request.carrier is None else _NO_WORKERS
        coming = away | full.keys() if full else away
        if found.busy or not coming.isdisjoint(found.reasons.keys() - routed.tried.keys() - routed.unable.keys()):
            # Full or out of reach, only for the moment.
            return PlacementFailure(found, busy=True, full=bool(full))
        # The last worker left. A restart may take longer than its lease, so what the pool has taken waits for the next;
        # and so do new requests where only one side of two is left.
        lacks_role = request.task is None and bool(self._staff_of(request).missing)
        waits = machine.plan.dispatches > 0 or routed.queued is not None or lacks_role
        return PlacementFailure(found, busy=waits and found.reasons.keys() <= found.draining)

    def _choose_other(self, wanted: WorkerWanted) -> Decision | None:
        """Return another worker's choice, where a policy that does not reckon with queues chose one that has enough."""
        request = wanted.request
        group = self._selector.groups.of(request.model, wanted.roles)
        enough = with_enough(group, self._projection.ledger)
        if len(enough) >= len(group.workers):
            return None
        found = self._state.select(replace(wanted, unavailable={**wanted.unavailable, **enough}))
        return found if isinstance(found, Decision) else None

    def _waits_for_engine(self, routed: LocalRequest, decision: Decision) -> bool:
        """Return whether a new request waits until the engine that was chosen has computed what it was given.

        One whose client is being served already does not: it goes before all others.
        """
        if not self._holds_back or routed.has_place or routed.machine.plan.dispatches:
            return False
        return waits_too_long(decision, self._projection.fleet.workers[decision.worker].card)

    def _hash(self, routed: LocalRequest) -> None:
        """Hash a prompt again, for which there was no worker when it came."""
        request = routed.machine.request
        routed.block_size = self.block_size(request.model)
        routed.path = self.path_now(request, routed.block_size)
        if routed.path and request.task is None and not routed.machine.plan.dispatches:
            request.turn = self.naming.turn_of(request, routed.path, routed.block_size)

    def _next(self, routed: LocalRequest, now_ms: float) -> tuple[LegSpec, WorkerWanted]:
        """Return a request's next leg, and the question to the selector for it."""
        plan, queued = routed.machine.plan, routed.queued
        leg = self._next_leg(plan)
        return leg, WorkerWanted(
            self._routing(plan.request, routed.machine.delivery.tokens, routed.block_size, leg),
            routed.path,
            now_ms,
            self._clock.wall_ms(),
            self._unavailable(plan.request, self.full.at(now_ms), routed),
            plan.dispatches,
            leg.roles,
            self._behind_records(),
            routed.behind,
            0.0 if queued is None else now_ms - queued.entered_ms,
        )

    # -- sessions --------------------------------------------------------------------------------------------------

    def admits(self, routed: LocalRequest, waited_ms: float = 0.0, is_behind: bool = False) -> bool:
        """Tell whether a turn of a session may go to a worker now, or waits for room in the pool's working set.

        ``is_behind``: others have waited for long, and it takes no room from them.
        """
        request, sessions = routed.machine.request, self._state.sessions
        if request.turn is None:
            return True
        if not routed.block_size:
            self._hash(routed)
        size = TOKEN_BYTES * routed.block_size
        if not is_behind and (not size or sessions.working_set.is_free(len(request.token_ids) // size + 1)):
            return True
        now_ms = self._clock.monotonic_ms()
        leg, wanted = self._next(routed, now_ms)
        routed.crowded = {}
        if leg.stage not in PROMPT_STAGES:
            return True
        found = self._state.offer(
            TurnOffered(wanted.request, wanted.path, now_ms, wanted.time_ms, wanted.roles, waited_ms, is_behind)
        )
        routed.displaced += found.displaced
        if found.admitted and found.crowded:
            routed.crowded = dict.fromkeys(found.crowded, CROWDED)
        return found.admitted

    def place_of(self, routed: LocalRequest, decision: Decision) -> TurnPlace:
        """Return what a turn takes of the working set where it is sent, for the other routers of the pool."""
        card = self._projection.fleet.workers[decision.worker].card
        return self._state.sessions.place_of(decision, card, routed.path, routed.displaced)

    @property
    def place_changes(self) -> int:
        """Return a number that grows when a session may have lost its place."""
        return self._state.sessions.working_set.changes

    def next_place_ms(self) -> float:
        """Return when the next session that does nothing loses its place; infinity without one."""
        return self._state.sessions.working_set.next_ms()

    # -- plans -----------------------------------------------------------------------------------------------------

    @property
    def plans(self) -> bool:
        """Tell whether requests may wait for the worker that is best for them, now."""
        return self.planner is not None and self.planner.is_active

    def takes_held(self, model: str) -> bool:
        """Tell whether any worker of a model could be given a request that waits."""
        return self.planner is not None and self.planner.openings(model, PROMPT_ROLES) > 0

    def plan_basis(self, model: str) -> tuple[int, ...]:
        """Return a value that changes when a plan may change: a worker is free, has room, joined or left."""
        openings = 0 if self.planner is None else self.planner.openings(model, PROMPT_ROLES)
        fleet, full = self._projection.fleet.version, len(self.full.at(self._clock.monotonic_ms()))
        return openings, self._projection.ledger.queues_emptied, fleet, self._links.version, full

    @property
    def relieved(self) -> int:
        """Return a number that grows when a worker may have room: a request ended there, or a prompt was computed."""
        return self._projection.ledger.relieved

    def holds(self, found: Placement | PlacementFailure) -> bool:
        """Tell whether a new request, while none waits, is better planned with others than sent where it would go."""
        planner = self.planner
        if planner is None:
            return False
        if isinstance(found, PlacementFailure):
            return found.waits_for_engine and planner.is_active
        if found.leg.stage not in PROMPT_STAGES:
            return False
        return planner.is_active and planner.holds(found.decision)

    def can_be_planned(self, routed: LocalRequest) -> bool:
        """Tell whether some worker could compute a request's prompt, which may wait for a better one."""
        wanted = self._wanted_by_plan(routed)
        return wanted is not None and self.planner is not None and self.planner.can_plan(wanted)

    def plan(self, waiting: Sequence[LocalRequest]) -> list[tuple[LocalRequest, Mapping[WorkerKey, int]]]:
        """Return who of those that wait is to be placed now, in order, and what is planned behind each."""
        due: list[tuple[LocalRequest, Mapping[WorkerKey, int]]] = []
        by_roles: dict[tuple[Role, ...], list[tuple[LocalRequest, WorkerWanted]]] = {}
        for routed in waiting:
            wanted = self._wanted_by_plan(routed)
            if wanted is None:
                due.append((routed, {}))
            else:
                by_roles.setdefault(wanted.roles, []).append((routed, wanted))
        for roles, group in by_roles.items():
            if self.planner is not None and self.planner.openings(group[0][1].request.model, roles):
                planned = self.planner.plan([wanted for _, wanted in group])
                due += [(group[row][0], behind) for row, behind in planned]
        return due

    def _wanted_by_plan(self, routed: LocalRequest) -> WorkerWanted | None:
        """Return the question for a request whose next leg computes its prompt, ``None`` for another."""
        leg, wanted = self._next(routed, self._clock.monotonic_ms())
        if leg.stage not in PROMPT_STAGES:
            return None
        return self._selector.with_legs(wanted)[0] if wanted.roles == EITHER_ROLES else wanted

    def preview(self, request: InferenceRequest) -> Decision | PlacementFailure:
        """Return what a request would get now; nothing is booked, sent, counted or recorded."""
        now_ms, block_size = self._clock.monotonic_ms(), self.block_size(request.model)
        path = self.path_now(request, block_size)
        request.turn = self.naming.turn_of(request, path, block_size)
        leg, full = self._next_leg(LegPlan(request)), self.full.at(now_ms)
        wanted = WorkerWanted(
            self._routing(request, 0, block_size, leg),
            path,
            now_ms,
            self._clock.wall_ms(),
            self._unavailable(request, full, None),
            roles=leg.roles,
            behind_records=self._behind_records(),
        )
        found = self._state.preview(wanted)
        if isinstance(found, Decision):
            return found
        if isinstance(found, PolicyFailed):
            return PlacementFailure(found)
        busy = found.busy or not full.keys().isdisjoint(found.reasons.keys())
        return PlacementFailure(found, bool(busy), bool(full))

    def _routing(self, request: InferenceRequest, output_tokens: int, block_size: int, leg: LegSpec) -> RoutingRequest:
        """Return what a policy may know of a request: what it was given and has generated so far is one prompt."""
        tokens, size = len(request.token_ids) // TOKEN_BYTES + output_tokens, block_size or 1
        has_media, turn = request.multimodal is not None, request.turn
        return RoutingRequest(
            request.request_id,
            request.model,
            tokens,
            size,
            -(-tokens // size),
            request.priority,
            leg.stage,
            media_hashes(request) if has_media else (),
            media_kinds(request) if has_media and leg.stage is not Stage.DECODE else (),
            ttft_target_ms(request.hints) if request.hints else 0.0,
            "" if turn is None else turn.session,
            0 if turn is None else turn.tenant,
            domain_of(request),
            "" if turn is None else turn.parent,
            self.naming.is_later(turn),
            request.carrier is not None,
            request.by_text,
            self._following(request, block_size),
        )

    def _following(self, request: InferenceRequest, block_size: int) -> FollowingTokens | None:
        """Return the tokens behind the blocks of a prompt, where an engine looks at them."""
        count = self._projection.index.groups.following_tokens
        if not count or not block_size or request.by_text or request.multimodal is not None:
            return None
        return FollowingTokens.of(request.token_ids, block_size, count)

    def _unavailable(
        self, request: InferenceRequest, full: Mapping[WorkerKey, str], routed: LocalRequest | None
    ) -> Mapping[WorkerKey, str]:
        """Return who is not asked for a request, and why."""
        found = self._out_of_reach(request)
        if full:
            found = {**found, **full}
        if request.only_worker:
            others = (key for key in self._projection.fleet.workers if key.worker_id != request.only_worker)
            found = {**found, **dict.fromkeys(others, NOT_THE_MAKER)}
        if request.lora_name:
            found = {**found, **self.without_adapter(request)}
        if routed is not None and (routed.tried or routed.unable or routed.crowded):
            found = {**found, **routed.tried, **routed.unable, **routed.crowded}
        return found

    def _out_of_reach(self, request: InferenceRequest) -> Mapping[WorkerKey, str]:
        """Return the workers that a request cannot be sent to, and why."""
        if request.carrier is None:
            return self._links.unreachable
        # What is forwarded needs no connection to the process that follows its server.
        version = self._projection.fleet.version
        if self._without_server_version != version:
            self._without_server_version = version
            workers = self._projection.fleet.workers.items()
            self._without_server = {key: NO_SERVER for key, worker in workers if not worker.card.server_url}
        return self._without_server

    def without_adapter(self, request: InferenceRequest) -> dict[WorkerKey, str]:
        """Return the workers that do not list a request's adapter, unless none does: then each says so itself."""
        workers = self._projection.fleet.models().get(request.model, ())
        name = request.lora_name
        missing = {worker.key: NO_ADAPTER for worker in workers if name not in worker.card.loras}
        return missing if len(missing) < len(workers) else {}

    def _next_leg(self, plan: LegPlan) -> LegSpec:
        """Return what the next worker is to do: the decode leg after a prefill, else what the plan says."""
        if plan.prefill_params is not None:
            return SECOND_LEG
        request = plan.request
        if request.task is not None:
            return TASK_LEGS[stage_of(request.task)]
        staff = self._staff_of(request)
        if staff.encode and plan.wants_encode:
            return ENCODE_LEG
        carrier = request.carrier
        if carrier is not None and staff.prefill and not carrier.can_be_split(self._server_kind(request.model)):
            return ONE_SERVER
        return first_leg(staff, self._always_two or request.multimodal is not None)

    def _server_kind(self, model: str) -> str:
        workers = self._projection.fleet.models().get(model, ())
        return workers[0].card.server_kind if workers else ""

    def missing_workers(self, request: InferenceRequest) -> str:
        """Return in words the kind of worker that a request needs and the pool lacks; empty = it lacks none."""
        staff = self._staff_of(request)
        if request.task is None and staff.missing:
            return f"{staff.missing} worker, and no other can serve a whole request"
        return "" if request.task is not None or any(staff) else "worker in reach"

    def _staff_of(self, request: InferenceRequest) -> RoleAvailability:
        """Return which roles of a request's model have any worker that takes such requests."""
        model, is_carried = request.model, request.carrier is not None
        version = (self._projection.fleet.version, self._links.version)
        if self._staff_version != version:
            self._staff.clear()
            self._staff_version = version
        staff = self._staff.get((model, is_carried))
        if staff is None:
            down = self._out_of_reach(request)
            by_role = (WHOLE_ROLES, PREFILL_ROLES, DECODE_ROLES, ENCODE_ROLES, ONE_LEG_ROLES)
            staff = RoleAvailability(*(self._selector.available(model, roles, down) for roles in by_role))
            # Clients can name any number of models that no worker serves.
            if any(staff):
                self._staff[model, is_carried] = staff
        return staff


TTFT_HEADER = "x-ttft-target-ms"
VALUE_CHARS_MAX = 64
"""A number of milliseconds is shorter."""


def ttft_target_ms(hints: Mapping[str, Any]) -> float:
    """Return the target of ``InferenceRequest.hints``, 0 without one; ``nvext`` wins over the header.

    A global router reads more of them, and refuses what it cannot read (``poolgrid.kernel.pool_grids.choice``). Here
    a target only helps to choose between workers, so one that is no number of milliseconds above 0 asks for nothing.
    """
    # They are of JSON, so dictionaries: a look at ``Mapping`` would take longer than all the rest.
    nvext = hints.get("nvext")
    router = nvext.get("router") if isinstance(nvext, dict) else None
    value = router.get("ttft_target") if isinstance(router, dict) else None
    if value is None:
        headers = hints.get("headers")
        value = headers.get(TTFT_HEADER) if isinstance(headers, dict) else None
    if value is None or isinstance(value, bool) or not isinstance(value, int | float | str):
        return 0.0
    if isinstance(value, str) and len(value) > VALUE_CHARS_MAX:
        return 0.0
    try:
        target_ms = float(value)
    except (ValueError, OverflowError):
        return 0.0
    return target_ms if math.isfinite(target_ms) and target_ms > 0.0 else 0.0
