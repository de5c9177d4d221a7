"""Chooses and books for requests that do not come through this router: a gateway sends them to the engines itself.

Rules
    1. Choose and book happen in one callback: two requests never see the same idle worker.
    2. A booking is an entry of the load ledger with a lease, renewed while the gateway's stream for the request lives.
       It ends with the answer, or with that stream. Once the answer has begun, its prompt is no work any more. A
       booking that no open stream holds is ended at the next renewal: that is a fault of ours, counted and logged.
       Where the gateway sends its access log, a booking whose answer has begun outlives the stream: it ends with the
       request's entry in the log, after ``KEPT_MAX_MS``, or when the gateway is gone.
    3. Nothing waits here: a request that finds every worker full is shed, and its client gets the time to come back.
    4. The worker is told of what goes to its server, as by the router: other routers count it, and the worker
       does not take it for the load of strangers.
    5. Fallbacks are what would be chosen if the endpoints before were away. They are not booked; the booking moves when
       the gateway reports that another endpoint served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

import msgspec

from poolgrid.kernel.decision.decision import Decision
from poolgrid.kernel.decision.policy import RoutingRequest
from poolgrid.kernel.decision.stage_plan import ONE_LEG_ROLES, WHOLE_ROLES
from poolgrid.kernel.projection.fleet import Fleet
from poolgrid.kernel.projection.stream_health import TOKENS_MIN
from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.routing.inputs import Booked, PromptComputed, Released, Renewed, WorkerWanted
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.routing.selector import Found, NoWorker, PolicyFailed
from poolgrid.kernel.wire.identifiers import Role, WorkerKey, dispatch_id
from poolgrid.kernel.wire.requests import FinishReason, ForwardBegan, ForwardEnded
from poolgrid.plugins.endpoint_picker.access_log import GatewayLogs
from poolgrid.plugins.endpoint_picker.metrics import PickerMetrics
from poolgrid.server.frontend.request_body import RequestIds
from poolgrid.server.process.clock import Clock
from poolgrid.server.proxy.prompt_reading import PromptReader, PromptReading
from poolgrid.server.router.choosing import domain_of
from poolgrid.server.router.service import RouterService
from poolgrid.server.serving.links import WorkerLink

NO_ENDPOINT = "its engine has no server that gateways reach (serving_endpoint)"
NOT_A_CANDIDATE = "not among the endpoints that the gateway allows"


class Pods:
    """Follows a fleet; looked up with every request, made again with every change of the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._version = -1
        self._endpoint_of: dict[WorkerKey, str] = {}
        self._at: dict[str, list[WorkerKey]] = {}
        self._without: dict[WorkerKey, str] = {}

    def endpoint_of(self, worker: WorkerKey) -> str:
        return self._current()._endpoint_of[worker]

    def at(self, endpoint: str) -> list[WorkerKey]:
        """Return the workers that serve at an address: several where ranks share a server."""
        return self._current()._at.get(endpoint, [])

    def rank_to_name(self, worker: WorkerKey) -> int | None:
        """Return the rank that a request must name, where the server of several ranks does not see it by its port."""
        return worker.dp_rank if len(self.at(self.endpoint_of(worker))) > 1 else None

    def excluded(self, candidates: frozenset[str] | None) -> Mapping[WorkerKey, str]:
        """Return the workers that a gateway cannot send to, and why; ``candidates`` are all that it allows."""
        self._current()
        if candidates is None:
            return self._without
        others = {key: NOT_A_CANDIDATE for key, place in self._endpoint_of.items() if place not in candidates}
        return {**self._without, **others}

    def _current(self) -> Pods:
        if self._version != self._fleet.version:
            self._endpoint_of, self._at, self._without = {}, {}, {}
            for key, worker in self._fleet.workers.items():
                endpoints = worker.card.serving_endpoints
                if not endpoints:
                    self._without[key] = NO_ENDPOINT
                    continue
                endpoint = endpoints[0] if len(endpoints) == 1 else endpoints[key.dp_rank]
                self._endpoint_of[key] = endpoint
                self._at.setdefault(endpoint, []).append(key)
            self._version = self._fleet.version
        return self


log = logging.getLogger(__name__)

SERVED_BY_ANOTHER = "the gateway reports that another endpoint serves"
PICKED_BEFORE = "it is among the endpoints before"
NOT_READY_RETRY_S = 1.0

