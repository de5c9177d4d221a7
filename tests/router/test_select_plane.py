"""The select plane over real sockets: what an asker gets, what is booked, and that bad frames hurt nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import zmq
import zmq.asyncio

from poolgrid.kernel.decision.decision import Decision, DecisionLog
from poolgrid.kernel.routing.router_state import RouterState
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import RequestFinished, RequestStarted, WorkerDraining
from poolgrid.kernel.wire.hashing import pack_hashes
from poolgrid.kernel.wire.identifiers import Role, Stage, WorkerKey
from poolgrid.kernel.wire.selection import (
    AskStatus,
    FromPool,
    PoolStatus,
    Probe,
    Probed,
    Release,
    Renew,
    Reservation,
    Select,
    Selected,
    SelectRefusal,
    SelectRefused,
    ToPool,
    WorkerRank,
)
from poolgrid.server.process.clock import SystemClock
from poolgrid.server.router.policy_loading import make_policy
from poolgrid.server.router.select_plane import SelectPlane
from tests.router.fleet_builder import BLOCK_SIZE, Pool, make_card, stored, worker_key

PATH = pack_hashes([11, 12, 13])


class View:
    """The pool's router, as the select plane sees it."""

    def __init__(self, pool: Pool) -> None:
        self.ready = True
        self.projection = pool.projection
        self.decisions = DecisionLog(10)
        self.out_of_reach: dict[WorkerKey, str] = {}
        self.load_changes = 0
        self.behind_records = 0
        self.forwarded: set[str] = set()

    def forwards(self, model: str) -> bool:
        return model in self.forwarded

    def reserved(self, decision: Decision, path: Sequence[int]) -> None:
        self.decisions.add(decision)

    @property
    def unreachable(self) -> Mapping[WorkerKey, str]:
        return self.out_of_reach

    def counts(self) -> tuple[int, int]:
        return 1, 5

    def retry_after_s(self) -> float:
        return 7.0

    def room_changed(self) -> None:
        self.load_changes += 1


class Asker:
    """A pool, its select plane on a real socket, and one that asks."""

    def __init__(self, pool: Pool, view: View, plane: SelectPlane, socket: zmq.asyncio.Socket) -> None:
        self.pool, self.view, self.plane, self.socket = pool, view, plane, socket

    async def ask(self, message: ToPool) -> FromPool:
        await self.tell(codec.to_pool.encode(message))
        async with asyncio.timeout(120):
            return codec.from_pool.decode(await self.socket.recv())

    async def tell(self, frame: bytes) -> None:
        await self.socket.send(frame)

    async def select(self, request_id: str = "r", **fields: object) -> FromPool:
        values: dict[str, object] = {"model": "m", "stage": Stage.WHOLE, "isl": 40, **fields}
        return await self.ask(Select(1, request_id, **values))  # type: ignore[arg-type]  # fields by name

    def booked(self) -> dict[str, str]:
        return {request_id: str(worker) for worker, request_id in self.pool.projection.ledger.entries()}


@asynccontextmanager
async def asking() -> AsyncIterator[Asker]:
    pool = Pool()
    view = View(pool)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asking_context = zmq.asyncio.Context()
    selector = pool.selector(make_policy("kv"))
    plane = SelectPlane(context, "127.0.0.1", 0, cast(Any, view), RouterState(selector), SystemClock())
    socket = asking_context.socket(zmq.DEALER)
    socket.connect(plane.endpoint)
    try:
        yield Asker(pool, view, plane, socket)
    finally:
        plane.close()
        socket.close(linger=0)
        context.destroy(linger=0)
        asking_context.destroy(linger=0)