KEPT_MAX_MS = 3_600_000.0
"""How long a booking waits for its entry in the gateway's access log, which may lose entries; answers take less."""

KEPT_MAX = 65_536
"""Bookings that wait for an entry: sixteen for each stream that may be open. The oldest is ended for one more."""


class Asked(msgspec.Struct, frozen=True):
    """A request that wants an endpoint."""

    name: str
    """What its client calls it, and where people look it up; empty = it has no name."""
    path: str
    body: bytes | None
    """``None`` where the gateway does not show it before it wants an answer, or there is none."""
    candidates: frozenset[str] | None
    """Endpoints that the gateway allows; ``None`` = all."""
    books: bool = True
    """Whether it is work for an engine; listing models is none."""
    unread: str = ""
    """Why there is no body."""


class Shed(msgspec.Struct, frozen=True):
    """A request that gets no endpoint, and the answer to its client."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


class Booking(msgspec.Struct, eq=False):
    """A request on an engine, as the ledger has it."""

    worker: WorkerKey
    dispatch_id: str
    wanted: WorkerWanted | None
    """What it was chosen for; ``None`` once it has moved, or is kept."""
    name: str = ""
    """What the gateway's log calls it: its first dispatch."""
    gateway: str = ""
    """The gateway whose log ends it; empty = its stream does."""
    kept_ms: float = 0.0
    """When its stream ended."""
    is_logged: bool = False
    """Whether the log has its end."""


class Picked(msgspec.Struct, frozen=True):
    """Where a request goes."""

    endpoints: tuple[str, ...]
    """``ip:port``, the first choice first."""
    rank: int | None
    """Rank that the request must name."""
    worker: str
    reason: str
    booking: Booking | None


class Picker:
    """Picks for one router's gateways."""

    def __init__(
        self,
        router: RouterService,
        state: RouterState,
        reader: PromptReader,
        path_of: Callable[[InferenceRequest], Sequence[int]],
        without_adapter: Callable[[InferenceRequest], Mapping[WorkerKey, str]],
        link_to: Callable[[WorkerKey], WorkerLink | None],
        realised: Callable[[str, Sequence[int], int, int | None], None],
        request_ids: RequestIds,
        fallbacks: int,
        metrics: PickerMetrics,
        clock: Clock,
        logs: GatewayLogs,
    ) -> None:
        """``path_of`` hashes a prompt, ``without_adapter`` returns who lacks a request's adapter, ``realised`` takes
        what a dispatch really reused; ``fallbacks`` are endpoints in addition to the first."""
        self._router = router
        self._state = state
        self._reader = reader
        self._path_of = path_of
        self._without_adapter = without_adapter
        self._link_to = link_to
        self._realised = realised
        self._request_ids = request_ids
        self._fallbacks = fallbacks
        self._metrics = metrics
        self._clock = clock
        self._pods = Pods(state.projection.fleet)
        self.logs = logs
        self._bookings: dict[str, Booking] = {}
        """By name."""
        self._kept: dict[str, Booking] = {}
        """Those that wait for their gateway's log, the oldest first."""
        metrics.in_flight.set_function(lambda: float(len(self._bookings)))

    # -- in --------------------------------------------------------------------------------------------------------

    async def pick(self, asked: Asked) -> Picked | Shed:
        """Return where a request goes, booked, or why nowhere."""
        began = perf_counter()
        if self._router.ready:
            wanted_id = self._request_ids.wanted(asked.name.encode("latin-1", "replace") or None)
            (request_id,) = self._request_ids.of_sequences(wanted_id, 1)
            if asked.body:
                reading = await self._reader.read(asked.path, asked.body, request_id)
            else:
                reading = PromptReading("", None, why=asked.unread)
            path = self._path_of(reading.request) if reading.request is not None else ()
            found = self._place(asked, reading, path, request_id)
        else:
            found = Shed(503, "not_ready", "the endpoint picker is rebuilding its state", NOT_READY_RETRY_S)
        if isinstance(found, Picked):
            self._metrics.picks.labels("picked").inc()
            self._metrics.seconds.observe(perf_counter() - began)
        else:
            self.count_shed(found)
        return found

    def count_shed(self, shed: Shed) -> None:
        self._metrics.picks.labels(shed.code).inc()

    def _place(self, asked: Asked, reading: PromptReading, path: Sequence[int], request_id: str) -> Picked | Shed:
        model = reading.model or self._any_model()
        excluded = self._pods.excluded(asked.candidates)
        if reading.request is not None and reading.request.lora_name:
            excluded = {**self._without_adapter(reading.request), **excluded}
        wanted = self._wanted(request_id, model, reading, path, excluded)
        found = self._find(wanted, asked.books)
        if not isinstance(found, Decision):
            return self._shed(found)
        if asked.books:
            self._metrics.read.labels(reading.why or "tokens").inc()
        worker = found.worker
        booking = self._book(found, wanted, request_id) if asked.books else None
        return Picked(
            self._in_order(worker, wanted), self._pods.rank_to_name(worker), str(worker), found.reason, booking
        )

    def _find(self, wanted: WorkerWanted, books: bool) -> Found:
        """Choose; a choice that is not booked leaves no trace."""
        return self._state.select(wanted) if books else self._state.preview(wanted)

    def _wanted(
        self,
        request_id: str,
        model: str,
        reading: PromptReading,
        path: Sequence[int],
        excluded: Mapping[WorkerKey, str],
        attempt: int = 0,
    ) -> WorkerWanted:
        workers = self._router.projection.fleet.models().get(model, ())
        size = max(1, workers[0].card.block_size) if workers else 1
        request = reading.request
        routing = RoutingRequest(
            request_id,
            model,
            reading.isl,
            size,
            -(-reading.isl // size),
            domain="" if request is None else domain_of(request),
            is_forwarded=True,
            by_text=request is not None and request.by_text,
        )
        return WorkerWanted(
            routing,
            path,
            self._clock.monotonic_ms(),
            self._clock.wall_ms(),
            excluded,
            attempt,
            self._roles(model, excluded),
            self._router.behind_records,
        )

    def _roles(self, model: str, excluded: Mapping[WorkerKey, str]) -> tuple[Role, ...]:
        """Return who does a whole request: aggregated workers, and decode workers where there are none."""
        return WHOLE_ROLES if self._state.selector.available(model, WHOLE_ROLES, excluded) else ONE_LEG_ROLES

    def _any_model(self) -> str:
        """Return the model for a request that names none of the fleet's: the first by name that a gateway reaches."""
        excluded = self._pods.excluded(None)
        for name, workers in self._router.projection.fleet.models().items():
            if any(worker.key not in excluded for worker in workers):
                return name
        return ""

    def _book(self, decision: Decision, wanted: WorkerWanted, request_id: str) -> Booking:
        name = dispatch_id(request_id, decision.attempt)
        self._state.book(Booked(decision, wanted.path, name, wanted.now_ms))
        self._router.reserved(decision, wanted.path)
        self._report_began(decision, name)
        booking = self._bookings[name] = Booking(decision.worker, name, wanted, name)
        return booking

    def _in_order(self, worker: WorkerKey, wanted: WorkerWanted) -> tuple[str, ...]:
        """Return the endpoint of a choice, and the one that would be chosen without it."""
        endpoints = [self._pods.endpoint_of(worker)]
        unavailable = dict(wanted.unavailable)
        for _ in range(self._fallbacks):
            for key in self._pods.at(endpoints[-1]):
                unavailable[key] = PICKED_BEFORE
            found = self._find(msgspec.structs.replace(wanted, unavailable=unavailable), books=False)
            if not isinstance(found, Decision):
                break
            endpoints.append(self._pods.endpoint_of(found.worker))
        return tuple(endpoints)

    def _shed(self, found: NoWorker | PolicyFailed) -> Shed:
        if isinstance(found, PolicyFailed):
            log.error("choosing an endpoint for a gateway: %s", found, exc_info=found.error)
            return Shed(
                500, "policy_failed", "choosing an endpoint failed; the log of the endpoint picker has the reason"
            )
        if found.busy:
            retry_after_s = self._router.retry_after_s()
            return Shed(429, "busy", "there is no room for the request now; try again later", retry_after_s)
        return Shed(503, "no_worker", "no endpoint can take the request now; try again later", NOT_READY_RETRY_S)

    # -- on its way ------------------------------------------------------------------------------------------------

    def served_by(self, booking: Booking, endpoint: str) -> None:
        """Take note of which endpoint serves: the booking moves there when it is not the one that was chosen."""
        workers = self._pods.at(endpoint)
        if booking.wanted is None or not workers or booking.worker in workers:
            return
        self._metrics.elsewhere.inc()
        before, booking.wanted = booking.wanted, None
        others = {key: SERVED_BY_ANOTHER for key in self._router.projection.fleet.workers if key not in workers}
        now_ms = self._clock.monotonic_ms()
        again = msgspec.structs.replace(before, unavailable=others, attempt=before.attempt + 1, now_ms=now_ms)
        found = self._state.select(again)
        if isinstance(found, Decision):
            self._release(booking, FinishReason.CANCELLED)
            booking.worker, booking.dispatch_id = found.worker, dispatch_id(found.request.request_id, found.attempt)
            self._state.book(Booked(found, again.path, booking.dispatch_id, again.now_ms))
            self._router.reserved(found, again.path)
            self._report_began(found, booking.dispatch_id)

    def answer_began(self, booking: Booking) -> None:
        wanted = booking.wanted
        is_held = wanted is not None and not wanted.request.by_text and wanted.request.isl >= TOKENS_MIN
        if self._state.note_prompt(PromptComputed(booking.worker, booking.dispatch_id, is_held)):
            self._router.room_changed()
        if (link := self._link_to(booking.worker)) is not None:
            link.forward_computed(booking.dispatch_id)

    def ended(self, booking: Booking, cached_tokens: int | None, isl: int | None = None) -> None:
        """Take a request off the books, whatever ended it; ``cached_tokens`` and ``isl`` as the engine reported."""
        self._bookings.pop(booking.name, None)
        self._kept.pop(booking.name, None)
        if cached_tokens is not None:
            path = () if booking.wanted is None else booking.wanted.path
            self._realised(booking.dispatch_id, path, cached_tokens, isl)
        is_known = booking.wanted is not None and not booking.wanted.request.by_text
        self._release(booking, FinishReason.STOP, cached_tokens if is_known else None)

    def keep(self, booking: Booking, gateway: str) -> None:
        """Have a request on the books until its gateway's log reports its end."""
        if booking.is_logged:
            self.ended(booking, None)
            return
        if len(self._kept) >= KEPT_MAX:
            self._give_up_on(next(iter(self._kept.values())))
        booking.gateway, booking.kept_ms, booking.wanted = gateway, self._clock.monotonic_ms(), None
        self._kept[booking.name] = booking

    def logged(self, name: str) -> None:
        """Take note that a gateway's log has the end of a request; its stream may not have ended yet."""
        booking = self._bookings.get(name)
        if booking is not None:
            booking.is_logged = True
            if booking.gateway:
                self.ended(booking, None)

    def _give_up_on(self, booking: Booking) -> None:
        self._metrics.bookings_lost.labels("no_entry").inc()
        self.ended(booking, None)

    def _report_began(self, decision: Decision, name: str) -> None:
        if (link := self._link_to(decision.worker)) is not None:
            isl, overlap = decision.request.isl, decision.overlap_tokens
            link.forward_began(ForwardBegan(name, decision.worker.dp_rank, isl, overlap))

    def _release(self, booking: Booking, reason: FinishReason, cached_tokens: int | None = None) -> None:
        self._state.release(Released(booking.worker, booking.dispatch_id))
        if (link := self._link_to(booking.worker)) is not None:
            link.forward_ended(ForwardEnded(booking.dispatch_id, booking.worker.dp_rank, reason, cached_tokens))
        self._router.room_changed()

    def renew(self, held: Iterable[Booking]) -> None:
        """Begin the leases of the bookings that open streams hold again, and end the others."""
        now_ms = self._clock.monotonic_ms()
        for booking in list(self._kept.values()):
            if now_ms - booking.kept_ms >= KEPT_MAX_MS or self.logs.is_gone(booking.gateway, now_ms):
                self._give_up_on(booking)
        self.logs.forget(now_ms)
        lost = dict(self._bookings)
        for booking in (*held, *self._kept.values()):
            lost.pop(booking.name, None)
            self._state.renew(Renewed(booking.worker, booking.dispatch_id, now_ms))
        for booking in lost.values():
            self._metrics.bookings_lost.labels("no_stream").inc()
            log.error(
                "booking %s on worker %s belongs to no open stream of a gateway: it is ended; this is a fault of the "
                "endpoint picker",
                booking.dispatch_id,
                booking.worker,
            )
            self.ended(booking, None)