def run(scenario: Callable[[Asker], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asking() as asker:
            await scenario(asker)

    asyncio.run(whole())


def test_select_reserves_the_worker_that_holds_the_prompt() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("w1", "w2")
        asker.pool.say(worker_key("w2"), stored([11, 12]))

        answer = await asker.select(sequence_hashes=PATH)

        assert answer == Selected(1, WorkerRank("w2"), "tcp://127.0.0.1:1", 1, 2, BLOCK_SIZE, answer.reason, 30_000)  # type: ignore[union-attr]
        assert asker.booked() == {"r": "w2"}
        assert asker.pool.projection.ledger.prefill_tokens.sum() == 40 - 2 * BLOCK_SIZE
        assert [str(decision.worker) for decision in asker.view.decisions.of_request("r")] == ["w2"]

    run(scenario)


def test_a_reservation_is_load_for_the_next_asker_and_ends_by_release() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("w1", "w2")
        chosen = set()
        for number in range(2):
            answer = await asker.select(f"r{number}")
            assert isinstance(answer, Selected)
            chosen.add(answer.worker)
        assert chosen == {WorkerRank("w1"), WorkerRank("w2")}

        for worker, request_id in list(asker.pool.projection.ledger.entries()):
            message = Release(Reservation(request_id, WorkerRank(worker.worker_id)))
            await asker.tell(codec.to_pool.encode(message))
        status = await asker.ask(AskStatus(2))

        assert isinstance(status, PoolStatus)
        assert status.saturation == 0.0
        assert asker.booked() == {}
        assert asker.view.load_changes == 2

    run(scenario)


def test_an_asker_that_has_gone_before_its_answer_holds_no_worker() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("w1")
        question = codec.to_pool.encode(Select(1, "r", "m", Stage.WHOLE, 40))

        asker.plane._on_frames([b"gone", question])

        assert asker.booked() == {}
        assert asker.view.load_changes == 1
        assert isinstance(await asker.select("s"), Selected)
        assert asker.booked() == {"s": "w1"}

    run(scenario)


def test_the_workers_events_take_the_reservations_place() -> None:
    async def scenario(asker: Asker) -> None:
        (worker,) = asker.pool.join("w1")
        await asker.select("r", lease_ms=1)
        asker.pool.say(worker, RequestStarted("r", 40, 0, 3))
        asker.pool.projection.ledger.expire(1e12)
        assert asker.booked() == {"r": "w1"}
        asker.pool.say(worker, RequestFinished("r", "length"))

        assert asker.booked() == {}

    run(scenario)


def test_an_unconfirmed_reservation_ends_with_its_lease_unless_it_is_renewed() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("w1")
        clock = SystemClock()
        short = await asker.select("short", lease_ms=50)
        renewed = await asker.select("renewed", lease_ms=50)
        assert isinstance(short, Selected)
        assert isinstance(renewed, Selected)
        assert (short.lease_ms, renewed.lease_ms) == (50, 50)

        await asker.tell(codec.to_pool.encode(Renew((Reservation("renewed", WorkerRank("w1")),))))
        await asker.ask(AskStatus(2))
        asker.pool.projection.ledger.expire(clock.monotonic_ms() + 100)

        assert asker.booked() == {"renewed": "w1"}

    run(scenario)


def test_excluded_and_unreachable_workers_are_not_chosen() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("w1", "w2", "w3")
        asker.view.out_of_reach = {worker_key("w1"): "unreachable"}

        second = await asker.select("r", excluded=(WorkerRank("w2"),))
        none = await asker.select("r2", excluded=(WorkerRank("w2"), WorkerRank("w3")))

        assert isinstance(second, Selected)
        assert second.worker == WorkerRank("w3")
        assert isinstance(none, SelectRefused)
        assert none.code == "no_worker"
        assert dict(none.reasons)[WorkerRank("w1")] == "unreachable"
        assert dict(none.reasons)[WorkerRank("w3")] == "excluded by the asker"

    run(scenario)


def fill(asker: Asker) -> None:
    """Have a worker that takes one request, and has one."""
    (worker,) = asker.pool.join("w", card=make_card(max_batch_size=0))
    asker.pool.say(worker, RequestStarted("other", 10, 0, 1))


@pytest.mark.parametrize(
    ("prepare", "fields", "code"),
    [
        (lambda asker: None, {}, "no_worker"),
        (lambda asker: asker.pool.join("w"), {"model": "other"}, "no_worker"),
        (lambda asker: asker.pool.join("w"), {"isl": 5000}, "no_worker"),
        (lambda asker: asker.pool.say(asker.pool.join("w")[0], WorkerDraining()), {}, "draining"),
        (fill, {}, "busy"),
        (lambda asker: setattr(asker.view, "ready", False), {}, "not_ready"),
    ],
    ids=["no worker", "other model", "too long", "draining", "full", "not ready"],
)
def test_a_refusal_says_why_and_books_nothing(
    prepare: Callable[[Asker], object], fields: dict[str, object], code: str
) -> None:
    async def scenario(asker: Asker) -> None:
        prepare(asker)
        booked = asker.booked()

        answer = await asker.select("refused", **fields)

        assert isinstance(answer, SelectRefused)
        assert answer.code == code
        assert answer.message
        assert (answer.retry_after_s is not None) == (code in ("busy", "not_ready"))
        assert asker.booked() == booked

    run(scenario)


def test_a_probe_tells_overlap_and_load_and_reserves_nothing() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("w1", "w2")
        asker.pool.say(worker_key("w2"), stored(range(11, 111)))
        asker.pool.say(worker_key("w2"), RequestStarted("other", 100, 4, 7))

        found = await asker.ask(Probe(9, "m", Stage.WHOLE, 100 * BLOCK_SIZE, pack_hashes(range(11, 111))))
        nobody = await asker.ask(Probe(10, "other", Stage.WHOLE, 48, PATH))

        assert found == Probed(9, None, 100, 100, BLOCK_SIZE, 96, 1)
        assert nobody == Probed(10, SelectRefusal.NO_WORKER)
        assert asker.booked() == {"other": "w2"}

    run(scenario)


def test_stages_go_to_workers_of_their_role_and_an_aggregated_one_does_any_but_encode() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("d", card=make_card(role=Role.DECODE))
        asker.pool.join("p", card=make_card(role=Role.PREFILL))
        chosen = {}
        for stage in (Stage.WHOLE, Stage.PREFILL, Stage.DECODE):
            answer = await asker.select(f"r{stage}", stage=stage)
            assert isinstance(answer, Selected)
            chosen[stage] = answer.worker.worker_id
        assert chosen == {Stage.WHOLE: "d", Stage.PREFILL: "p", Stage.DECODE: "d"}

        asker.pool.join("a", card=make_card(model="other"))
        for stage in (Stage.WHOLE, Stage.PREFILL, Stage.DECODE):
            answer = await asker.select(f"other{stage}", stage=stage, model="other")
            assert isinstance(answer, Selected)
            assert answer.worker.worker_id == "a"

        assert isinstance(await asker.select("media", stage=Stage.ENCODE, model="other"), SelectRefused)
        asker.pool.join("e", card=make_card(model="other", role=Role.ENCODE))
        encoder = await asker.select("media again", stage=Stage.ENCODE, model="other")
        assert isinstance(encoder, Selected)
        assert encoder.worker.worker_id == "e"

    run(scenario)


def test_a_decode_worker_that_decodes_only_is_selected_for_nothing_else() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("d", card=make_card(role=Role.DECODE, decodes_only=True))
        assert isinstance(await asker.select("r1", stage=Stage.DECODE), Selected)
        refused = await asker.select("r2", stage=Stage.WHOLE)
        assert isinstance(refused, SelectRefused)
        assert refused.code == "no_worker"
        status = await asker.ask(AskStatus(3))
        assert isinstance(status, PoolStatus)
        assert status.models[0].roles[0].decodes_only
        asker.pool.join("d2", card=make_card(role=Role.DECODE))
        whole = await asker.select("r3", stage=Stage.WHOLE)
        assert isinstance(whole, Selected)
        assert whole.worker.worker_id == "d2"
        status = await asker.ask(AskStatus(4))
        assert isinstance(status, PoolStatus)
        assert not status.models[0].roles[0].decodes_only

    run(scenario)


@pytest.mark.parametrize(
    ("kinds", "shown"),
    [(("vllm", "vllm"), "vllm"), (("sglang", "vllm"), "sglang"), (("vllm", "openai"), "openai")],
)
def test_the_status_has_the_kind_of_the_servers_of_models_that_are_forwarded(
    kinds: tuple[str, ...], shown: str
) -> None:
    async def scenario(asker: Asker) -> None:
        for number, kind in enumerate(kinds):
            card = make_card(server_url=f"http://gpu{number}", server_kind=kind)
            asker.pool.join(f"w{number}", card=card)
        status = await asker.ask(AskStatus(3))
        assert isinstance(status, PoolStatus)
        assert status.models[0].server_kind == ""

        asker.view.forwarded = {status.models[0].model}

        status = await asker.ask(AskStatus(4))
        assert isinstance(status, PoolStatus)
        assert status.models[0].server_kind == shown

    run(scenario)


def test_the_status_counts_workers_by_role_and_how_full_they_are() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("w1", "w2", "w3")
        asker.pool.say(worker_key("w2"), WorkerDraining())
        asker.view.out_of_reach = {worker_key("w3"): "unreachable"}
        asker.pool.say(worker_key("w1"), RequestStarted("other", 100, 4, 7))

        status = await asker.ask(AskStatus(3))

        assert isinstance(status, PoolStatus)
        (model,) = status.models
        (role,) = model.roles
        assert (model.model, model.block_size, model.max_sequence_length) == ("m", BLOCK_SIZE, 4096)
        assert (role.ready, role.draining, role.unreachable, role.requests, role.capacity) == (1, 1, 1, 1, 16)
        assert (status.ready, status.waiting_requests, status.saturation) == (True, 5, 1 / 16)
        asker.view.ready = False
        assert await asker.ask(AskStatus(4)) == PoolStatus(4, False)

    run(scenario)


def test_bytes_that_are_no_message_are_dropped_and_the_next_message_is_answered() -> None:
    async def scenario(asker: Asker) -> None:
        asker.pool.join("w1")
        for frame in (b"", b"\xc1", b"\x93\xa6Select", codec.from_pool.encode(PoolStatus(1, True))):
            await asker.tell(frame)

        assert isinstance(await asker.select("r"), Selected)

    run(scenario)


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    async def scenario(asker: Asker) -> None:
        port = int(asker.plane.endpoint.rpartition(":")[2])
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        selector = asker.pool.selector(make_policy("kv"))
        try:
            with pytest.raises(OSError, match=f"binding select_port: 127.0.0.1:{port} cannot be used"):
                SelectPlane(context, "127.0.0.1", port, cast(Any, asker.view), RouterState(selector), SystemClock())
        finally:
            context.destroy(linger=0)

    run(scenario)
